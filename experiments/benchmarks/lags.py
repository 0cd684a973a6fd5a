"""What a recipe learns from batches of older weights, by lag and correction.

    python -m experiments.benchmarks.lags --recipe=algorithms/grpo \\
        --lags=0,1,2,4,8 --seeds=0,1,2 --jobs=2 --workdir=runs/lags \\
        --config.main.steps=60 --config.main.batch.prompts_per_step=32

1. The start of each seed runs once: the stages before the recipe's last one.
2. The last stage runs from a copy of it, with each lag under each of
   `CORRECTIONS`, in turns, so that CPU seconds compare on one core.
3. WORKDIR/lags.md: sampled pass rate by step, greedy pass rate before and
   after, and CPU seconds, as means over the seeds that have finished.
   lags.jsonl has a row per run and evaluation.

The same command continues what is left; `--jobs=0` writes the tables of what
has been measured. Exit codes: those of `sweep`.
"""

import itertools
import json
import os
import statistics
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.benchmarks import learning, timing
from experiments.launch import results, sweep
from posttrain import config
from posttrain import main as program
from posttrain.losses import rl_types


def uncorrected(inputs: rl_types.Inputs):
  """Returns plain policy gradient, -A log pi, as if the policy had sampled.

      --config.grpo.loss.rl='{"type": "custom",
        "import_path": "experiments.benchmarks.lags:uncorrected"}'

  A loss of `loss.rl.type=custom`, and a wrong one where batches are sampled
  under older weights: no ratio corrects for them, and nothing bounds a token's
  change.
  """
  return -inputs.advantages * inputs.logprobs


def _rl(type: str, **values: Any) -> dict[str, str]:
  return {'loss.rl': json.dumps({'type': type, **values})}


_TWO = {'updates_per_rollout': '2'}
# Name -> changes of the stage. Each mask and weight is on top of the loss that
# it was published with, or of the default.
CORRECTIONS: dict[str, dict[str, str]] = {
  'dppo': {},
  'uncorrected': _rl(
    'custom', import_path='experiments.benchmarks.lags:uncorrected'
  ),
  'token_truncate': _rl('dppo', sampler_is_mode='token_truncate'),
  'token_mask': _rl(
    'dppo',
    sampler_is_mode='token_mask',
    sampler_is_clip_min=0.5,
    sampler_is_clip_max=5.0,
  ),
  'clip': _rl('clip'),
  'ipo': _rl('ipo'),
  'cispo': _rl('cispo'),
  'gspo': _rl('gspo'),
  'sequence_mask': _rl('dppo', sampler_is_mode='sequence_mask'),
  'off_policy_mask': _rl('clip', off_policy_mask=0.03),
  'decoupled, 2 updates': _rl('clip', sampler_is_mode='token_truncate') | _TWO,
  'clip, 2 updates': _rl('clip') | _TWO,
}


def expand(
  recipe: str,
  lags: Sequence[int],
  corrections: Sequence[str],
  seeds: Sequence[int],
  overrides: Sequence[tuple[str, str]] = (),
) -> list[tuple[int, str, learning.Trial]]:
  """Returns (lag, correction, trial), seeds before corrections.

  Args:
    recipe: name of a file in configs/, without .py, with :ARGUMENT if need be.
    lags, corrections, seeds: what to combine.
    overrides: (dotted key, text), of all trials.

  Raises:
    ValueError: the recipe or a value is unknown.
  """
  name, colon, argument = recipe.partition(':')
  path = f'configs/{name}.py{colon}{argument}'
  stage = config.load(path).stages[-1]
  trials = []
  for lag, seed, kind in itertools.product(lags, seeds, corrections):
    if kind not in CORRECTIONS:
      raise ValueError(f'--corrections must be of {list(CORRECTIONS)}: {kind}')
    changes = {'rollout.max_lag': str(lag), 'rollout.in_turns': 'True'}
    changes |= CORRECTIONS[kind]
    words = [(f'{stage}.{key}', text) for key, text in changes.items()]
    run = program.load(path, [*overrides, ('seed', str(seed)), *words])
    change = f'lag={lag}_{kind}'
    trials.append((lag, kind, learning.Trial(recipe, change, seed, run)))
  return trials


