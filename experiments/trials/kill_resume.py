"""Runs of SFT and another stage, killed many times, against an undisturbed one.

    python -m experiments.trials.kill_resume --kills=20 --saving=5 --seed=0
        [--stage=grpo|dpo|rm] [--each=2]
        [--phases=rollout,update,save,eval,random] [--set=grpo.eval.every=2 ...]

1. A run goes to its end undisturbed, twice: with an empty compilation cache,
   and with a full one, which is the truth. The second stage must have changed
   every weight array of SFT's end, or the comparison would show nothing.
2. The same run is started again and again, and killed (SIGKILL) in a phase, a
   few milliseconds after the n-th entry into it, or a uniformly random time
   after its start, until it reaches its end; then from the beginning again,
   until there were enough kills in all, in each phase, and while a checkpoint
   was being written (its temporary folder remains).
3. Parameters, optimizer state and metrics (except times) of every run that
   reached its end must equal the truth bit by bit, in both stages.

`experiments/trials/doomed.py` kills a process in a phase.

Prints one JSON object per line; exits non-zero where something differs.
"""

import argparse
import collections
import dataclasses
import json
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
import numpy as np
import orbax.checkpoint as ocp

from posttrain import tree
from posttrain.checkpoints import reading, step_folders
from posttrain.metrics import writers

TIMED = '^time/|^rewards/.*/seconds/'  # metrics that differ between runs
# Phase -> largest delay of the kill after the phase begins, in seconds.
PHASES = {'rollout': 0.01, 'update': 0.005, 'save': 0.08, 'eval': 0.02}
# Easy questions: a tiny model soon answers some of them, and rewards differ
# within nearly every group. There are fewer slots than episodes, so that some
# wait and the engine decodes chunk by chunk.
TASKS = {
  'ops': "('+',)",
  'max_operand': 4,
  'worked': False,
  'train_tasks': 15,
  'eval_tasks': 2,
}
RECIPES = {  # second stage, the one with the phase 'rollout' -> its recipe
  'grpo': 'arithmetic',
  'dpo': 'arithmetic_dpo',
  'rm': 'arithmetic_reward_model',
}


def setting(stage: str) -> dict:
  """Returns the overrides of a recipe's options, by key."""
  grpo_only = {'grpo.envs.arithmetic.sampler.max_tokens': 16}
  return {
    'checkpoint.every': 2,
    'metrics.progress': False,
    'sft.steps': 40,
    'sft.optim.lr': 1e-2,
    f'{stage}.steps': 20,
    f'{stage}.rollout.slots': 8,
    f'{stage}.rollout.chunk': 4,
    **{key: x for key, x in grpo_only.items() if key.startswith(stage)},
    **{
      f'{name}.envs.arithmetic.env.{key}': value
      for name in ('sft', stage)
      for key, value in TASKS.items()
    },
  }


def command(
  workdir: pathlib.Path,
  cache: pathlib.Path,
  stage: str = 'grpo',
  options: Sequence[str] = (),
) -> list[str]:
  """Returns the arguments of a run that saves often.

  Args:
    workdir: its folder.
    cache: folder of the compilation cache.
    stage: the second stage.
    options: 'KEY=VALUE' of further options.
  """
  return [
    f'--config=configs/{RECIPES[stage]}.py:tiny',
    f'--workdir={workdir}',
    f'--config.compilation_cache={cache}',
    *(f'--config.{key}={value}' for key, value in setting(stage).items()),
    *(f'--config.{option}' for option in options),
  ]


