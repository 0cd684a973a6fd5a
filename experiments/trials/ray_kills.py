"""Runs with Ray, whose processes are killed, against undisturbed ones.

    python -m experiments.trials.ray_kills --what=workers --trials=10 --seed=0
    python -m experiments.trials.ray_kills --what=trainer --trials=1

workers: a run plays its environment, and calls its reward, in Ray workers. In
some of its steps one that is in the middle of a call is killed (SIGKILL). The
undisturbed run calls both in threads.

trainer: `experiments.launch.cluster` runs two trainers, one of which is killed
in the middle of a step, and all are started again.

Parameters, optimizer state and metrics (except times and the count of lost
workers) must be equal bit by bit. Prints one JSON object per line; exits
non-zero where something differs.
"""

import argparse
import contextlib
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

from experiments.trials import base, kill_resume

STEPS, KILLS, LIMIT = 12, 5, 600
COUNT = 'rollout/worker_restarts'
RECIPE = 'experiments/launch/cluster/waiting.py'
TITLES = {  # of the process to kill, in its command line
  'workers': b'ray::_Actor.call',  # while it runs a call
  'trainer': b'--process_id=',
}


def start(what: str, workdir: pathlib.Path, disturbed: bool):
  """Starts a run; its output is beside the workdir."""
  words = [f'--workdir={workdir}']
  if what == 'workers':
    words += [f'--config={RECIPE}{":ray" * disturbed}']
    words += [f'--config.grpo.steps={STEPS}']
  else:
    words += ['--config=configs/arithmetic.py:tiny', '--hosts=2']
    words += ['--config.checkpoint.every=5']
  module = base.MAIN if what == 'workers' else 'experiments.launch.cluster'
  with pathlib.Path(f'{workdir}.log').open('wb') as log:
    return base.start(module, *words, stdout=log, stderr=subprocess.STDOUT)


def descendants(pid: int) -> dict[int, bytes]:
  """Returns the command lines of all processes below one, by id."""
  children, titles = {}, {}
  for path in pathlib.Path('/proc').glob('[0-9]*'):
    with contextlib.suppress(OSError):
      # 'pid (name) state parent ...'; the name may have any character.
      stat = (path / 'stat').read_bytes().rpartition(b')')[2].split()
      children.setdefault(int(stat[1]), []).append(int(path.name))
      titles[int(path.name)] = (path / 'cmdline').read_bytes()
  pids = list(children.get(pid, []))
  for parent in pids:  # grows
    pids += children.get(parent, [])
  return {child: titles.get(child, b'') for child in pids}


def kill(process, title: bytes, rng: random.Random, end: float) -> int:
  """Kills a process of a run whose command line has a title; 0: none."""
  while process.poll() is None and time.monotonic() < end:
    found = [x for x, t in descendants(process.pid).items() if title in t]
    if found:
      with contextlib.suppress(ProcessLookupError):
        os.kill(rng.choice(found), signal.SIGKILL)
      return 1
  return 0


def disturb(what: str, process, rng: random.Random, workdir) -> int:
  """Kills processes after some rows of metrics; returns how many."""
  kills, end = 0, time.monotonic() + LIMIT
  rows = sorted(rng.sample(range(1, STEPS + 1), KILLS))
  for row in rows if what == 'workers' else [rng.randint(12, 35)]:
    while process.poll() is None and len(base.rows(workdir)) < row:
      time.sleep(0.01)
    time.sleep(rng.uniform(0, 0.3))
    kills += kill(process, TITLES[what], rng, end)
  return kills


def outcome(process, workdir: pathlib.Path) -> tuple[dict, int]:
  """Waits for a run; returns its outcome, and the count of lost workers."""
  if code := process.wait(LIMIT):
    log = pathlib.Path(f'{workdir}.log').read_text()
    sys.exit(f'the run ended with {code}:\n{log[-5000:]}')
  result = kill_resume.outcome(workdir)
  return result, max(row.pop(COUNT, 0) for row in result['rows'])


def main(argv=None) -> None:
  """Runs the trials; exits with 1 if one differs."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--what', choices=TITLES, required=True)
  parser.add_argument('--trials', type=int, default=10)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args(argv)
  rng, good = random.Random(args.seed), True
  with tempfile.TemporaryDirectory() as folder:
    whole = pathlib.Path(folder, 'undisturbed')
    truth, _ = outcome(start(args.what, whole, False), whole)
    for trial in range(args.trials):
      workdir = pathlib.Path(folder, f'trial_{trial}')
      process = start(args.what, workdir, True)
      kills = disturb(args.what, process, rng, workdir)
      other, lost = outcome(process, workdir)
      differs = kill_resume.differences(truth, other)
      good &= bool(kills) and not differs
      kill_resume.emit(trial=trial, kills=kills, lost=lost, differs=differs)
  sys.exit(not good)


if __name__ == '__main__':
  main()
