"""Runs of several processes: against one process, and with one of them lost.

    python -m experiments.trials.processes same [--counts=2,4]
        [--recipes=arithmetic,sql,dpo,rm]
    python -m experiments.trials.processes lost [--counts=4] [--trials=10]
        [--signals=SIGKILL,SIGSTOP,SIGTERM]
    python -m experiments.trials.processes elastic

All processes are on this machine, connected over loopback.

`same`: a run of one process is the truth. Runs of more continue from its first
stage, so that the second begins with the same weights. Compared are the
parameters after the first update; the tokens, of which those of the first
rollout must be the same; and a second run of as many processes, bit by bit.

`lost`: a signal is sent to one process at a random time. After SIGKILL and
SIGSTOP all others must end with 5 within `LIMIT` seconds, after SIGTERM all
must save and end with 75. The same command then continues the run; at its end
it must equal an undisturbed one bit by bit.

`elastic`: a run of four processes is continued by one, two and four, from the
same checkpoint; the tokens of the next step must be the same.

Prints a JSON object per line; exits non-zero where something is wrong.
"""

import itertools
import json
import pathlib
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time

import numpy as np

from experiments.benchmarks import timing
from experiments.trials import base, kill_resume

LIMIT = 30.0  # seconds for all to end after one is lost
SHORT = {'checkpoint.every': 1, 'checkpoint.keep_every': 1}
SHORT['metrics.progress'] = False
TOKENS = {'metrics.export_tokens': 1}
RECIPES = {  # name -> recipe, second stage, overrides
  'arithmetic': (
    'arithmetic',
    'grpo',
    {**kill_resume.setting('grpo'), **TOKENS, 'grpo.steps': 8},
  ),
  'sql': ('sql', 'grpo', TOKENS),
  'dpo': (
    'arithmetic_dpo',
    'dpo',
    {**kill_resume.setting('dpo'), 'dpo.steps': 6},
  ),
  'rm': (
    'arithmetic_reward_model',
    'rm',
    {**kill_resume.setting('rm'), 'rm.steps': 6},
  ),
}


def start(name: str, workdir: pathlib.Path, count: int, **overrides):
  """Starts the processes of a run; their output is beside the workdir."""
  recipe, stage, own = RECIPES[name]
  overrides = {**own, **SHORT, f'{stage}.optim.warmup_steps': 0, **overrides}
  if name == 'sql':
    for x in ('sft', 'grpo'):
      overrides[f'{x}.batch.micro_batch_tokens'] = 1024
  with socket.socket() as sock:
    sock.bind(('127.0.0.1', 0))
    port = sock.getsockname()[1]
  argv = [f'--config=configs/{recipe}.py:tiny', f'--workdir={workdir}']
  argv += [f'--config.compilation_cache={workdir.parent / "cache"}']
  argv += [f'--config.{key}={value}' for key, value in overrides.items()]
  if count > 1:
    argv += [f'--coordinator=127.0.0.1:{port}', f'--num_processes={count}']
  result = []
  for i in range(count):
    own_argv = [*argv, f'--process_id={i}'] if count > 1 else argv
    with pathlib.Path(f'{workdir}.{i}.log').open('a') as log:
      options = {'stdout': subprocess.DEVNULL, 'stderr': log}
      result.append(base.start(base.MAIN, *own_argv, **options))
  return result


def wait(processes, seconds: float = 900.0) -> list[int | None]:
  """Returns the exit codes; None for processes that have not ended."""
  end = time.monotonic() + seconds
  while time.monotonic() < end and any(p.poll() is None for p in processes):
    time.sleep(0.05)
  return [process.poll() for process in processes]


def run(name: str, workdir: pathlib.Path, count: int, **overrides) -> float:
  """Runs to the end; returns the seconds; exits if the run failed."""
  begin = time.monotonic()
  processes = start(name, workdir, count, **overrides)
  codes = wait(processes)
  for process in processes:
    process.kill()
  if set(codes) != {0}:
    sys.exit(f'{workdir} must end with 0: got {codes}; see its logs')
  return round(time.monotonic() - begin, 1)


def tokens(workdir: pathlib.Path, stage: str) -> dict[str, list]:
  """Returns the exported sequences of a stage, by file, in sorted order."""
  return {
    path.name: sorted(
      json.loads(line)['ids'] for line in path.read_text().splitlines()
    )
    for path in sorted(workdir.glob(f'token_exports/{stage}_*.jsonl'))
  }