def launch(argv, **watch) -> subprocess.Popen:
  """Starts a run, under `doomed` if options of its watch are given."""
  program = ['posttrain.main']
  if watch:
    program = ['experiments.trials.doomed', json.dumps(watch)]
  return subprocess.Popen(
    [sys.executable, '-m', *program, *argv],
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(process: subprocess.Popen) -> None:
  """Waits for a run; exits if it failed."""
  _, errors = process.communicate()
  if process.returncode:
    sys.exit(f'the run failed:\n{errors}')


def outcome(workdir: pathlib.Path) -> dict:
  """Returns the arrays of every stage of a run, and all metrics but times.

  Of a stage that selects: of its last step and of its best one.
  """
  arrays, folders = {}, {}
  for stage in sorted((workdir / 'checkpoints').iterdir()):
    folders[stage.name] = step_folders.newest(step_folders.local(str(stage)))
    best = reading.find(str(stage))
    if best != folders[stage.name]:
      folders[f'{stage.name}_best'] = best
  for name, folder in folders.items():
    with ocp.PyTreeCheckpointer() as reader:
      saved = reader.metadata(folder / 'state').item_metadata.tree
      as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(np.ndarray), saved)
      state = reader.restore(folder / 'state', restore_args=as_numpy)
    arrays |= {f'{name}/{k}': x for k, x in tree.flat(state).items()}
  rows = [
    {k: v for k, v in row.items() if not re.search(TIMED, k)}
    for row in writers.read(str(workdir / 'metrics.jsonl'))
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


def check_moved(truth: dict, stage: str = 'grpo') -> int:
  """Checks that a stage changed every weight array.

  Returns:
    The number of its updates with a gradient.
  """
  arrays = truth['arrays']
  for path in arrays:
    if path.startswith(f'{stage}/params/'):
      old = path.replace(stage, 'sft', 1)
      # A reward model's head begins at 0.
      before = 0 if path.endswith('params/reward/kernel') else arrays[old]
      assert (before != arrays[path]).any(), f'{stage} must train: not {path}'
  rows = truth['rows']
  return sum(r['stage'] == stage and r.get('optim/empty') == 0 for r in rows)


def unfinished(workdir: pathlib.Path) -> set[tuple[str, int]]:
  """Returns (name, inode) of the steps that are half written.

  Modification times would not do: deleting an old step changes them, too.
  """
  return {
    (path.name, path.stat().st_ino)
    for path in workdir.glob('checkpoints/*/*')
    if 'tmp' in path.name
  }


@dataclasses.dataclass
class Killer:
  """Starts runs and kills them."""

  rng: random.Random
  report: pathlib.Path  # written by `doomed`
  stage: str  # the second stage
  # The undisturbed run's duration, entries by phase, and rows of metrics.
  seconds: float
  entries: dict[str, int]
  rows: list[dict]

  def kill(self, phase: str, argv, workdir: pathlib.Path) -> dict | None:
    """Runs and kills; returns None if the run reached its end before."""
    before = unfinished(workdir)
    attempt = self._at_random if phase == 'random' else self._in_phase
    kill = attempt(phase, argv, workdir)
    if kill is None:
      return None
    # Written by this process, not by one killed before it.
    saving = bool(unfinished(workdir) - before)
    # Writing continues in the background after the call has returned.
    inside = kill.pop('inside') or (phase == 'save' and saving)
    last = (writers.read(str(workdir / 'metrics.jsonl')) or [{}])[-1]
    return {
      'phase': phase if inside else 'between',
      **kill,
      'stage': last.get('stage'),
      'step': last.get('step'),
      'saving': saving,
    }

  def _in_phase(self, phase: str, argv, workdir) -> dict | None:
    left = self._left(self.stage if phase == 'rollout' else '', workdir)
    # One too many now and then: else no run would get past its last step.
    entry = self.rng.randint(1, 1 + round(left * self.entries[phase]))
    delay = self.rng.uniform(0.0, PHASES[phase])
    self.report.unlink(missing_ok=True)
    process = launch(
      argv, report=str(self.report), phase=phase, entry=entry, delay=delay
    )
    process.wait()
    if process.returncode != -signal.SIGKILL:
      finish(process)
      return None
    process.stderr.close()
    inside = json.loads(self.report.read_text()) == [phase]
    return {'entry': entry, 'delay_ms': round(1e3 * delay, 1), 'inside': inside}

  def _at_random(self, phase: str, argv, workdir) -> dict | None:
    process = launch(argv)
    delay = self.rng.uniform(0.0, self.seconds)
    try:
      process.wait(delay)
    except subprocess.TimeoutExpired:
      process.kill()
    if process.wait() != -signal.SIGKILL:
      finish(process)
      return None
    process.stderr.close()
    return {'killed_after_s': round(delay, 2), 'inside': True}

  def _left(self, stage: str, workdir) -> float:
    """Returns the share of the rows (of a stage) that is not yet written."""

    def count(rows):
      return sum(stage in row['stage'] for row in rows)

    rows = writers.read(str(workdir / 'metrics.jsonl'))
    return 1.0 - count(rows) / count(self.rows)


def main(argv=None) -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument('--kills', type=int, default=20)
  parser.add_argument('--stage', choices=RECIPES, default='grpo')
  parser.add_argument('--each', type=int, default=1)
  parser.add_argument('--saving', type=int, default=5)
  parser.add_argument('--phases', default=','.join([*PHASES, 'random']))
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--set', action='append', default=[], metavar='KEY=VALUE')
  args = parser.parse_args(argv)
  args.phases = args.phases.split(',')
  if unknown := set(args.phases) - {*PHASES, 'random'}:
    parser.error(f'--phases must be of {[*PHASES, "random"]}: got {unknown}')
  with tempfile.TemporaryDirectory() as scratch:
    check(args, pathlib.Path(scratch))


def undisturbed(args, scratch: pathlib.Path) -> tuple[Killer, dict, list]:
  """Runs twice to the end; returns killer, truth, and their differences."""
  cold, warm, cache = (scratch / x for x in ('cold', 'warm', 'compiled'))
  report = scratch / 'watch.json'
  finish(launch(command(cold, cache, args.stage, args.set), report=str(report)))
  start = time.monotonic()
  finish(launch(command(warm, cache, args.stage, args.set)))
  seconds = time.monotonic() - start
  truth, entries = outcome(warm), json.loads(report.read_text())
  updates = check_moved(truth, args.stage)
  print(
    json.dumps(
      {
        'seed': args.seed,
        'undisturbed_s': round(seconds, 1),
        'rows': len(truth['rows']),
        'stage': args.stage,
        'updates': updates,
        'entries': entries,
      }
    ),
    flush=True,
  )
  killer = Killer(
    random.Random(args.seed),
    report,
    args.stage,
    seconds,
    entries,
    truth['rows'],
  )
  return killer, truth, differences(truth, outcome(cold))


def check(args, scratch: pathlib.Path) -> None:
  """Kills runs as often as the flags set; exits if one differs."""
  killer, truth, wrong = undisturbed(args, scratch)
  counts, trial = collections.Counter(), 0

  def next_phases() -> list[str]:
    """Returns the phases to choose from; none after enough kills."""
    short = [phase for phase in args.phases if counts[phase] < args.each]
    if not short and counts['saving'] < args.saving:
      short = ['save']
    enough = counts['kills'] >= args.kills
    return short or ([] if enough else args.phases)

  while next_phases():
    workdir = scratch / f'trial_{trial}'
    argv = command(workdir, scratch / 'compiled', args.stage, args.set)
    while phases := next_phases():
      kill = killer.kill(killer.rng.choice(phases), argv, workdir)
      if kill is None:
        break
      counts.update([kill['phase'], 'kills', *['saving'] * kill['saving']])
      print(json.dumps({'trial': trial, **kill}), flush=True)
    else:
      finish(launch(argv))
    differs = differences(truth, outcome(workdir))
    print(json.dumps({'trial': trial, 'differs': differs}), flush=True)
    wrong += differs
    trial += 1
  print(
    json.dumps(
      {
        'kills': counts.pop('kills'),
        'while_saving': counts.pop('saving', 0),
        'by_phase': counts,
        'runs': trial,
        'differences': len(wrong),
      }
    )
  )
  if wrong:
    sys.exit('a killed run differs from the undisturbed one')


if __name__ == '__main__':
  main()
