"""What recipes learn, over seeds: one table, and a picture of the curves.

    python -m experiments.benchmarks.learning \\
        --recipes=algorithms/grpo,arithmetic --seeds=0,1,2 \\
        --jobs=2 --workdir=runs/learning
    python -m experiments.benchmarks.learning \\
        --recipes=algorithms/grpo --seeds=0,1,2 \\
        --vary=main.optim.average=0.95 --vary=main.optim.lr=1e-4,3e-4 \\
        --workdir=runs/factors
    python -m experiments.benchmarks.learning \\
        --recipes=algorithms/grpo,algorithms/rloo --starts=0,1 \\
        --seeds=10,11,12,13,14 --tune=optim.lr=5e-5,1e-4,2e-4,4e-4 \\
        --config.main.envs.sums.env.eval_tasks=1250 --workdir=runs/paired

1. Stages before a recipe's last one are its start. Each start runs once per
   seed, whatever recipes and variants share it.
2. The trials: the last stages, from copies of their starts. `--vary` adds
   variants with one change each.
3. The controls: each start once more, its last stage so much longer that it
   takes the CPU seconds of start and trial (the recipe as it is) together.
   Set-up, and what runs before the first step, do not grow.
4. WORKDIR/learning.md: before -> after: change +- its 95 % interval over seeds
   (Student's t, n - 1 degrees of freedom), in every environment that is
   evaluated; learning.jsonl has the same in full. `python -m posttrain.report`
   draws the curves of WORKDIR/runs.

With `--starts`, arms (recipes and variants) are compared in pairs:

1. The starts, each under its own seed, `--starts`.
2. `--tune=KEY=VALUES`: of each arm the last stage from the first start, under
   `--tune_seed`, with each value of a key of that stage. The highest sampled
   pass rate of the last step wins: the mean over the environments that train,
   over all where one of those is not evaluated; on the recipe's own tasks.
3. `--equal_cpu=true`: the steps of an arm are as many as take the CPU seconds
   of the first arm, set-up and evaluation aside, by the runs that won.
4. Of each arm the last stage from each start under each of `--seeds`, the arms
   in turns. Start and last step answer `--test` tasks that chose nothing: they
   come after those of every stage (`eval.skip`).
5. WORKDIR/paired.md: before -> after, the gain, and the difference to the first
   arm, with 95 % intervals of differences that are paired by start, seed and
   question, see `paired`; paired.jsonl. The answers to each question stay in
   WORKDIR/runs/NAME/rollouts. A control is an arm.

The same command continues what is left. Exit codes: those of `sweep`.
"""

import argparse
import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import pathlib
import re
import shutil
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from scipy import stats

from experiments.benchmarks import paired, timing
from experiments.launch import jobs as jobs_lib
from experiments.launch import results as results_lib
from experiments.launch import sweep
from posttrain import config, schema
from posttrain import main as program
from posttrain.envs import registry
from posttrain.metrics import writers

Row = Mapping[str, Any]
# Metric -> heading; pass@k is the largest k that was measured.
MEASURES = {
  'sampled_pass_rate': 'sampled',
  'pass_rate': 'greedy',
  'pass@': 'any of k',
  'entropy': 'entropy',
  'kl': 'KL',
  'nll': 'NLL',
  'accuracy': 'accuracy',
}
PAIRS = 'eval/pairs/rewards/accuracies'
# The measures that are compared in pairs.
PAIRED = ('sampled_pass_rate', 'pass_rate', 'derived', 'guessed')
# Files of a start that its branches do not take over.
_OWN = ('finished.json', 'lock', 'log.txt', 'config.json')


# The runs.


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
    return without_last(self.run)

  @property
  def origin(self) -> str:
    """Returns the stage whose weights the trial starts with."""
    name = self.run.stages[self.stage].init.removeprefix('stage:')
    stages = self.start.stages
    return name if name in stages else list(stages)[-1]

  @property
  def name(self) -> str:
    """Returns a name that is unique among the trials, and a folder's."""
    parts = filter(None, (self.recipe, self.change, f'seed={self.seed}'))
    name = '_'.join(parts)
    return jobs_lib.safe_name(name, name)


