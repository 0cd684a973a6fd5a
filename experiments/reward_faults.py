"""What a run does whose reward function fails: one short run per fault.

    python -m experiments.reward_faults

Each is `posttrain.main` (without its report) on the tiny arithmetic model from
random weights: six steps of GRPO, rewarded by the environment's grade and by a
function beside it that fails in step 2 alone, or in every step from there on.
Prints one Markdown table, within three minutes on two cores; exits with 1 where
a run did something else than its fault demands. The hung threads sleep for an
hour: that this program ends before shows that nobody waits for them.
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
ROLLOUTS = 16  # of a step of this recipe
BUDGET = schema.RewardFn().max_faults
# Kind of fault -> rollouts that a step with it must do without; 0 = no fault.
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
MINE = 'rewards.short: experiments.reward_faults:reward '


def reward(rollouts, completion_ids, kind, last):
  """Likes short answers; fails in steps 2 to `last`."""
  sound = [-len(ids) / 40 for ids in completion_ids]
  # Uids count on over the run, so this needs no memory.
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
  """GRPO alone, with the function beside the environment's grade."""
  run = main.load('configs/arithmetic.py:tiny')
  stage = run.stages['grpo']
  fails = schema.RewardFn(
    'experiments.reward_faults:reward',
    timeout=TIMEOUT,
    kwargs={'kind': kind, 'last': last},
  )
  rewards = {'env': schema.RewardFn(), 'short': fails}
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


def play(kind: str, last: int, scratch: pathlib.Path) -> dict:
  """Runs it to its end; returns what it did."""
  workdir = pathlib.Path(tempfile.mkdtemp(dir=scratch))
  path, warnings = workdir / 'recipe.json', []
  run = recipe(kind, last, scratch / 'compiled')
  path.write_text(json.dumps(config.to_dict(run)))
  with (
    contextlib.redirect_stdout(io.StringIO()),
    contextlib.redirect_stderr(io.StringIO()) as said,
    mock.patch.object(logging.getLogger('absl'), 'handle', warnings.append),
    mock.patch.object(page, 'write'),  # takes longer than the rest
  ):
    code = main.main([f'--config={path}', f'--workdir={workdir}'])
  rows = writers.read(str(workdir / 'metrics.jsonl'))[1:]
  errors = list(workdir.glob('rollouts/grpo_errors_*.jsonl'))
  return {
    'exit': code,
    'steps': len(rows),
    'said': said.getvalue(),
    'faults': sum(len(x.read_text().splitlines()) for x in errors),
    'excluded': [int(row['rollout/ungraded/arithmetic']) for row in rows],
    'warned': sum(MINE in warning.getMessage() for warning in warnings),
    'counted': sum(row['rewards/short/faults/arithmetic'] for row in rows),
  }


def check(kind: str, persists: bool, did: dict) -> str:
  """Asserts what must have happened; returns it in words."""
  excluded, stops = KINDS[kind], persists and KINDS[kind] > 0
  steps = FAILS_AT - 1 + BUDGET if stops else STEPS
  bad = range(FAILS_AT, 1 + (STEPS if persists else FAILS_AT))
  faults = (BUDGET + 1 if stops else len(bad)) * (excluded > 0)
  expected = {
    'exit': int(stops),
    'steps': steps,
    'faults': faults,
    'counted': faults - stops,  # the step that stopped has no metrics
    'excluded': [excluded * (i in bad) for i in range(1, steps + 1)],
    'warned': 1 if kind == 'slow' else faults,
  }
  got = {key: did[key] for key in expected}
  assert got == expected, f'{kind} must do {expected}: got {did}'
  if stops:
    words = f'{MINE}must fail at most max_faults={BUDGET} times in a row: got '
    assert words in did['said'], did['said']
    return 'stopped, naming function and fault'
  if kind == 'None':
    return "went on with the environment's grade"
  return f'{"left them out" if excluded else "scored all"}, warned, went on'


def table() -> None:
  print(
    f'| fault | in | what the run did | steps of {STEPS} | faults | '
    'rollouts left out | exit |\n' + 7 * '|---' + '|'
  )
  with tempfile.TemporaryDirectory() as scratch:
    for kind in KINDS:
      for last in (FAILS_AT, STEPS):
        did = play(kind, last, pathlib.Path(scratch))
        cells = (
          kind,
          'one step' if last == FAILS_AT else 'every step',
          check(kind, last == STEPS, did),
          did['steps'],
          did['faults'],
          sum(did['excluded']),
          did['exit'],
        )
        print('|', ' | '.join(map(str, cells)), '|', flush=True)


if __name__ == '__main__':
  table()
