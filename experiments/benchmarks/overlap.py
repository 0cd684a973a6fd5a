"""Seconds of a step whose batches are sampled beside the updates.

    python -m experiments.benchmarks.overlap --workdir=DIR [--waits=0,20,200]
        [--lags=0,1,2,4] [--sides=one,devices,two] [--steps=24] [--repeats=1]

GRPO of the model of configs/arithmetic.py on episodes of 1 to `--turns` turns,
in an environment that waits so many milliseconds a turn. The learning rate is
too small to change a weight, so that every run samples the same tokens, which
is checked. Each lag runs

    one      in one process, on shared devices
    devices  in one process of two forced devices, one of them the sampler's
             (`mesh.sampler`); such a process has other thread counts
    two      with a sampler in a process of its own (`--samplers`)

Prints a row per run: seconds and CPU seconds of a step of all its processes,
from the middle of the run; `bound`, the largest of rollout alone and update
alone, both of lag 0, and half of the CPU seconds, as on two cores; the ratios
of the seconds to `bound` and to those of lag 0; and the shares of the step in
which learner and sampler are idle. A row below is for two busy cores: nothing
else may run.
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from experiments.benchmarks import groups, timing
from posttrain import main as program
from posttrain import schema, types
from posttrain.envs import registry

DEVICES = {
  'NPROC': '16',  # without it two CPU devices may deadlock
  'XLA_FLAGS': '--xla_force_host_platform_device_count=2',
}
FIRST, LAST = 7, 4  # steps at either end that are not measured
TOKENS = 'rollout/entropy/waits', 'batch/tokens'  # differ if tokens do


def main() -> None:
  """Prints the rows of all runs."""
  parser = timing.parser(
    __doc__,
    workdir='',
    waits='0,20,200',
    lags='0,1,2,4',
    sides='one,devices,two',
    steps=24,
    repeats=1,
    turns=4,
    prompts=16,
    child='',
  )
  args = parser.parse_args()
  if args.child:
    train(args, **json.loads(args.child))
    return
  for repeat in range(args.repeats):
    for wait in map(int, args.waits.split(',')):
      alone: dict[str, Any] = {}
      for side in args.sides.split(','):
        for lag in map(int, args.lags.split(',')):
          folder = pathlib.Path(args.workdir, f'{side}_{wait}_{lag}_{repeat}')
          row, rows = measure(args, folder, side, wait, lag)
          tokens = [[x[key] for key in TOKENS] for x in rows]
          first = alone.setdefault('tokens', tokens)
          assert tokens == first, f'{folder} has other tokens'
          if lag == 0:
            alone[side] = row
          if (zero := alone.get(side)) is not None:
            bound = max(zero['rollout'], zero['update'], row['cpu'] / 2)
            row |= {'bound': bound, 'of_bound': row['seconds'] / bound}
            row['of_lag_0'] = row['seconds'] / zero['seconds']
          numbers = {k: timing.rounded(x) for k, x in row.items()}
          timing.emit(side=side, wait=wait, lag=lag, repeat=repeat, **numbers)


def measure(
  args, folder: pathlib.Path, side: str, wait: int, lag: int
) -> tuple[dict[str, float], list[dict[str, Any]]]:
  """Trains in a process; returns means of its steps, and all their rows."""
  with contextlib.ExitStack() as stack:
    sampler = stack.enter_context(serving()) if side == 'two' else None
    child = {
      'workdir': str(folder),
      'wait': wait / 1000,
      'lag': lag,
      'own': side == 'devices',
      'samplers': [] if sampler is None else [sampler[0]],
    }
    options = {'turns': args.turns, 'prompts': args.prompts}
    process = subprocess.Popen(
      [
        *(sys.executable, '-m', 'experiments.benchmarks.overlap'),
        f'--child={json.dumps(child)}',
        f'--steps={args.steps}',
        *(f'--{key}={value}' for key, value in options.items()),
      ],
      env={**os.environ, **(DEVICES if side == 'devices' else {})},
      stderr=subprocess.DEVNULL,
    )
    # The sampler's CPU seconds, when the first and the last step are logged.
    spent, ends = [], [FIRST, args.steps - LAST]
    path = folder / 'metrics.jsonl'
    while process.poll() is None:
      time.sleep(0.02)
      done = path.read_bytes().count(b'\n') - 1 if path.exists() else 0
      while len(spent) < 2 and done >= ends[len(spent)]:
        spent.append(timing.cpu_seconds(sampler[1]) if sampler else 0.0)
    assert process.returncode == 0, f'{folder} failed'
  rows = [json.loads(line) for line in path.read_text().splitlines()]
  rows = [row for row in rows if row['step']]
  before, *steps = rows[FIRST - 1 : args.steps - LAST]
  count, end = len(steps), steps[-1]

  def mean(key: str) -> float:
    return sum(row.get(key, 0.0) for row in steps) / count

  seconds = (end['time/elapsed'] - before['time/elapsed']) / count
  used = end['time/cpu'] - before['time/cpu'] + spent[1] - spent[0]
  return {
    'seconds': seconds,
    'cpu': used / count,
    'rollout': mean('time/rollout'),
    'update': mean('time/update'),
    'hand_over': mean('time/hand_over'),
    'idle_learner': mean('time/idle/learner') / seconds,
    'idle_sampler': mean('time/idle/sampler') / seconds,
  }, rows


@contextlib.contextmanager
def serving() -> Iterator[tuple[str, int]]:
  """Runs a sampler; gives its address and its process id."""
  command = '-m', 'posttrain.serve', '--sampler', '--port=0'
  process = subprocess.Popen(
    [sys.executable, *command],
    stdout=subprocess.PIPE,
    stderr=subprocess.DEVNULL,
    text=True,
  )
  try:
    assert process.stdout is not None
    yield process.stdout.readline().split()[-1], process.pid
  finally:
    process.terminate()
    process.wait()


def train(
  args, workdir: str, wait: float, lag: int, own: bool, samplers: list[str]
) -> None:
  """Trains a run in this process."""
  registry.TYPES['arithmetic'] = lambda name, _: groups.Waits(
    name, args.turns, wait
  )
  entry = schema.EnvEntry(
    # No reward differs, and all tokens train.
    algorithm=schema.Grpo(prune_zero_advantage=False),
    sampler=schema.Policy(max_tokens=24),
    group_size=4,
  )
  stage = schema.Stage(
    envs={'waits': entry},
    rollout=schema.Rollout(
      slots=4 * args.prompts, prefill_tokens=20, max_lag=lag
    ),
    batch=schema.Batch(
      prompts_per_step=args.prompts, row_tokens=256, micro_batch_tokens=1024
    ),
    optim=schema.Optim(lr=1e-30, schedule='constant', weight_decay=0.0),
    eval=schema.Eval(prompts=1, samples=0),
    steps=args.steps,
  )
  run = schema.Run(
    model=schema.PRESETS['small'],
    mesh=schema.Mesh(sampler=schema.SamplerMesh() if own else None),
    stages={'main': stage},
    checkpoint=schema.Checkpoint(every=args.steps),
    metrics=schema.Metrics(progress=False, rollouts_every=None),
  )
  others = types.Samplers(tuple(samplers)) if samplers else None
  program.train(run, workdir, samplers=others)


if __name__ == '__main__':
  main()