def evaluations(
  trial: learning.Trial, rows: Sequence[learning.Row]
) -> list[dict[str, Any]]:
  """Returns a row per evaluation of a trial's last stage and environment."""
  ends = [
    i
    for i, row in enumerate(rows)
    if row['stage'] == trial.stage and learning.evaluates(row)
  ]
  return [
    {
      'step': rows[i]['step'],
      'env': env,
      'sampled': learning.value(rows[i], 'sampled_pass_rate', env),
      'greedy': learning.value(rows[i], 'pass_rate', env),
      'cpu_s': learning.seconds(rows[: i + 1], trial.stage, 'time/cpu'),
    }
    for i in ends
    for env in learning.envs(rows[i])
  ]


def table(measured: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the lines of a Markdown table; of runs with a last evaluation."""
  steps = sorted({row['step'] for row in measured})
  ended = {
    (row['lag'], row['correction'], row['seed'])
    for row in measured
    if row['step'] == steps[-1]
  }
  groups: dict[tuple, dict[tuple, list[float]]] = {}
  for row in measured:
    key = row['lag'], row['correction']
    if (*key, row['seed']) in ended:
      group = groups.setdefault((*key, row['env']), {})
      for name in ('sampled', 'greedy', 'cpu_s'):
        group.setdefault((name, row['step']), []).append(row[name])
  header = ['lag', 'correction', 'environment', 'seeds']
  header += [f'sampled, step {step}' for step in steps]
  header += ['by seed', 'greedy', 'CPU s']
  lines = []
  for key, group in groups.items():
    last = group['sampled', steps[-1]]
    means = {name: statistics.fmean(values) for name, values in group.items()}
    cells = [*key, len(last)]
    cells += [f'{means["sampled", step]:.3f}' for step in steps]
    cells.append(' / '.join(f'{x:.3f}' for x in last))
    ends = (means['greedy', step] for step in (steps[0], steps[-1]))
    cells.append(' -> '.join(f'{x:.3f}' for x in ends))
    lines.append([*cells, f'{means["cpu_s", steps[-1]]:.0f}'])
  return results.markdown(header, lines)


@learning.guarded
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code."""
  parser = timing.parser(
    __doc__,
    recipe='algorithms/grpo',
    lags='0,1,2,4,8',
    corrections=';'.join(CORRECTIONS),
    seeds='0,1,2',
    jobs=1,
  )
  parser.add_argument('--workdir', required=True, help='the folder of all runs')
  args, rest = parser.parse_known_args(argv)
  folder = args.workdir
  trials = expand(
    args.recipe,
    list(map(int, args.lags.split(','))),
    args.corrections.split(';'),
    list(map(int, args.seeds.split(','))),
    learning.overrides_of(rest),
  )
  code = 0
  if args.jobs:
    starts = [learning.start_job(trial, folder) for *_, trial in trials]
    unique = {job.name: job for job in starts}
    if code := sweep.play(list(unique.values()), args.jobs):
      return code
    jobs = [learning.make_job(x.name, x.run, folder) for *_, x in trials]
    for start, job in zip(starts, jobs, strict=True):
      learning.branch(start, job)
    code = sweep.play(jobs, args.jobs)
  measured = []
  for lag, kind, trial in trials:
    job = learning.make_job(trial.name, trial.run, folder)
    if os.path.exists(job.workdir):
      named = {'lag': lag, 'correction': kind, 'seed': trial.seed}
      rows = evaluations(trial, learning.read(job))
      measured += [{**named, **row} for row in rows]
  learning.write(folder, 'lags', table(measured), measured)
  return code


if __name__ == '__main__':
  sys.exit(main())