def without_last(run: schema.Run) -> schema.Run:
  """Returns a run without its last stage."""
  *before, _ = run.stages
  return dataclasses.replace(run, stages={k: run.stages[k] for k in before})


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
    for change, seed in itertools.product([(), *mine], seeds):
      words = [*overrides, ('seed', str(seed)), *([change] if change else [])]
      run = program.load(path, words)
      if len(run.stages) < 2:
        raise ValueError(
          f'{path} must have a stage to start from and one to measure: got '
          f'{tuple(run.stages)}'
        )
      trials.append(Trial(recipe, '='.join(change), seed, run))
  for change in map('='.join, changes):
    if change not in {trial.change for trial in trials}:
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


def start_job(trial: Trial, folder: str) -> jobs_lib.Job:
  """Returns the job of a trial's start; equal starts have one name."""
  text = json.dumps(config.to_dict(trial.start))
  digest = hashlib.sha256(text.encode()).hexdigest()[:8]
  return make_job(f'start_{digest}', trial.start, folder)


def control_job(trial: Trial, factor: float, folder: str) -> jobs_lib.Job:
  """Returns the job of a start whose last stage is `factor` times as long."""
  name, run = trial.origin, trial.start
  stage = run.stages[name]
  stage = dataclasses.replace(stage, steps=round(factor * stage.steps))
  run = dataclasses.replace(run, stages={**run.stages, name: stage})
  start = start_job(trial, folder).name
  return make_job(start.replace('start', 'control'), run, folder)


def branch(start: jobs_lib.Job, trial: jobs_lib.Job) -> None:
  """Copies a finished start to a trial's folder, unless there is one."""
  if not os.path.exists(trial.workdir):
    partial = f'{trial.workdir}.partial'
    shutil.rmtree(partial, ignore_errors=True)
    ignore = shutil.ignore_patterns(*_OWN)
    shutil.copytree(start.workdir, partial, ignore=ignore)
    os.rename(partial, trial.workdir)


def make_job(name: str, run: schema.Run, folder: str) -> jobs_lib.Job:
  """Writes the config of a run; returns its job."""
  path = pathlib.Path(folder, 'configs', f'{name}.json')
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(config.to_dict(run), indent=1))
  workdir = os.path.join(folder, 'runs', name)
  return jobs_lib.Job(
    name, str(path), (), (), workdir, flags=('--trust_config',)
  )


# What their rows say.


def evaluates(row: Row) -> bool:
  """Returns whether a row has an evaluation."""
  return any(name.startswith('eval/') for name in row)


def before_and_after(
  rows: Sequence[Row], stage: str, origin: str
) -> tuple[Row, Row] | None:
  """Returns the evaluations that a stage begins and ends with; None: not yet.

  Of a stage that selects, the end is its best step.

  Args:
    rows: of a run's metrics.jsonl.
    stage: the stage.
    origin: the stage whose weights it starts with, for one that is not
      evaluated at step 0.
  """
  own = [row for row in rows if row['stage'] == stage and evaluates(row)]
  earlier = [row for row in rows if row['stage'] == origin and evaluates(row)]
  if own and own[0]['step'] == 0:
    earlier = own[:1]
  if not (earlier and own):
    return None
  return writers.end(earlier), writers.end(own)


def seconds(rows: Sequence[Row], stage: str, name: str) -> float:
  """Returns the seconds of a stage by `time/elapsed` or `time/cpu`.

  A process that was killed loses those since its last row.
  """
  stages = [row['stage'] for row in rows]
  first = stages.index(stage)
  last = len(stages) - 1 - stages[::-1].index(stage)
  begin = rows[first - 1].get(name, 0.0) if first else 0.0
  return rows[last].get(name, math.nan) - begin


def envs(row: Row) -> list[str]:
  """Returns the environments of an evaluation, in order; 'pairs' for PAIRS."""
  found = (re.fullmatch('eval/(?:pass_rate|nll)/(.+)', name) for name in row)
  names = dict.fromkeys(match[1] for match in found if match)
  return [*names, *(['pairs'] if PAIRS in row else [])]


def value(row: Row, measure: str, env: str) -> float:
  """Returns a measure of an environment; NaN = it was not measured."""
  if measure == 'accuracy':
    return row.get(PAIRS, math.nan) if env == 'pairs' else math.nan
  if measure != 'pass@':
    return row.get(f'eval/{measure}/{env}', math.nan)
  pattern = re.compile(rf'eval/pass@(\d+)/{re.escape(env)}')
  found = {int(x[1]): row[x[0]] for x in map(pattern.fullmatch, row) if x}
  return found[max(found)] if found else math.nan


