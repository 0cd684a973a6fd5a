"""Runs with a failing reward function: one short run per fault.

    python -m experiments.reward_faults

Each is `posttrain.main` (without its report) on the tiny arithmetic model from
random weights: six steps of GRPO, rewarded by the environment's grade and by a
second function that fails in step 2 alone, or in every step from there on.
Prints one Markdown table, within three minutes on two cores; exits with 1 if a
run does not handle its fault as `check` demands. The hung threads sleep for an
hour: the program ends earlier, so no code waits for them.
"""

import asyncio
import contextlib
import dataclasses
import io
import json
import logging
import pathlib
import tempfile
import time
from unittest import mock

from posttrain import main, schema
from posttrain.config import load as config
from posttrain.metrics import writers
from posttrain.report import page

STEPS, FAILS_AT, TIMEOUT = 6, 2, 1.0
ROLLOUTS = 16  # in a step of this recipe
BUDGET = schema.RewardFn().max_faults
# Kind of fault -> rollouts without a reward in a step with it; 0 = no fault.
KINDS = {
  'raises': 16,
  'hangs': 16,
  'hangs (async)': 16,
  'NaN': 16,
  'one NaN': 1,
  'wrong length': 16,
  'None': 0,
  'slow': 0,
}
PREFIX = 'rewards.short: experiments.reward_faults:reward '


def reward(rollouts, completion_ids, kind, last):
  """Returns -length / 40 per rollout; fails in steps 2 to `last`."""
  sound = [-len(ids) / 40 for ids in completion_ids]
  # Uids count up over the run, so this needs no state.
  step = 1 + rollouts[0].uid % (2**40) // ROLLOUTS
  return _fail(kind, sound) if FAILS_AT <= step <= last else sound


def _fail(kind, sound):
  match kind:
    case 'raises':
      raise ConnectionError('no route to the grader')
    case 'hangs':
      time.sleep(3600)
    case 'hangs (async)':
      return asyncio.sleep(3600)
    case 'NaN':
      return [float('nan') for _ in sound]
    case 'one NaN':
      return [float('nan'), *sound[1:]]
    case 'None':
      return [None for _ in sound]
    case 'wrong length':
      return sound[1:]
    case 'slow':
      time.sleep(0.6 * TIMEOUT)
      return sound


def recipe(kind: str, last: int, cache: pathlib.Path) -> schema.Run:
  """Returns GRPO on the environment's grade and the failing function."""
  run = main.load('configs/arithmetic.py:tiny')
  stage = run.stages['grpo']
  failing = schema.RewardFn(
    'experiments.reward_faults:reward',
    timeout=TIMEOUT,
    kwargs={'kind': kind, 'last': last},
  )
  rewards = {'env': schema.RewardFn(), 'short': failing}
  entry = dataclasses.replace(stage.envs['arithmetic'], rewards=rewards)
  stage = dataclasses.replace(
    stage,
    init='random',
    steps=STEPS,
    envs={'arithmetic': entry},
    optim=schema.Optim(lr=1e-3, warmup_steps=0),
    eval=schema.Eval(prompts=2, samples=0, max_tokens=8),
  )
  return dataclasses.replace(
    run, stages={'grpo': stage}, compilation_cache=str(cache)
  )


def run_once(kind: str, last: int, scratch: pathlib.Path) -> dict:
  """Runs one fault to its end; returns exit code, counts and stderr."""
  workdir = pathlib.Path(tempfile.mkdtemp(dir=scratch))
  path, warnings = workdir / 'recipe.json', []
  run = recipe(kind, last, scratch / 'compiled')
  path.write_text(json.dumps(config.to_dict(run)))
  with (
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(io.StringIO()) as stderr,
    mock.patch.object(logging.getLogger('absl'), 'handle', warnings.append),
    mock.patch.object(page, 'write'),  # takes longer than the rest
  ):
    code = main.main([f'--config={path}', f'--workdir={workdir}'])
  rows = writers.read(str(workdir / 'metrics.jsonl'))[1:]
  errors = list(workdir.glob('rollouts/grpo_errors_*.jsonl'))
  return {
    'exit': code,
    'steps': len(rows),
    'stderr': stderr.getvalue(),
    'faults': sum(len(x.read_text().splitlines()) for x in errors),
    'excluded': [int(row['rollout/ungraded/arithmetic']) for row in rows],
    'warned': sum(PREFIX in warning.getMessage() for warning in warnings),
    'counted': sum(row['rewards/short/faults/arithmetic'] for row in rows),
  }


def check(kind: str, persists: bool, outcome: dict) -> str:
  """Checks the outcome of a run; returns it in words."""
  excluded, stops = KINDS[kind], persists and KINDS[kind] > 0
  steps = FAILS_AT - 1 + BUDGET if stops else STEPS
  bad = range(FAILS_AT, 1 + (STEPS if persists else FAILS_AT))
  faults = (BUDGET + 1 if stops else len(bad)) * (excluded > 0)
  expected = {
    'exit': int(stops),
    'steps': steps,
    'faults': faults,
    'counted': faults - stops,  # the step that stops the run has no metrics
    'excluded': [excluded * (i in bad) for i in range(1, steps + 1)],
    'warned': 1 if kind == 'slow' else faults,
  }
  actual = {key: outcome[key] for key in expected}
  assert actual == expected, f'{kind} must give {expected}: got {outcome}'
  if stops:
    words = (
      f'{PREFIX}must fail at most max_faults={BUDGET} times in a row: got '
    )
    assert words in outcome['stderr'], outcome['stderr']
    return 'stopped; the error names function and fault'
  if kind == 'None':
    return "went on with the environment's grade"
  return f'{"left them out" if excluded else "scored all"}, warned, went on'


def table() -> None:
  """Runs all faults; prints the table."""
  print(
    f'| fault | in | outcome | steps of {STEPS} | faults | '
    'rollouts left out | exit |\n' + 7 * '|---' + '|'
  )
  with tempfile.TemporaryDirectory() as scratch:
    for kind in KINDS:
      for last in (FAILS_AT, STEPS):
        outcome = run_once(kind, last, pathlib.Path(scratch))
        cells = (
          kind,
          'one step' if last == FAILS_AT else 'every step',
          check(kind, last == STEPS, outcome),
          outcome['steps'],
          outcome['faults'],
          sum(outcome['excluded']),
          outcome['exit'],
        )
        print('|', ' | '.join(map(str, cells)), '|', flush=True)


if __name__ == '__main__':
  table()
