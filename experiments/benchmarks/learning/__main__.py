"""What recipes learn, over seeds: one table, and a picture of the curves.

    python -m experiments.benchmarks.learning \\
        --recipes=algorithms/grpo,arithmetic --seeds=0,1,2 \\
        --jobs=2 --workdir=runs/learning
    python -m experiments.benchmarks.learning \\
        --recipes=algorithms/grpo --seeds=0,1,2 \\
        --vary=main.optim.average=0.95 --vary=main.optim.lr=1e-4,3e-4 \\
        --workdir=runs/factors

1. Stages before a recipe's last one are its start. Each start runs once per
   seed, whatever recipes and variants share it.
2. The trials: the last stages, from copies of their starts. `--vary` adds
   variants with one change each.
3. The controls: each start once more, its last stage so much longer that it
   takes the CPU seconds of start and trial (the recipe as it is) together.
   Set-up, compilation, and the evaluations at its start and end do not grow.
4. WORKDIR/learning.md: before -> after: change +- its 95 % interval over
   seeds, in every environment that is evaluated; learning.jsonl has the same
   in full, learning.png the curves.

The same command continues what is left. Exit codes: those of `sweep`.
"""

import dataclasses
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.benchmarks.learning import picture, table, trials
from experiments.launch import jobs as jobs_lib
from experiments.launch import sweep
from posttrain.metrics import writers
from posttrain.util import files
from posttrain.util import flags as flags_lib


@dataclasses.dataclass
class Flags:
  """The command line."""

  recipes: str = flags_lib.required(
    'NAME,NAME', 'Files in configs/, without .py; NAME:tiny for an argument.'
  )
  workdir: str = flags_lib.required('DIR', 'The folder of all runs.')
  overrides: list[tuple[str, str]] = flags_lib.overrides()
  seeds: str = flags_lib.flag('0,1,2', 'The seeds.')
  vary: list[str] = flags_lib.several(
    'KEY=VALUE,VALUE',
    'Adds a variant per value of a key, of every recipe that has the key; '
    'variants have one change each.',
  )
  jobs: int = flags_lib.flag(1, 'Runs at a time.', least=1)
  control: bool = flags_lib.flag(True, 'Runs the controls.')
  reach: float | None = flags_lib.flag(
    None,
    'Adds the CPU seconds until this sampled pass rate, evaluations excluded: '
    'set eval.every.',
  )


PARSER = flags_lib.Parser(Flags, __doc__)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(_run, argv, 'configs.', 'experiments.')


def _run(flags: Flags) -> int:
  tried = trials.expand(
    flags.recipes.split(','),
    [_seed(text) for text in flags.seeds.split(',')],
    [
      (key, value)
      for key, values in map(jobs_lib.parse_sweep, flags.vary)
      for value in values
    ],
    flags.overrides,
  )
  starts = trials.start_jobs(tried, flags.workdir)
  jobs = trials.trial_jobs(tried, flags.workdir)
  code = sweep.play(
    list({x.name: x for x in starts.values()}.values()), flags.jobs
  )
  if code:
    return code
  for trial, job in zip(tried, jobs, strict=True):
    trials.branch(starts[trial.name], job)
  code = sweep.play(jobs, flags.jobs)
  rows = {
    trial.name: writers.read_metrics(os.path.join(job.workdir, 'metrics.jsonl'))
    for trial, job in zip(tried, jobs, strict=True)
  }
  results = summarize(tried, rows, flags.reach)
  if flags.control and not code:
    code, more = _controls(tried, rows, starts, flags)
    results += more
  write(results, tried, rows, flags.workdir)
  return code


def _seed(text: str) -> int:
  if not text.isdecimal():
    raise ValueError(f'--seeds must be numbers, as 0,1,2: got {text!r}')
  return int(text)


