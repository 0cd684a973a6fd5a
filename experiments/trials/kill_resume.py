"""Runs of SFT and another stage, killed many times, against an undisturbed one.

    python -m experiments.trials.kill_resume --kills=20 --seed=0
        [--stage=grpo|dpo|rm|sql|ppo|curriculum|reverse|countdown|wordle]
        [--set=grpo.eval.every=2 ...]

1. A run goes to its end undisturbed, with an empty compilation cache.
2. The same run is started again and again, and killed (SIGKILL) in a phase, a
   few milliseconds after the n-th entry into it (`doomed`), or a random time
   after its start, until it reaches its end; then from the beginning again,
   until there were enough kills.
3. Parameters, optimizer state and metrics (except times) of every run that
   reached its end must equal the truth bit by bit, in both stages.

Prints one JSON object per line; exits non-zero where something differs.
"""

import collections
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np
import orbax.checkpoint as ocp

from experiments.benchmarks import timing
from experiments.trials import base

# Metrics that differ between runs: times, and what each process counts anew.
TIMED = '^time/|^memory/|^compiles$|^rewards/.*/seconds/'
# Phase -> largest delay of the kill after the phase begins, in seconds.
DELAYS = {'rollout': 0.01, 'update': 0.005, 'save': 0.08, 'eval': 0.02}
# Easy questions: a tiny model soon answers some of them, and rewards differ
# within nearly every group.
SUMS = {
  'ops': "('+',)",
  'max_operand': 4,
  'worked': False,
  'train_tasks': 15,
  'eval_tasks': 2,
}
PAIRS = {'sizes': '(2,)', 'worked': False, 'train_tasks': 40, 'eval_tasks': 8}
# --stage -> (recipe, its stages, its environment, the environment's options)
RECIPES = {
  'grpo': ('arithmetic', ('sft', 'grpo'), 'arithmetic', SUMS),
  'dpo': ('arithmetic_dpo', ('sft', 'dpo'), 'arithmetic', SUMS),
  'rm': ('arithmetic_reward_model', ('sft', 'rm'), 'arithmetic', SUMS),
  'sql': ('sql', ('sft', 'grpo'), 'sql', {}),
  'ppo': ('algorithms/ppo', ('start', 'main'), 'sums', SUMS),
  'curriculum': ('algorithms/curriculum', ('start', 'main'), 'texts', {}),
  'reverse': ('reverse', ('sft', 'grpo'), 'reverse', {}),
  'countdown': ('countdown', ('sft', 'grpo'), 'countdown', PAIRS),
  'wordle': ('wordle', ('sft', 'grpo'), 'wordle', {}),
}


def setting(name: str) -> dict:
  """Returns the overrides of a recipe's options, by key.

  There are fewer slots than episodes, so that some wait and the engine decodes
  chunk by chunk.
  """
  _, (first, second), env, tasks = RECIPES[name]
  result = {
    'checkpoint.every': 2,
    'metrics.progress': False,
    f'{first}.steps': 40,
    f'{first}.optim.lr': 1e-2,
    f'{second}.steps': 20,
    f'{second}.rollout.slots': 8,
    f'{second}.rollout.chunk': 4,
  }
  if name in ('reverse', 'countdown', 'wordle'):
    # No answer is right so early, and the best step would be the first one.
    result |= {'sft.eval.best': None, 'sft.eval.stop_at': None}
    result['sft.batch.prompts_per_step'] = 16
  if name == 'countdown':  # rewards that differ within a group
    drawn = '{"drawn": {"fn": "configs.common:drawn", "isolate": False}}'
    result['grpo.envs.countdown.rewards'] = drawn
  if name in ('grpo', 'ppo'):
    result[f'{second}.envs.{env}.sampler.max_tokens'] = 16
  if name == 'curriculum':
    result['main.envs.texts.replay'] = '{"type": "groups"}'
  for stage in (first, second):
    result |= {f'{stage}.envs.{env}.env.{k}': x for k, x in tasks.items()}
  return result


