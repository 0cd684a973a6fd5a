"""The numbers of the report's panels, as JSON for its script; its seconds.

  {'runs': [{'name', 'stages': [stage]}], 'panels': [panel], 'average': rows
   per point, 'dropped': names of metrics without a panel}
  stage  {'name', 'start': axis -> value where it begins, 'grids': grid -> axis
         -> values}
  panel  {'title', 'key', 'kind', 'group', 'lines': [line], 'hidden': n}
  line   {'run', 'stage': index, 'label', 'grid', 'y', 'low', 'high'}

The grid `eval` has the rows with an evaluation, `train` those of steps. Lines
on one grid share their places on the three axes `step`, `token` and `time`
(tokens trained on and seconds, of the whole run). A value that was not measured
or not finite is null, and no line is drawn over it.

Where a run has more rows than the page has space for, the points of `train` are
means over equal numbers of rows, see `Grid.size`, and of `eval` some are left
out.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.metrics import estimates
from posttrain.report import runs

AXES = ('step', 'token', 'time')
MAX_PANELS = 40  # panels drawn of a group
MAX_LABELS = 12  # environments drawn in a panel
MIN_POINTS, MAX_POINTS = 30, 1500  # points of a line
MAX_VALUES = 90_000  # about so many in all lines together
_DIGITS = 6  # digits of a value on the page; float32 has seven
COMPONENTS = 'components of the loss'  # the group of these prefixes
_PREFIXES = ('loss', 'rl', 'ce', 'ref_kl')
_EVAL = ('eval/', 'select/')

# Times that are not parts of the seconds of a row.
_NO_PARTS = tuple(
  f'time/{x}'
  for x in (
    'compile',
    'programs',
    'tokens_per_second',
    'elapsed',
    'cpu',
    'goodput',
  )
)

# {(title, key, kind, group): {label: metric}}
Panels = dict[tuple[str, str, str, str], dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Grid:
  """Rows of a stage, and the axes of the points made of them."""

  rows: runs.Rows
  size: int  # rows per point
  averages: bool  # else the last row of each is drawn

  def points(self, values: Sequence[Any], last: bool = False) -> list[Any]:
    """Returns a value per point; None where no row has a finite one."""
    y = np.array([_number(x) for x in values], np.float64)
    if self.size == 1:
      return _plain(y)
    cuts = range(0, len(y), self.size)
    parts = [y[i : i + self.size] for i in cuts]
    if last or not self.averages:
      return _plain([part[-1] for part in parts])
    known = [part[np.isfinite(part)] for part in parts]
    return _plain([x.mean() if x.size else math.nan for x in known])


def build(
  all_runs: Sequence[runs.Run], values: int = MAX_VALUES
) -> dict[str, Any]:
  """Returns the numbers of all panels.

  Args:
    all_runs: the runs that are overlaid.
    values: about so many in all lines together.
  """
  panels, dropped = _panels(all_runs)
  count = sum(len(x) for run in all_runs for x in run.arrays.values())
  limit = min(max(values // max(count, 1), MIN_POINTS), MAX_POINTS)
  json_runs, lines, average = [], {key: [] for key in panels}, 1
  for number, run in enumerate(all_runs):
    stages = []
    for index, stage in enumerate(_stages(run, limit)):
      average = max(average, stage.grids['train'].size)
      stages.append(stage.json)
      for key, metrics in panels.items():
        for label, name in list(metrics.items())[:MAX_LABELS]:
          line = _line(stage, name, sums=key[2] == 'sum')
          if line is not None:
            head = {'run': number, 'stage': index, 'label': label}
            lines[key].append(head | line)
    json_runs.append({'name': run.name, 'stages': stages})
  return {
    'runs': json_runs,
    'average': average,
    'dropped': dropped,
    'panels': [
      {
        **dict(zip(('title', 'key', 'kind', 'group'), key, strict=True)),
        'lines': lines[key],
        'hidden': max(len(panels[key]) - MAX_LABELS, 0),
      }
      for key in panels
      if lines[key]
    ],
  }


def summary(run: runs.Run) -> list[dict[str, Any]]:
  """Returns first, last, least and largest value of each metric and stage."""
  summaries = []
  for stage in run.stages:
    values: dict[str, list[float]] = {}
    for row in run.rows_of(stage):
      for name, value in row.items():
        if name != 'step' and math.isfinite(_number(value)):
          values.setdefault(name, []).append(value)
    summaries += [
      {
        'metric': name,
        'stage': stage,
        'count': len(y),
        'values': [
          f'{x:,}' if isinstance(x, int) else f'{x:g}'
          for x in _plain((y[0], y[-1], min(y), max(y)))
        ],
      }
      for name, y in values.items()
    ]
  return sorted(summaries, key=lambda x: x['metric'])


def _panels(all_runs: Iterable[runs.Run]) -> tuple[Panels, list[str]]:
  """Returns the panels in the order of the page, and metrics without one."""
  known: dict[str, None] = {}
  envs: set[str] = set()
  for run in all_runs:
    envs |= run.envs
    for name, parts in run.arrays.items():
      is_drawn = not name.startswith('time/')
      if is_drawn and any(np.isfinite(y).any() for _, y in parts):
        known[name] = None
  panels: Panels = {}
  for title, key, kind in runs.PANELS:
    lines = {
      name.removeprefix(key): name for name in known if runs.shows(key, name)
    }
    if lines:
      panels[title, key, kind, ''] = lines
  others: Panels = {}
  for name in sorted(known):
    if not any(runs.shows(key, name) for _, key, _ in runs.PANELS):
      metric, _, env = name.rpartition('/')
      if not (metric and env in envs):
        metric, env = name, ''
      prefix = metric.partition('/')[0]
      group = COMPONENTS if prefix in _PREFIXES else prefix
      key = (metric, metric, 'other', group)
      others.setdefault(key, {})[env] = name
  counts, dropped = collections.Counter(), []
  for key in sorted(others, key=lambda x: (x[3] != COMPONENTS, x[3], x[0])):
    counts[key[3]] += 1
    if counts[key[3]] > MAX_PANELS:
      dropped += others[key].values()
    else:
      panels[key] = others[key]
  return panels, dropped


@dataclasses.dataclass(frozen=True)
class _Stage:
  """A stage of a run: its grids, and their JSON."""

  grids: dict[str, Grid]
  json: dict[str, Any]
  tokens: dict[int, float]  # step -> tokens of the run up to it


def _stages(run: runs.Run, limit: int) -> Iterable[_Stage]:
  """Yields the stages of a run, each of which begins where the last one ends.

  Args:
    run: the run.
    limit: the most points of a line.
  """
  start = {'step': 0.0, 'token': 0.0, 'time': 0.0}
  for name in run.stages:
    rows = run.rows_of(name)
    begin, places, tokens = dict(start), [], {}
    for row in rows:
      start['step'] = begin['step'] + row['step']
      start['token'] += row.get('batch/tokens') or 0
      start['time'] = row.get('time/elapsed') or start['time']
      tokens[row['step']] = start['token']
      places.append(dict(start))
    grids, axes = {}, {}
    for grid, averages in (('train', True), ('eval', False)):
      picked = [
        i
        for i, row in enumerate(rows)
        if (
          row['step'] > 0
          if grid == 'train'
          else any(key.startswith(_EVAL) for key in row)
        )
      ]
      size = -(-len(picked) // limit) or 1
      grids[grid] = Grid([rows[i] for i in picked], size, averages)
      axes[grid] = {
        axis: grids[grid].points([places[i][axis] for i in picked])
        for axis in AXES
      }
    yield _Stage(grids, {'name': name, 'start': begin, 'grids': axes}, tokens)


def _line(stage: _Stage, name: str, sums: bool) -> dict[str, Any] | None:
  """Returns the points of a metric in a stage; None if it has none."""
  kind = 'eval' if name.startswith(_EVAL) else 'train'
  grid = stage.grids[kind]
  if sums:
    values = [
      None if row.get(name) is None else stage.tokens[row['step']]
      for row in grid.rows
    ]
  else:
    values = [row.get(name) for row in grid.rows]
  y = grid.points(values, last=sums)
  if all(value is None for value in y):
    return None
  line = {'grid': kind, 'y': y}
  head, _, env = name.rpartition('/')
  for side in estimates.BOUNDS:
    bounds = grid.points([row.get(f'{head}{side}/{env}') for row in grid.rows])
    if any(value is not None for value in bounds):
      line[side.removeprefix('_')] = bounds
  return line


def _number(value: Any) -> float:
  return value if isinstance(value, int | float) else math.nan


def _plain(values: Iterable[float]) -> list[Any]:
  """Returns numbers of `_DIGITS` digits, whole ones as they are."""
  return [
    None
    if not math.isfinite(x)
    else int(x)
    if x == int(x) and abs(x) < 2**53
    else float(f'{x:.{_DIGITS}g}')
    for x in map(float, values)
  ]


def seconds(run: runs.Run) -> list[dict[str, Any]]:
  """Returns the stages with their seconds: of each part, the largest first."""
  by_stage = []
  for stage in run.stages:
    totals: collections.Counter[str] = collections.Counter()
    for row in run.rows_of(stage):
      totals.update(slices(row))
    if whole := sum(totals.values()):
      parts, begin = [], 0.0
      for name in sorted(totals, key=lambda x: -totals[x]):
        share = totals[name] / whole
        parts.append(
          {
            'name': name,
            'seconds': f'{totals[name]:,.1f} s',
            'share': f'{share:.1%}',
            'begin': f'{begin:.3%}',
            'width': f'{share:.3%}',
          }
        )
        begin += share
      by_stage.append(
        {'name': stage, 'seconds': f'{whole:,.1f} s', 'parts': parts}
      )
  return by_stage


def slices(row: Mapping[str, Any]) -> dict[str, float]:
  """Returns a row's seconds by name, each second counted once.

  The timers of the other parts include compiling, and that of rollouts includes
  scoring. They are subtracted, so that the sum is the measured time.
  """
  seconds = {
    key.removeprefix('time/'): value
    for key, value in row.items()
    if key.startswith('time/') and value and key not in _NO_PARTS
  }
  if 'scoring' in seconds:  # within the rollouts
    rollout = seconds.get('rollout', 0.0)
    seconds['scoring'] = min(seconds['scoring'], rollout)
    seconds['rollout'] = rollout - seconds['scoring']
  left = row.get('time/compile') or 0.0
  for name in ('update', 'eval', 'rollout', 'scoring'):
    inside = min(left, seconds.get(name, 0.0))
    if inside > 0:
      left -= inside
      seconds[name] -= inside
      seconds['compile'] = seconds.get('compile', 0.0) + inside
  return seconds