def same(args, scratch: pathlib.Path) -> bool:
  """Compares runs of several processes with runs of one."""
  good = True
  for name in args.recipes.split(','):
    stage, truth = RECIPES[name][1], scratch / f'{name}_1'
    timing.emit(recipe=name, processes=1, seconds=run(name, truth, 1))
    whole = tokens(truth, stage)
    for count in map(int, args.counts.split(',')):
      runs = [scratch / f'{name}_{count}{letter}' for letter in 'ab']
      for workdir in runs:
        shutil.copytree(
          truth, workdir, ignore=shutil.ignore_patterns(f'{stage}*', 'lock')
        )
        seconds = run(name, workdir, count)
      twice = kill_resume.differences(*map(kill_resume.outcome, runs))
      expected, got = [], []
      for workdir, arrays in ((truth, expected), (runs[0], got)):
        alone = scratch / 'first_update'  # the checkpoint after it, by itself
        step = pathlib.Path('checkpoints', stage, '1')
        shutil.copytree(workdir / step, alone / step)
        found = kill_resume.outcome(alone)['arrays'].items()
        arrays += [x for k, x in found if k.startswith(f'{stage}/params/')]
        shutil.rmtree(alone)
      error = max(
        float(np.abs(x - y).max() / np.abs(x).max())
        for x, y in zip(expected, got, strict=True)
      )
      own = tokens(runs[0], stage)
      differ = {
        file: sum(x != y for x, y in zip(ids, own[file], strict=True))
        for file, ids in whole.items()
      }
      fine = error < 1e-5 and not twice and not [*differ.values(), 0][0]
      good &= fine
      timing.emit(
        recipe=name,
        processes=count,
        seconds=seconds,
        first_update_error=float(f'{error:.2g}'),
        differs_from_itself=twice,
        sequences_that_differ={k: v for k, v in differ.items() if v},
        ok=fine,
      )
  return good


def lost(args, scratch: pathlib.Path) -> bool:
  """Loses one of several processes at random times; continues the runs."""
  name, count = 'arithmetic', int(args.counts.split(',')[-1])
  short = {'sft.steps': 8, 'sft.optim.warmup_steps': 0}
  rng, good = random.Random(args.seed), True
  run(name, scratch / 'first', count, **short)  # compiles
  whole = run(name, scratch / 'truth', count, **short)
  truth = kill_resume.outcome(scratch / 'truth')
  timing.emit(processes=count, undisturbed_s=whole)
  for number, trial in itertools.product(
    args.signals.split(','), range(args.trials)
  ):
    workdir = scratch / f'{number}_{trial}'
    processes = start(name, workdir, count, **short)
    # SIGSTOP for process 0, which has the coordinator, and for others.
    victim = trial % count if number == 'SIGSTOP' else rng.randrange(count)
    after = rng.uniform(1, whole)
    time.sleep(after)
    processes[victim].send_signal(getattr(signal, number))
    begin = time.monotonic()
    others = [x for i, x in enumerate(processes) if i != victim]
    codes = wait(processes if number == 'SIGTERM' else others, 2 * LIMIT)
    seconds = time.monotonic() - begin
    if number == 'SIGSTOP':  # it goes on, and finds itself alone
      processes[victim].send_signal(signal.SIGCONT)
      codes += wait(processes[victim : victim + 1], LIMIT)
    for process in processes:
      process.kill()
    end = base.PREEMPTED if number == 'SIGTERM' else base.PEER_LOST
    # The run may just have come to its end.
    fine = set(codes) in ({end}, {0}) and seconds <= LIMIT
    run(name, workdir, count, **short)
    wrong = kill_resume.differences(truth, kill_resume.outcome(workdir))
    good &= fine and not wrong
    timing.emit(
      signal=number,
      victim=victim,
      after_s=round(after, 1),
      codes=codes,
      seconds=round(seconds, 1),
      differs=wrong,
      ok=fine and not wrong,
    )
    shutil.rmtree(workdir)
  return good


def elastic(args, scratch: pathlib.Path) -> bool:
  """Continues a run of four processes with one, two and four."""
  del args
  name, next_tokens = 'arithmetic', []
  run(name, scratch / 'four', 4, **{'grpo.steps': 4})
  for count in (1, 2, 4):
    workdir = scratch / f'then_{count}'
    shutil.copytree(scratch / 'four', workdir)
    run(name, workdir, count)
    next_tokens.append(tokens(workdir, 'grpo')['grpo_000005.jsonl'])
    same_tokens = next_tokens[-1] == next_tokens[0]
    timing.emit(saved_by=4, continued_by=count, same_tokens=same_tokens)
  return all(x == next_tokens[0] for x in next_tokens)


def main() -> None:
  """Runs the command; exits non-zero where something is wrong."""
  parser = timing.parser(
    __doc__,
    counts='2,4',
    recipes=','.join(RECIPES),
    trials=10,
    signals='SIGKILL,SIGSTOP,SIGTERM',
    seed=0,
  )
  trials = {x.__name__: x for x in (same, lost, elastic)}
  parser.add_argument('trial', choices=trials)
  args = parser.parse_args()
  with tempfile.TemporaryDirectory() as folder:
    if not trials[args.trial](args, pathlib.Path(folder)):
      sys.exit('a run of several processes is wrong')


if __name__ == '__main__':
  main()
