"""Runs with Ray, whose processes are killed, against undisturbed ones.

    python -m experiments.trials.ray_kills --what=workers --trials=10 --seed=0
    python -m experiments.trials.ray_kills --what=trainer --trials=1

workers: a run plays its environment, and calls its reward, in Ray workers. In
some of its steps one that is in the middle of a call is killed (SIGKILL). The
undisturbed run calls both in threads.

trainer: `experiments.launch.cluster` runs two trainers, one of which is killed
in the middle of a step, and all are started again. The undisturbed run is the
same command, without a kill.

Parameters, optimizer state and metrics (except times and the count of lost
workers) must be equal bit by bit. Prints one JSON object per line; exits non-
zero where something differs.
"""

import argparse
import contextlib
import json
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

from experiments.trials import kill_resume
from posttrain.metrics import writers

# Steps of a run with workers, and how many of them have a kill, each a random
# time after its beginning, in seconds.
STEPS, KILLS_EACH, DELAY = 12, 5, (0.0, 0.3)
LIMIT = 600  # the longest run, in seconds
COUNT = 'rollout/worker_restarts'
# Title of a worker's process while it runs a call.
BUSY = b'ray::_Actor.call'


def command(what: str, workdir: pathlib.Path, disturbed: bool) -> list[str]:
  """Returns the arguments of a run."""
  if what == 'workers':
    recipe = 'experiments/launch/cluster/waiting_grpo.py' + ':ray' * disturbed
    words = [f'--config={recipe}', f'--config.grpo.steps={STEPS}']
    return ['posttrain.main', *words, f'--workdir={workdir}']
  return [
    'experiments.launch.cluster',
    '--config=configs/arithmetic.py:tiny',
    f'--workdir={workdir}',
    '--hosts=2',
    '--config.checkpoint.every=5',
  ]


def launch(words: list[str], log: pathlib.Path) -> subprocess.Popen:
  """Starts a run; what it prints is in `log`."""
  with log.open('wb') as file:
    return subprocess.Popen(
      [sys.executable, '-m', *words], stdout=file, stderr=file
    )


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


def kill_workers(
  process: subprocess.Popen, rng: random.Random, workdir: pathlib.Path
) -> int:
  """Kills a busy worker in each of some steps; returns how many."""
  kills, end = 0, time.monotonic() + LIMIT
  for step in sorted(rng.sample(range(1, STEPS + 1), KILLS_EACH)):
    wait_for_rows(workdir, step, process)
    time.sleep(rng.uniform(*DELAY))
    busy = []
    while not busy and process.poll() is None and time.monotonic() < end:
      busy = [
        child
        for child, title in descendants(process.pid).items()
        if title.startswith(BUSY)
      ]
    with contextlib.suppress(ProcessLookupError, IndexError):
      os.kill(rng.choice(busy), signal.SIGKILL)
      kills += 1
  return kills


def wait_for_rows(
  workdir: pathlib.Path, count: int, process: subprocess.Popen
) -> None:
  """Waits until a run has written so many rows of metrics, or has ended."""
  path, end = workdir / 'metrics.jsonl', time.monotonic() + LIMIT
  while process.poll() is None and time.monotonic() < end:
    if path.exists() and len(writers.read(str(path))) >= count:
      return
    time.sleep(0.01)


def kill_trainer(
  process: subprocess.Popen, rng: random.Random, workdir: pathlib.Path
) -> int:
  """Kills a trainer after a random number of steps; returns 1 if it did."""
  wait_for_rows(workdir, rng.randint(12, 35), process)
  time.sleep(rng.uniform(*DELAY))
  trainers = [
    child
    for child, title in descendants(process.pid).items()
    if b'--process_id=' in title
  ]
  if trainers:
    os.kill(rng.choice(sorted(trainers)), signal.SIGKILL)
  return min(len(trainers), 1)


KILLS = {'workers': kill_workers, 'trainer': kill_trainer}


def finish(process: subprocess.Popen, log: pathlib.Path) -> float:
  """Waits for a run; exits if it failed."""
  begin = time.monotonic()
  try:
    code = process.wait(LIMIT)
  except subprocess.TimeoutExpired:
    process.kill()
    code = 'a timeout'
  if code:
    sys.exit(f'the run ended with {code}:\n{log.read_text()[-5000:]}')
  return time.monotonic() - begin


def outcome(workdir: pathlib.Path) -> tuple[dict, int]:
  """Returns a run's arrays and metrics, and the count of lost workers."""
  result = kill_resume.outcome(workdir)
  lost = [row.pop(COUNT, 0) for row in result['rows']]
  return result, max(lost)


def main(argv=None) -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--what', choices=KILLS, required=True)
  parser.add_argument('--trials', type=int, default=10)
  parser.add_argument('--seed', type=int, default=0)
  args = parser.parse_args(argv)
  with tempfile.TemporaryDirectory() as folder:
    sys.exit(check(args, pathlib.Path(folder)))


def check(args, scratch: pathlib.Path) -> int:
  """Runs the trials; returns 1 if one differs."""
  rng, wrong, log = random.Random(args.seed), [], scratch / 'log.txt'
  whole = scratch / 'undisturbed'
  seconds = finish(launch(command(args.what, whole, False), log), log)
  truth, _ = outcome(whole)
  row = {'undisturbed_s': round(seconds, 1), 'rows': len(truth['rows'])}
  print(json.dumps(row), flush=True)
  for trial in range(args.trials):
    workdir, begin = scratch / f'trial_{trial}', time.monotonic()
    process = launch(command(args.what, workdir, True), log)
    kills = KILLS[args.what](process, rng, workdir)
    finish(process, log)
    other, lost = outcome(workdir)
    differs = kill_resume.differences(truth, other)
    row = {
      'trial': trial,
      'kills': kills,
      'lost': lost,
      'seconds': round(time.monotonic() - begin, 1),
      'restarts': len(re.findall('before restart', log.read_text())),
      'differs': differs,
    }
    print(json.dumps(row), flush=True)
    wrong += differs if kills else ['no kill']
  return bool(wrong)


if __name__ == '__main__':
  main()