def interval(values: Sequence[float]) -> tuple[float, float]:
  """Returns (mean, half-width of its 95 % interval); NaN for one value."""
  mean = statistics.fmean(values)
  if len(values) < 2:
    return mean, math.nan
  error = statistics.stdev(values) / math.sqrt(len(values))
  return mean, float(stats.t.ppf(0.975, len(values) - 1)) * error


def measure(
  pairs: Sequence[tuple[Row, Row]], env: str
) -> dict[str, list[float]]:
  """Returns measure -> [before, after, change, half-width], over seeds."""
  results = {}
  for name in MEASURES:
    first, last = ([value(x[i], name, env) for x in pairs] for i in (0, 1))
    if any(map(math.isnan, last)):
      continue
    after = statistics.fmean(last)
    if any(map(math.isnan, first)):  # as KL, from the start itself
      results[name] = [math.nan, after, math.nan, math.nan]
    else:
      change = interval([b - a for a, b in zip(first, last, strict=True)])
      results[name] = [statistics.fmean(first), after, *change]
  return results


def result_rows(
  recipe: str, change: str, runs: Sequence[tuple[Row, Row, Sequence[Row], str]]
) -> list[dict[str, Any]]:
  """Returns a row per environment.

  Args:
    recipe: the recipe.
    change: the variant.
    runs: of each seed the evaluations before and after, all rows, and the
      stage whose seconds count.
  """
  if not runs:
    return []
  wall, cpu = (
    statistics.fmean(seconds(rows, stage, name) for *_, rows, stage in runs)
    for name in ('time/elapsed', 'time/cpu')
  )
  pairs = [run[:2] for run in runs]
  return [
    {
      **{'recipe': recipe, 'change': change, 'env': env, 'seeds': len(runs)},
      **{'measures': measure(pairs, env), 'wall_s': wall, 'cpu_s': cpu},
    }
    for env in envs(pairs[0][1])
    if env in envs(pairs[0][0])
  ]


def summarize(
  trials: Sequence[Trial], rows: Mapping[str, Sequence[Row]]
) -> list[dict[str, Any]]:
  """Returns a row per variant and environment.

  Args:
    trials: the trials; those without a last evaluation are left out.
    rows: name of a trial -> the rows of its metrics.jsonl.
  """
  results = []
  # `expand` lists the seeds of a variant one after the other.
  for (recipe, change), seeds in itertools.groupby(
    trials, lambda x: (x.recipe, x.change)
  ):
    runs = [
      (*both, rows[x.name], x.stage)
      for x in seeds
      if (both := before_and_after(rows[x.name], x.stage, x.origin))
    ]
    results += result_rows(recipe, change, runs)
  return results