def _controls(
  tried: Sequence[trials.Trial],
  rows: Mapping[str, Sequence[table.Row]],
  starts: Mapping[str, jobs_lib.Job],
  flags: Flags,
) -> tuple[int, list[dict[str, Any]]]:
  """Runs the controls of unchanged trials; returns (exit code, results)."""
  chosen: dict[str, tuple[trials.Trial, jobs_lib.Job]] = {}
  for trial in tried:
    start = starts[trial.name]
    if not trial.change and start.name not in chosen:
      own = rows[trial.name]
      fixed, growing = table.fixed_and_growing(own, trials.origin(trial))
      more = table.seconds(own, trial.stage, 'time/cpu')
      factor = (growing + more) / growing
      job = trials.control_job(trial, start, factor, flags.workdir)
      chosen[start.name] = trial, job
  code = sweep.play([job for _, job in chosen.values()], flags.jobs)
  found: dict[str, list[tuple[trials.Trial, list[dict[str, Any]]]]] = {}
  for trial, job in chosen.values():
    path = os.path.join(job.workdir, 'metrics.jsonl')
    found.setdefault(trial.recipe, []).append(
      (trial, writers.read_metrics(path))
    )
  results = []
  for recipe, runs in found.items():
    pairs, times = [], []
    for trial, longer in runs:
      both = table.before_and_after(
        rows[trial.name], trial.stage, trials.origin(trial)
      )
      origin = trials.origin(trial)
      after = [
        row for row in longer if row['stage'] == origin and table.evaluates(row)
      ]
      if both and after:
        pairs.append((both[0], writers.end(after)))
        times.append(_times(longer, origin))
    name = f'{trials.origin(runs[0][0])} for as long'
    results += _results(recipe, name, pairs, times)
  return code, results


def summarize(
  tried: Sequence[trials.Trial],
  rows: Mapping[str, Sequence[table.Row]],
  reach: float | None = None,
) -> list[dict[str, Any]]:
  """Returns a row per variant and environment.

  Args:
    tried: the trials.
    rows: name of a trial -> the rows of its metrics.jsonl. Trials without a
      last evaluation are left out.
    reach: the sampled pass rate whose CPU seconds per seed are added.
  """
  results = []
  for (recipe, change), group in trials.by_variant(tried).items():
    pairs, times = [], []
    for trial in group:
      own = rows[trial.name]
      both = table.before_and_after(own, trial.stage, trials.origin(trial))
      if both:
        pairs.append(both)
        times.append(_times(own, trial.stage))
    found = _results(recipe, change, pairs, times)
    for result in found if reach is not None else ():
      result['reached_s'] = [
        table.seconds_to(rows[x.name], x.stage, result['env'], reach)
        for x in group
      ]
    results += found
  return results


def _times(rows: Sequence[table.Row], stage: str) -> tuple[float, float]:
  wall, cpu = (
    table.seconds(rows, stage, name) for name in ('time/elapsed', 'time/cpu')
  )
  return wall, cpu


def _results(recipe, change, pairs, times) -> list[dict[str, Any]]:
  if not pairs:
    return []
  wall, cpu = (statistics.fmean(x) for x in zip(*times, strict=True))
  both = [table.envs(row) for row in pairs[0]]
  return [
    {
      **{'recipe': recipe, 'change': change, 'env': env, 'seeds': len(pairs)},
      'measures': table.measure(pairs, env),
      **{'wall_s': wall, 'cpu_s': cpu},
    }
    for env in both[1]
    if env in both[0]
  ]


def write(
  results: Sequence[Mapping[str, Any]],
  tried: Sequence[trials.Trial],
  rows: Mapping[str, Sequence[table.Row]],
  folder: str,
) -> None:
  """Prints the table; writes it, the results in full and the picture."""
  lines = table.lines(results)
  print('\n'.join(lines), flush=True)
  with files.replacing(os.path.join(folder, 'learning.md')) as file:
    file.writelines(f'{line}\n' for line in lines)
  with files.replacing(os.path.join(folder, 'learning.jsonl')) as file:
    file.writelines(f'{writers.dumps(row)}\n' for row in results)
  curves: dict[str, dict[str, list[Sequence[table.Row]]]] = {}
  for (recipe, change), group in trials.by_variant(tried).items():
    seeds = [
      [row for row in rows[trial.name] if row['stage'] == trial.stage]
      for trial in group
    ]
    for env in group[0].run.stages[group[0].stage].envs:
      name = f'{recipe} {change}'.strip()
      curves.setdefault(env, {})[name] = seeds
  picture.draw(curves, os.path.join(folder, 'learning.png'))


if __name__ == '__main__':
  sys.exit(main())
