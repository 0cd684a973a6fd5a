"""What the runs learned: training pass rates, and what they cost."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.benchmarks.sanity import cases as cases_lib

Row = Mapping[str, Any]

SOLVED = 0.99  # the training pass rate that every loss must reach
HEADER = (
  *('loss', 'dtype', 'updates', 'lr', 'seed', 'steps'),
  *('start', 'best', 'last'),
  *(f'step of {SOLVED}', f'CPU s to {SOLVED}', 'CPU s', 'at equal CPU'),
  *('unseen sampled', 'unseen greedy', 'mismatch mean', 'largest', 'k3'),
)
_TRAINED = 'eval/sampled_pass_rate/questions'


def is_evaluation(row: Row) -> bool:
  """Returns whether a row has a training pass rate."""
  return _TRAINED in row


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
  """Returns what the rows of a run's metrics.jsonl say.

  Args:
    rows: with an evaluation at least.

  Returns:
    curve: (step, training pass rate, CPU seconds so far) per evaluation.
    start, best, last: training pass rates.
    solved_step, solved_cpu: of the first evaluation with SOLVED; None = never.
    cpu: CPU seconds of the run.
    sampled, greedy: pass rates on unseen questions, [before, after].
    mismatch: |log pi - log mu| of trainer and sampler under the same weights,
      nats: mean and largest; and the mean k3 estimate of the KL.
  """
  evaluations = [row for row in rows if is_evaluation(row)]
  curve = [[x['step'], x[_TRAINED], x['time/cpu']] for x in evaluations]
  solved = [point for point in curve if point[1] >= SOLVED]
  ends = evaluations[0], evaluations[-1]
  steps = [row for row in rows if 'mismatch/max' in row]
  return {
    'curve': curve,
    'start': curve[0][1],
    'best': max(rate for _, rate, _ in curve),
    'last': curve[-1][1],
    'solved_step': solved[0][0] if solved else None,
    'solved_cpu': solved[0][2] if solved else None,
    'cpu': rows[-1]['time/cpu'],
    'sampled': [row['eval/sampled_pass_rate/unseen'] for row in ends],
    'greedy': [row['eval/pass_rate/unseen'] for row in ends],
    'mismatch': [
      statistics.fmean(x['mismatch/abs_mean'] for x in steps),
      max(x['mismatch/max'] for x in steps),
      statistics.fmean(x['mismatch/k3'] for x in steps),
    ],
  }


def at(curve: Iterable[Sequence[float]], cpu: float) -> float:
  """Returns the pass rate of the last evaluation within so many CPU seconds."""
  return [rate for _, rate, spent in curve if spent <= cpu][-1]


def lines(results: Mapping[cases_lib.Case, Mapping[str, Any]]) -> list[str]:
  """Returns the lines of a Markdown table, a row per run.

  Args:
    results: of each run, what `summarize` returns, and `lr`. "At equal CPU" is
      the training pass rate after the CPU seconds of the shortest run of the
      same dtype.
  """
  shortest = {
    dtype: min(x['cpu'] for case, x in results.items() if case.dtype == dtype)
    for dtype in {case.dtype for case in results}
  }
  text = [f'| {" | ".join(HEADER)} |', '|---' * len(HEADER) + '|']
  for case, x in results.items():
    cells = [case.loss, case.dtype, case.updates, f'{x["lr"]:g}', case.seed]
    cells.append(x['curve'][-1][0])
    cells += [f'{x[name]:.3f}' for name in ('start', 'best', 'last')]
    cells += [_or_never(x['solved_step']), _or_never(x['solved_cpu'])]
    cells += [f'{x["cpu"]:.0f}']
    cells += [f'{at(x["curve"], shortest[case.dtype]):.3f}']
    for before, after in (x['sampled'], x['greedy']):
      cells.append(f'{before:.3f} -> {after:.3f}')
    cells += [f'{value:.1e}' for value in x['mismatch']]
    text.append(f'| {" | ".join(map(str, cells))} |')
  return text


def _or_never(value: float | None) -> str:
  return 'never' if value is None else f'{value:.0f}'