def table(results: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the lines of a Markdown table of results."""
  shown = [x for x in MEASURES if any(x in row['measures'] for row in results)]
  header = ['recipe', 'change', 'environment', 'seeds']
  header += [*(MEASURES[name] for name in shown), 'wall s', 'CPU s']

  def number(x: float) -> str:
    return '' if math.isnan(x) else f'{x:.0f}'

  def cell(name: str, row: Mapping[str, Any]) -> str:
    if name not in row['measures']:
      return ''
    before, after, change, width = row['measures'][name]
    if math.isnan(before):
      return f'{after:.3f}'
    text = f'{before:.3f} -> {after:.3f}: {change:+.3f}'
    return text if math.isnan(width) else f'{text} +- {width:.3f}'

  lines = []
  for row in results:
    cells = [row['recipe'], row['change'], row['env'], row['seeds']]
    cells += [cell(name, row) for name in shown]
    cells += [number(row['wall_s']), number(row['cpu_s'])]
    lines.append(cells)
  return results_lib.markdown(header, lines)


def write(folder: str, name: str, lines: Sequence[str], rows) -> None:
  """Prints a table; writes it to NAME.md, and rows to NAME.jsonl."""
  text = '\n'.join(lines)
  print(text, flush=True)
  pathlib.Path(folder, f'{name}.md').write_text(f'{text}\n')
  write_rows(pathlib.Path(folder, f'{name}.jsonl'), rows)


def write_rows(path: pathlib.Path, rows: Iterable[Row]) -> None:
  """Writes rows as lines of JSON."""
  path.write_text(''.join(f'{writers.dumps(row)}\n' for row in rows))


# Arms from shared starts, compared in pairs.


def continued(
  trial: Trial, start: jobs_lib.Job, seed: int, values: Row, folder: str
) -> jobs_lib.Job:
  """Returns the job of a last stage alone, from a finished start.

  It selects nothing, and is evaluated at its start and end.

  Args:
    trial: the trial; its seed is the start's.
    start: the start; references to earlier stages become paths to its own.
    seed: the seed of this job.
    values: changes of the stage, key -> text.
    folder: the folder of all runs.
  """
  stages = {trial.stage: trial.run.stages[trial.stage]}
  run = dataclasses.replace(trial.run, seed=seed, stages=stages)
  text = json.dumps(config.to_dict(run))
  for name in trial.start.stages:
    path = os.path.abspath(os.path.join(start.workdir, 'checkpoints', name))
    text = text.replace(f'"stage:{name}"', json.dumps(path))
  node = config.from_dict(json.loads(text))
  last = ('eval.best', 'eval.patience', 'eval.stop_at', 'eval.every')
  changes = {**dict.fromkeys(last, 'None'), **values}.items()
  config.override_all(node, [(f'{trial.stage}.{k}', x) for k, x in changes])
  words = [trial.recipe, trial.change, f'start={trial.seed}', f'seed={seed}']
  name = '_'.join(filter(None, [*words, *(f'{k}={values[k]}' for k in values)]))
  return make_job(jobs_lib.safe_name(name, name), config.build(node), folder)


def num_choosing(trials: Sequence[Trial], test: int) -> int:
  """Returns the number of evaluation tasks that may choose, in any stage.

  Raises:
    ValueError: an environment has fewer than `test` tasks after those.
  """
  first = max(
    cfg.skip + cfg.prompts + (cfg.best is not None) * cfg.best_prompts
    for trial in trials
    for cfg in (stage.eval for stage in trial.run.stages.values())
  )
  for trial in trials:
    for name, entry in trial.run.stages[trial.stage].envs.items():
      count = len(registry.make(name, entry.env).source('eval', 0))
      if 0 < count < first + test:  # 0: it is not evaluated
        raise ValueError(
          f'config.{trial.stage}.envs.{name}.env must have {first + test} '
          f'evaluation tasks, --test={test} after {first}: got {count}'
        )
  return first


def step_seconds(rows: Sequence[Row]) -> float:
  """Returns the CPU seconds per step, without the first and the last row."""
  inner = rows[1:-1]
  growing = inner[-1]['time/cpu'] - inner[0]['time/cpu']
  return growing / (len(inner) - 1)


@dataclasses.dataclass
class Arm:
  """A recipe or a variant of it, from each start."""

  trials: Sequence[Trial]  # one per start
  values: dict[str, str]  # changes of the stage: what was tuned, and the steps
  choice: str = ''  # how they were chosen
  # Answers to the test questions: per start, one per seed.
  before: paired.Runs = ()
  after: paired.Runs = ()
  seconds: float = 0.0  # CPU seconds of a run's stage, the mean

  def tune(self, tried: Mapping[str, Sequence[Row]], key: str, seed: int):
    """Takes the value with the best sampled pass rate; returns its rows.

    Args:
      tried: the value as text -> the rows of its run.
      key: the key that is tuned, '' = none.
      seed: the seed of these runs.
    """
    entries = self.trials[0].run.stages[self.trials[0].stage].envs
    scores = {}
    for text, rows in tried.items():
      measured = {
        env: x
        for env in entries
        if not math.isnan(x := value(rows[-1], 'sampled_pass_rate', env))
      }
      trained = {env for env in entries if entries[env].ratio}
      used = trained if trained <= measured.keys() else measured
      scores[text] = statistics.fmean(measured[env] for env in used)
    best = max(scores, key=scores.__getitem__)
    if key:
      self.values[key] = best
      all_scores = ', '.join(f'{k}: {x:.3f}' for k, x in scores.items())
      self.choice = f'{key}={best} (seed {seed}: {all_scores})'
    return tried[best]

  def measure(self, jobs: Sequence[Sequence[jobs_lib.Job]]) -> None:
    """Reads the answers of the runs, [starts, seeds]."""
    stage = self.trials[0].stage
    rows = [[read(job) for job in own] for own in jobs]
    self.before, self.after = (
      [
        [
          paired.outcomes(job.workdir, stage, x[end]['step'])
          for job, x in zip(*both, strict=True)
        ]
        for both in zip(jobs, rows, strict=True)
      ]
      for end in (0, -1)
    )
    self.seconds = statistics.fmean(
      seconds(x, stage, 'time/cpu') for own in rows for x in own
    )

  def results(self, first: 'Arm') -> list[dict[str, Any]]:
    """Returns a row per environment, trained or not, and measure.

    With the difference to the first arm, if that evaluates the environment.
    """
    trial, rows = self.trials[0], []
    for key in itertools.product(trial.run.stages[trial.stage].envs, PAIRED):
      if key not in self.after[0][0]:
        continue
      runs = [self.before, self.after]
      if self is not first and key in first.after[0][0]:
        runs.append(first.after)
      before, after, *base = paired.grids(runs, key)
      gain, *others = [paired.interval(after - x) for x in (before, *base)]
      env, name = key
      rows.append(
        {
          **{'recipe': trial.recipe, 'change': trial.change, 'env': env},
          **{'choice': self.choice, 'measure': name, 'shape': after.shape},
          **{'before': before.mean(), 'after': after.mean(), 'gain': gain},
          **{'difference': others[0] if others else None},
          **{'cpu_s': self.seconds},
        }
      )
    return rows


def compare(
  trials: Sequence[Trial],
  starts: Mapping[str, jobs_lib.Job],
  skip: int,
  args: argparse.Namespace,
) -> int:
  """Tunes, runs and compares arms; returns the exit code.

  Args:
    trials: one per arm and start, arm by arm.
    starts: name of a trial -> its start, finished.
    skip: number of evaluation tasks before those of the test.
    args: of the command.
  """
  seeds, folder = list(map(int, args.seeds.split(','))), args.workdir
  key, texts = jobs_lib.parse_sweep(args.tune) if args.tune else ('', ('',))
  test = {'eval.skip': str(skip), 'eval.prompts': str(args.test)}
  groups = itertools.groupby(trials, lambda x: (x.recipe, x.change))
  arms = [Arm(list(own), {}) for _, own in groups]

  def job(trial: Trial, seed: int, values: Row) -> jobs_lib.Job:
    return continued(trial, starts[trial.name], seed, values, folder)

  if args.tune or args.equal_cpu == 'true':
    tried = [
      [
        job(x.trials[0], args.tune_seed, {key: text} if key else {})
        for x in arms
      ]
      for text in texts
    ]
    if code := sweep.play([x for own in tried for x in own], args.jobs):
      return code
    budget = math.nan
    for arm, own in zip(arms, zip(*tried, strict=True), strict=True):
      rows = dict(zip(texts, map(read, own), strict=True))
      best = arm.tune(rows, key, args.tune_seed)
      if args.equal_cpu == 'true':
        trial, each = arm.trials[0], step_seconds(best)
        if math.isnan(budget):
          budget = each * trial.run.stages[trial.stage].steps
        arm.values['steps'] = str(round(budget / each))
        arm.choice = f'{arm.choice} {arm.values["steps"]} steps'.strip()
  # The arms in turns, so that the machine's other work is shared by all.
  jobs = [
    [[job(x.trials[i], seed, x.values | test) for x in arms] for seed in seeds]
    for i in range(len(arms[0].trials))
  ]
  unique = {x.name: x for a in jobs for b in a for x in b}
  if code := sweep.play(list(unique.values()), args.jobs):
    return code
  for i, arm in enumerate(arms):
    arm.measure([[x[i] for x in own] for own in jobs])
  results = [row for arm in arms for row in arm.results(arms[0])]
  write(folder, 'paired', paired_table(results), results)
  return 0


def paired_table(results: Sequence[Row]) -> list[str]:
  """Returns the lines of a Markdown table of `Arm.results`."""

  def cell(values: Sequence[float]) -> str:
    mean, low, high = values
    return f'{mean:+.3f} [{low:+.3f}, {high:+.3f}]'

  header = ['recipe', 'change', 'chosen', 'environment', 'measure']
  header += ['starts x seeds x questions', 'before -> after', 'gain']
  header += ['minus the first arm', 'CPU s']
  lines = []
  for row in results:
    lines.append(
      [
        *(row[x] for x in ('recipe', 'change', 'choice', 'env', 'measure')),
        ' x '.join(map(str, row['shape'])),
        f'{row["before"]:.3f} -> {row["after"]:.3f}',
        cell(row['gain']),
        cell(row['difference']) if row['difference'] else '',
        f'{row["cpu_s"]:.0f}',
      ]
    )
  return results_lib.markdown(header, lines)


# The command.


def read(job: jobs_lib.Job) -> list[Row]:
  """Returns the rows of a job's metrics.jsonl."""
  return writers.read_metrics(os.path.join(job.workdir, 'metrics.jsonl'))


def controls(
  trials: Sequence[Trial],
  rows: Mapping[str, Sequence[Row]],
  folder: str,
  at_a_time: int,
) -> tuple[int, list[dict[str, Any]]]:
  """Runs the controls of unchanged trials; returns (exit code, results)."""
  chosen: dict[str, tuple[Trial, jobs_lib.Job]] = {}
  for trial in trials:
    own = rows[trial.name]
    start = [row for row in own if row['stage'] == trial.origin]
    growing = start[-1]['time/cpu'] - start[0]['time/cpu']
    factor = 1 + seconds(own, trial.stage, 'time/cpu') / growing
    job = control_job(trial, factor, folder)
    if not trial.change:
      chosen.setdefault(job.name, (trial, job))
  code = sweep.play([job for _, job in chosen.values()], at_a_time)
  runs: dict[str, list] = {}
  for trial, job in chosen.values():
    both = before_and_after(rows[trial.name], trial.stage, trial.origin)
    longer, origin = read(job), trial.origin
    after = [x for x in longer if x['stage'] == origin and evaluates(x)]
    if both and after:
      run = both[0], writers.end(after), longer, origin
      runs.setdefault(trial.recipe, []).append(run)
  return code, [
    row
    for recipe, own in runs.items()
    for row in result_rows(recipe, f'{own[0][3]} for as long', own)
  ]


def overrides_of(words: Sequence[str]) -> list[tuple[str, str]]:
  """Returns the (dotted key, text) of --config.KEY=VALUE.

  Raises:
    ValueError: another flag is among them.
  """
  found = [
    re.fullmatch(r'--config\.([^=]+)=(.*)', word, re.S) for word in words
  ]
  for word, match in zip(words, found, strict=True):
    if match is None:
      raise ValueError(f'flags must be those of --help: got {word!r}')
  return [(match[1], match[2]) for match in found if match]


def guarded(run: Callable[..., int]) -> Callable[..., int]:
  """Returns a command of which a ValueError is one line and exit code 2."""

  @functools.wraps(run)
  def main(argv: Sequence[str] | None = None) -> int:
    try:
      return run(argv)
    except ValueError as error:
      print(f'error: {error}', file=sys.stderr)
      return 2

  return main


@guarded
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code."""
  parser = timing.parser(
    __doc__, seeds='0,1,2', jobs=1, test=1000, tune_seed=99
  )
  add = parser.add_argument
  add(
    '--recipes',
    required=True,
    help='files in configs/, without .py; with ; between if one has a comma',
  )
  add('--workdir', required=True, help='the folder of all runs')
  add('--vary', action='append', default=[], metavar='KEY=VALUE,VALUE')
  add('--control', default='true', choices=('true', 'false'))
  add('--starts', help='seeds of shared starts; compares arms in pairs')
  add('--tune', metavar='KEY=VALUE,VALUE', help='a key of the last stage')
  add('--equal_cpu', default='false', choices=('true', 'false'))
  args, rest = parser.parse_known_args(argv)
  parsed = map(jobs_lib.parse_sweep, args.vary)
  trials = expand(
    args.recipes.split(';' if ';' in args.recipes else ','),
    list(map(int, (args.starts or args.seeds).split(','))),
    [(key, text) for key, texts in parsed for text in texts],
    overrides_of(rest),
  )
  folder = args.workdir
  starts = {x.name: start_job(x, folder) for x in trials}
  unique = {job.name: job for job in starts.values()}
  skip = num_choosing(trials, args.test) if args.starts else 0
  seeds = sorted({x.seed for x in trials})
  if args.starts and len(unique) != len(seeds):
    raise ValueError(
      f'--starts={args.starts} must be shared by all arms, with equal options '
      f'before the last stage: got {len(unique)} starts'
    )
  if code := sweep.play(list(unique.values()), args.jobs):
    return code
  if args.starts:
    return compare(trials, starts, skip, args)
  jobs = [make_job(x.name, x.run, folder) for x in trials]
  for trial, job in zip(trials, jobs, strict=True):
    branch(starts[trial.name], job)
  code = sweep.play(jobs, args.jobs)
  rows = {x.name: read(job) for x, job in zip(trials, jobs, strict=True)}
  results = summarize(trials, rows)
  if args.control == 'true' and not code:
    code, more = controls(trials, rows, folder, args.jobs)
    results += more
  write(folder, 'learning', table(results), results)
  return code


if __name__ == '__main__':
  sys.exit(main())
