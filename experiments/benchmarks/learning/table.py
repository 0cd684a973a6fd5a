"""What was learned: values before and after, with intervals over seeds.

A change is the mean over seeds of after - before, +- the half-width of its 95 %
interval by Student's t (n - 1 degrees of freedom). With one seed there is none.
"""

import itertools
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

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


def evaluates(row: Row) -> bool:
  """Returns whether a row has an evaluation."""
  return any(name.startswith('eval/') for name in row)


def seconds(rows: Sequence[Row], stage: str, name: str) -> float:
  """Returns the seconds of a stage by `time/elapsed` or `time/cpu`.

  A process that was killed loses those since its last row.
  """
  stages = [row['stage'] for row in rows]
  first = stages.index(stage)
  last = len(stages) - 1 - stages[::-1].index(stage)
  begin = rows[first - 1].get(name, 0.0) if first else 0.0
  return rows[last].get(name, math.nan) - begin


def fixed_and_growing(rows: Sequence[Row], stage: str) -> tuple[float, float]:
  """Returns a stage's CPU seconds that more steps do not change, and the rest.

  Fixed are the evaluations at its start and end, its set-up, and what rows with
  compilation take beyond the mean step; evaluations in between grow in number
  with the steps. Without a step of neither kind only the start is fixed.

  Args:
    rows: of a run's metrics.jsonl.
    stage: the stage, evaluated at step 0.
  """
  own = [i for i, row in enumerate(rows) if row['stage'] == stage]
  costs = {
    i: rows[i]['time/cpu'] - (rows[i - 1]['time/cpu'] if i else 0.0)
    for i in own
  }
  once = [i for i in own if rows[i].get('time/compile') or i == own[-1]]
  steps = [costs[i] for i in own if i not in once and not evaluates(rows[i])]
  fixed = sum(costs[i] for i in own if not rows[i]['step'])
  if steps:
    mean = statistics.fmean(steps)
    fixed += sum(max(costs[i] - mean, 0) for i in once if rows[i]['step'])
  return fixed, sum(costs.values()) - fixed


def seconds_to(rows: Sequence[Row], stage: str, env: str, rate: float) -> float:
  """Returns the CPU seconds until the sampled pass rate; NaN = not reached.

  Those of the stage's rollouts and updates: a step with an evaluation counts
  as much as the mean step without one.

  Args:
    rows: of a run's metrics.jsonl.
    stage: the stage.
    env: the environment whose evaluations count.
    rate: the pass rate to reach.
  """
  costs, steps = [], 0
  for last, row in itertools.pairwise(rows):
    if row['stage'] != stage or not row['step']:
      continue
    steps += 1
    if last['stage'] == stage and not (evaluates(last) or evaluates(row)):
      costs.append(row['time/cpu'] - last['time/cpu'])
    if value(row, 'sampled_pass_rate', env) >= rate:
      return steps * statistics.fmean(costs) if costs else math.nan
  return math.nan


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
    if any(map(math.isnan, first)):  # as KL, from the start itself
      results[name] = [math.nan, statistics.fmean(last), math.nan, math.nan]
      continue
    change = interval([b - a for a, b in zip(first, last, strict=True)])
    results[name] = [statistics.fmean(first), statistics.fmean(last), *change]
  return results


def lines(results: Sequence[Mapping[str, Any]]) -> list[str]:
  """Returns the lines of a Markdown table, of `__main__.summarize`'s rows."""
  shown = [x for x in MEASURES if any(x in row['measures'] for row in results)]
  header = ['recipe', 'change', 'environment', 'seeds']
  header += [MEASURES[name] for name in shown]
  header += ['wall s', 'CPU s']
  reaches = any('reached_s' in row for row in results)
  if reaches:
    header.append('CPU s to the rate')
  table = [f'| {" | ".join(header)} |', '|---' * len(header) + '|']
  for row in results:
    cells = [row['recipe'], row['change'], row['env'], str(row['seeds'])]
    cells += [_cell(row['measures'].get(name)) for name in shown]
    cells += [_number(row['wall_s'], 0), _number(row['cpu_s'], 0)]
    if reaches:
      seconds_to_rate = row.get('reached_s', [])
      cells.append(
        ' / '.join(_number(x, 0) or 'never' for x in seconds_to_rate)
      )
    escaped = (cell.replace('|', '\\|') for cell in cells)
    table.append(f'| {" | ".join(escaped)} |')
  return table


def _cell(numbers: Sequence[float] | None) -> str:
  if numbers is None:
    return ''
  before, after, change, width = numbers
  if math.isnan(before):
    return _number(after, 3)
  text = f'{before:.3f} -> {after:.3f}: {change:+.3f}'
  return text if math.isnan(width) else f'{text} +- {width:.3f}'


def _number(number: float, digits: int) -> str:
  return '' if math.isnan(number) else f'{number:.{digits}f}'