def outcome(workdir: pathlib.Path) -> dict:
  """Returns the arrays of every stage of a run, and all metrics but times.

  Of a stage that selects: of its last step and of its best one.
  """
  arrays, folders = {}, {}
  for stage in sorted((workdir / 'checkpoints').iterdir()):
    steps = [int(x.name) for x in stage.iterdir() if x.name.isdigit()]
    newest = stage / str(max(steps))
    folders[stage.name] = newest
    host = json.loads((newest / 'host/metadata').read_text())
    if best := host.get('host', host).get('best'):
      folders[f'{stage.name}_best'] = stage / str(best['step'])
  for name, folder in folders.items():
    with ocp.PyTreeCheckpointer() as reader:
      saved = reader.metadata(folder / 'state').item_metadata.tree
      as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), saved)
      state = reader.restore(folder / 'state', restore_args=as_numpy)
    for path, x in jax.tree_util.tree_leaves_with_path(state):
      key = jax.tree_util.keystr(path, simple=True, separator='/')
      arrays[f'{name}/{key}'] = x
  rows = [
    {k: v for k, v in row.items() if not re.search(TIMED, k)}
    for row in base.rows(workdir)
  ]
  return {'arrays': arrays, 'rows': rows}


def differences(truth: dict, other: dict) -> list[str]:
  """Returns the names of everything that is not bitwise equal."""
  wrong = []
  if truth['rows'] != other['rows']:
    wrong.append('metrics')
  if truth['arrays'].keys() != other['arrays'].keys():
    wrong.append('tree')
  for path in truth['arrays'].keys() & other['arrays'].keys():
    a, b = (np.asarray(x['arrays'][path]) for x in (truth, other))
    if a.dtype != b.dtype or a.tobytes() != b.tobytes():
      wrong.append(path)
  return wrong


def start(args, scratch: pathlib.Path, name: str, **fault) -> subprocess.Popen:
  """Starts the run in a folder, under `doomed` if a fault is given."""
  options = [f'{key}={x}' for key, x in setting(args.stage).items()]
  return base.start(
    'experiments.trials.doomed' if fault else base.MAIN,
    *([json.dumps(fault)] if fault else []),
    f'--config=configs/{RECIPES[args.stage][0]}.py:tiny',
    f'--workdir={scratch / name}',
    f'--config.compilation_cache={scratch / "compiled"}',
    *(f'--config.{option}' for option in [*options, *args.set]),
    stdout=subprocess.DEVNULL,
  )


def finish(process: subprocess.Popen) -> bool:
  """Waits for a run; returns whether it reached its end; exits if it failed."""
  done = base.finish(process, 900)
  if done.code not in (0, -signal.SIGKILL):
    sys.exit(f'the run failed with {done.code}:\n{done.err}')
  return done.code == 0


def main() -> None:
  """Runs the command; exits non-zero if a killed run differs."""
  parser = timing.parser(__doc__, kills=20, seed=0)
  parser.add_argument('--stage', choices=RECIPES, default='grpo')
  parser.add_argument('--set', action='append', default=[], metavar='KEY=VALUE')
  args = parser.parse_args()
  counts, trial, wrong = collections.Counter(), 0, []
  rng = random.Random(args.seed)
  with tempfile.TemporaryDirectory() as folder:
    scratch = pathlib.Path(folder)
    report = scratch / 'report.json'
    begin = time.monotonic()
    finish(start(args, scratch, 'whole', report=str(report)))
    seconds = time.monotonic() - begin
    entries, truth = json.loads(report.read_text()), outcome(scratch / 'whole')
    timing.emit(
      stage=args.stage, undisturbed_s=round(seconds, 1), entries=entries
    )
    while counts.total() < args.kills:
      name, trial = f'trial_{trial}', trial + 1
      ended = False
      while counts.total() < args.kills and not ended:
        phase = rng.choice([*DELAYS, 'random'])
        if phase == 'random':
          kill = {'after_s': rng.uniform(0.0, seconds)}
          process = start(args, scratch, name)
          try:
            process.wait(kill['after_s'])
          except subprocess.TimeoutExpired:
            process.kill()
        else:
          left = 1 - len(base.rows(scratch / name)) / len(truth['rows'])
          # One too many now and then: else no run would get past its last step.
          most = 1 + round(left * entries.get(phase, 0))
          kill = {
            'entry': rng.randint(1, most),
            'delay': rng.uniform(0.0, DELAYS[phase]),
          }
          process = start(args, scratch, name, phase=phase, **kill)
        ended = finish(process)
        if not ended:
          counts[phase] += 1
          rows = len(base.rows(scratch / name))
          timing.emit(trial=name, phase=phase, rows=rows, **kill)
      finish(start(args, scratch, name))
      differs = differences(truth, outcome(scratch / name))
      timing.emit(trial=name, differs=differs)
      wrong += differs
  timing.emit(
    kills=counts.total(), by_phase=counts, runs=trial, wrong=len(wrong)
  )
  if wrong:
    sys.exit('a killed run differs from the undisturbed one')


if __name__ == '__main__':
  main()
