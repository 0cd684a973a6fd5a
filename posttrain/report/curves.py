"""The curves of runs: as JSON for the page, as a PNG, and as seconds of parts.

`build` returns

  {'runs': [{'name', 'stages': [stage]}], 'panels': [panel], 'average': rows
   per point, 'dropped': names of metrics without a panel}
  stage  {'name', 'start': axis -> value where it begins, 'grids': grid -> axis
         -> values}
  panel  {'title', 'key', 'kind', 'group', 'lines': [line], 'hidden': n}
  line   {'run', 'stage': index, 'label', 'grid', 'y', 'low', 'high'}

The grid `eval` has the rows with an evaluation, `train` those of steps. Lines
on one grid share their places on the three axes `step`, `token` and `time`
(tokens of batches and seconds, of the whole run). A value that was not measured
or not finite is null, and no line is drawn over it.

Where a run has more rows than the page has space for, the points of `train` are
means over equal numbers of rows, see `Grid.size`, and of `eval` some are left
out. `draw` makes a figure of matplotlib of the same numbers.
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

INK, MUTED, RULE = '#1f2933', '#7b8794', '#d9dee4'
COLORS = ('#2f6f9f', '#c8553d', '#4a8c5c', '#8a6fb0', '#b58a2c')

# Times that are not parts of the seconds of a row, and names that begin those
# of other threads.
_NO_PARTS = {
  'time/compile',
  'time/programs',
  'time/tokens_per_second',
  'time/elapsed',
  'time/cpu',
  'time/goodput',
}
_BESIDE = ('time/beside/', 'time/idle/')

# {(title, key, kind, group): {label: metric}}
Panels = dict[tuple[str, str, str, str], dict[str, str]]


@dataclasses.dataclass(frozen=True)
class Grid:
  """Rows of a stage, and the points made of them."""

  rows: list[tuple[runs.Row, dict[str, float]]]  # with {axis: value}
  size: int  # rows per point
  averages: bool  # else the last row of each is drawn

  def points(self, values: Sequence[Any], last: bool = False) -> list[Any]:
    """Returns a value per point; None where no row has a finite one."""
    y = np.array([_number(x) for x in values], np.float64)
    parts = [y[i : i + self.size] for i in range(0, len(y), self.size)]
    if last or not self.averages or self.size == 1:
      return _plain([part[-1] for part in parts])
    known = [part[np.isfinite(part)] for part in parts]
    return _plain([x.mean() if x.size else math.nan for x in known])

  def line(self, name: str, sums: bool) -> dict[str, list[Any]]:
    """Returns the points of a metric, and of its bounds where it has some.

    Args:
      name: the metric.
      sums: whether the tokens up to its rows are drawn.
    """
    values = [
      place['token'] if sums and row.get(name) is not None else row.get(name)
      for row, place in self.rows
    ]
    line = {'y': self.points(values, last=sums)}
    sides = zip(('low', 'high'), estimates.bound_keys(name), strict=True)
    for side, key in sides:
      line[side] = self.points([row.get(key) for row, _ in self.rows])
    return {k: y for k, y in line.items() if any(x is not None for x in y)}


def build(
  all_runs: Sequence[runs.Run], values: int = MAX_VALUES
) -> dict[str, Any]:
  """Returns the numbers of all panels.

  Args:
    all_runs: the runs that are overlaid.
    values: about so many in all lines together.
  """
  panels, dropped, count = _panels(all_runs)
  limit = min(max(values // max(count, 1), MIN_POINTS), MAX_POINTS)
  json_runs, lines, average = [], {key: [] for key in panels}, 1
  for number, run in enumerate(all_runs):
    stages = []
    for index, (stage, grids) in enumerate(_stages(run, limit)):
      average = max(average, grids['train'].size)
      stages.append(stage)
      for key, metrics in panels.items():
        for label, name in list(metrics.items())[:MAX_LABELS]:
          grid = 'eval' if name.startswith(_EVAL) else 'train'
          line = grids[grid].line(name, sums=key[2] == 'sum')
          if 'y' in line:
            head = {'run': number, 'stage': index, 'label': label, 'grid': grid}
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


def _panels(all_runs: Iterable[runs.Run]) -> tuple[Panels, list[str], int]:
  """Returns the panels in their order, metrics without one, number of lines."""
  is_finite: dict[str, bool] = {}  # metric -> whether any value is
  lines, envs = set(), set()
  for number, run in enumerate(all_runs):
    envs |= run.envs
    for row in run.rows:
      for name, value in row.items():
        is_number = value is None or isinstance(value, int | float)
        if not is_number or name == 'step' or estimates.is_bound(name, row):
          continue
        lines.add((number, row['stage'], name))
        finite = math.isfinite(_number(value))
        is_finite[name] = is_finite.get(name, False) or finite
  known = [k for k, x in is_finite.items() if x and not k.startswith('time/')]
  panels: Panels = {}
  for title, key, kind in runs.PANELS:
    own = {x.removeprefix(key): x for x in known if runs.shows(key, x)}
    if own:
      panels[title, key, kind, ''] = own
  # Those without a listed panel: one for all environments, grouped by prefix.
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
  return panels, dropped, len(lines)


def _stages(
  run: runs.Run, limit: int
) -> Iterable[tuple[dict[str, Any], dict[str, Grid]]]:
  """Yields the JSON and the grids of each stage; it begins at the last's end.

  Args:
    run: the run.
    limit: the most points of a line.
  """
  start = {'step': 0.0, 'token': 0.0, 'time': 0.0}
  for name in run.stages:
    begin, train, evaluated = dict(start), [], []
    for row in run.rows_of(name):
      start['step'] = begin['step'] + row['step']
      start['token'] += row.get('batch/tokens') or 0
      start['time'] = row.get('time/elapsed') or start['time']
      if row['step'] > 0:
        train.append((row, dict(start)))
      if any(key.startswith(_EVAL) for key in row):
        evaluated.append((row, dict(start)))
    grids = {
      grid: Grid(picked, -(-len(picked) // limit) or 1, grid == 'train')
      for grid, picked in (('train', train), ('eval', evaluated))
    }
    axes = {
      name: {
        axis: grid.points([x[axis] for _, x in grid.rows]) for axis in AXES
      }
      for name, grid in grids.items()
    }
    yield {'name': name, 'start': begin, 'grids': axes}, grids


def draw(rows: runs.Rows) -> Any:
  """Draws the listed panels that have data, as a figure of matplotlib.

  Args:
    rows: rows of metrics.jsonl.

  Returns:
    The figure; None without data.
  """
  # matplotlib takes most of a second to import, which a page does without.
  from matplotlib import figure

  # So few points are means over several steps, which is all the smoothing.
  data = build([runs.Run('', '', rows, {}, {}, None)], values=0)
  panels = [panel for panel in data['panels'] if not panel['group']]
  stages = data['runs'][0]['stages']
  if not panels:
    return None
  columns = min(3, len(panels))
  lines = -(-len(panels) // columns)
  drawn = figure.Figure((3.4 * columns, 2.3 * lines), layout='constrained')
  for place, panel in enumerate(panels, 1):
    axis = drawn.add_subplot(lines, columns, place)
    frame(axis, panel['title'])
    kind, colors = panel['kind'], {}
    for line in panel['lines']:
      x = np.array(stages[line['stage']]['grids'][line['grid']]['step'])
      y = np.array(line['y'], np.float64)
      label = line['label']
      is_new = label not in colors
      color = colors.setdefault(label, COLORS[len(colors) % len(COLORS)])
      # Between two evaluations nothing is measured.
      joined = line['grid'] == 'train' or (np.diff(x) <= 1).all()
      axis.plot(
        x,
        y,
        color=color,
        linewidth=1.6 if joined else 0,
        marker='' if joined and len(y) > 2 else 'o',
        markersize=3.5,
        label=label if is_new else None,
      )
    if kind == 'rate':
      axis.set_ylim(-0.03, 1.03)
      axis.yaxis.set_major_formatter('{x:.0%}')
    elif kind != 'log':
      axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    elif any(y and y > 0 for line in panel['lines'] for y in line['y']):
      axis.set_yscale('log')
    if len(colors) > 1:
      axis.legend(frameon=False, fontsize=8)
    for stage in stages[1:]:
      axis.axvline(stage['start']['step'], color=MUTED, linestyle=':')
    names = ' | '.join(stage['name'] for stage in stages)
    axis.set_xlabel(f'{names} step', color=MUTED, fontsize=8, loc='right')
  return drawn


def frame(axis: Any, title: str) -> None:
  """Gives axes of matplotlib the title and the look of the page's panels."""
  axis.set_title(title, loc='left', fontsize=10, weight='bold', color=INK)
  axis.spines[['top', 'right', 'left']].set_visible(False)
  axis.tick_params(length=0, labelsize=9, colors=MUTED)
  axis.grid(axis='y', color=RULE, linewidth=0.6)


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
  scoring and the hand-over of weights. They are subtracted, so that the sum is
  the measured time.
  """
  seconds = {
    key.removeprefix('time/'): value
    for key, value in row.items()
    if key.startswith('time/') and value
    if key not in _NO_PARTS and not key.startswith(_BESIDE)
  }
  for name in {'scoring', 'hand_over'} & seconds.keys():  # within the rollouts
    rollout = seconds.get('rollout', 0.0)
    seconds[name] = min(seconds[name], rollout)
    seconds['rollout'] = rollout - seconds[name]
  left = row.get('time/compile') or 0.0
  for name in ('update', 'eval', 'rollout', 'scoring'):
    inside = min(left, seconds.get(name, 0.0))
    if inside > 0:
      left -= inside
      seconds[name] -= inside
      seconds['compile'] = seconds.get('compile', 0.0) + inside
  return seconds


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
