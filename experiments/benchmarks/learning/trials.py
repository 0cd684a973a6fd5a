"""The runs of a bench of learning: starts, trials and controls, as jobs.

A recipe's last stage is what is measured, its trial; the stages before it are
its start. Trials with equal starts share one run of it: `branch` copies that
run's folder, and the trial continues the copy.
"""

import dataclasses
import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence

from experiments.launch import jobs as jobs_lib
from posttrain import config, main, schema
from posttrain.util import files

# Files of a start that its branches do not take over.
_OWN = ('finished.json', 'lock', 'log.txt', 'config.json')


@dataclasses.dataclass(frozen=True)
class Trial:
  """A recipe, or a variant of it, with a seed.

  Fields:
    recipe: its name, as 'algorithms/grpo'.
    change: the override that makes the variant, 'KEY=VALUE'; '' = none.
    seed: the seed.
    run: all options.
  """

  recipe: str
  change: str
  seed: int
  run: schema.Run

  @property
  def stage(self) -> str:
    """Returns the name of the last stage."""
    return list(self.run.stages)[-1]

  @property
  def start(self) -> schema.Run:
    """Returns the run without its last stage."""
    stages = dict(self.run.stages)
    del stages[self.stage]
    return dataclasses.replace(self.run, stages=stages)

  @property
  def name(self) -> str:
    """Returns a name that is unique among the trials, and a folder's."""
    parts = filter(None, (self.recipe, self.change, f'seed={self.seed}'))
    name = '_'.join(parts)
    return jobs_lib.safe_name(name, name)


def expand(
  recipes: Sequence[str],
  seeds: Sequence[int],
  changes: Sequence[tuple[str, str]] = (),
  overrides: Sequence[tuple[str, str]] = (),
) -> list[Trial]:
  """Returns the trials of recipes, each as it is and with one change at a time.

  Args:
    recipes: names of files in configs/, without .py, with :ARGUMENT if need be.
    seeds: the seeds.
    changes: (dotted key, text of the value); each is a variant of all recipes
      that have the key.
    overrides: (dotted key, text), of all trials.

  Raises:
    ValueError: a recipe is unknown or has a single stage, a value is wrong, or
      no recipe has a change's key.
  """
  trials = []
  for recipe in recipes:
    name, colon, argument = recipe.partition(':')
    path = f'configs/{name}.py{colon}{argument}'
    known = config.load(path)
    mine = [(k, v) for k, v in changes if _has(known, k)]
    for change in [None, *mine]:
      for seed in seeds:
        last = [change] if change else []
        words = [*overrides, ('seed', str(seed)), *last]
        run = main.load(path, words)
        if len(run.stages) < 2:
          raise ValueError(
            f'{path} must have a stage to start from and one to measure: got '
            f'{tuple(run.stages)}'
          )
        trials.append(Trial(recipe, '='.join(change or ()), seed, run))
  tried = {trial.change for trial in trials}
  for change in map('='.join, changes):
    if change not in tried:
      raise ValueError(
        f'--vary={change} must name a key of a recipe: none of '
        f'{tuple(recipes)} has it'
      )
  return trials


def _has(node, key: str) -> bool:
  for name in key.split('.'):
    if not hasattr(node, 'keys') or name not in node:
      return False
    node = node[name]
  return True


def start_jobs(trials: Sequence[Trial], folder: str) -> dict[str, jobs_lib.Job]:
  """Returns the name of a trial -> the job of its start; equal ones are one."""
  return {
    trial.name: make_job(
      f'start_{_digest(_text(trial.start))}', trial.start, folder
    )
    for trial in trials
  }


def trial_jobs(trials: Sequence[Trial], folder: str) -> list[jobs_lib.Job]:
  """Returns the jobs of the trials, in order."""
  return [make_job(trial.name, trial.run, folder) for trial in trials]


def control_job(
  trial: Trial, start: jobs_lib.Job, factor: float, folder: str
) -> jobs_lib.Job:
  """Returns the job of a start whose last stage is `factor` times as long."""
  stages = dict(trial.start.stages)
  name = origin(trial)
  steps = round(factor * stages[name].steps)
  stages[name] = dataclasses.replace(stages[name], steps=steps)
  run = dataclasses.replace(trial.start, stages=stages)
  return make_job(start.name.replace('start', 'control'), run, folder)


def origin(trial: Trial) -> str:
  """Returns the stage whose weights the trial starts with."""
  init = trial.run.stages[trial.stage].init
  name = init.removeprefix('stage:')
  return name if name in trial.start.stages else list(trial.start.stages)[-1]


def branch(start: jobs_lib.Job, trial: jobs_lib.Job) -> None:
  """Copies a finished start to a trial's folder, unless there is one."""
  if os.path.exists(trial.workdir):
    return
  partial = f'{trial.workdir}.partial'
  shutil.rmtree(partial, ignore_errors=True)
  ignore = shutil.ignore_patterns(*_OWN)
  shutil.copytree(start.workdir, partial, ignore=ignore)
  os.rename(partial, trial.workdir)


def make_job(name: str, run: schema.Run, folder: str) -> jobs_lib.Job:
  """Writes the config of a run; returns its job."""
  configs = os.path.join(folder, 'configs')
  os.makedirs(configs, exist_ok=True)
  path = os.path.join(configs, f'{name}.json')
  with files.replacing(path) as file:
    file.write(_text(run))
  workdir = os.path.join(folder, 'runs', name)
  return jobs_lib.Job(name, path, (), (), workdir, flags=('--trust_config',))


def _text(run: schema.Run) -> str:
  return json.dumps(config.to_dict(run), indent=1)


def _digest(text: str) -> str:
  return hashlib.sha256(text.encode()).hexdigest()[:8]


def by_variant(
  trials: Sequence[Trial],
) -> Mapping[tuple[str, str], list[Trial]]:
  """Returns (recipe, change) -> its trials, one per seed."""
  groups: dict[tuple[str, str], list[Trial]] = {}
  for trial in trials:
    groups.setdefault((trial.recipe, trial.change), []).append(trial)
  return groups
