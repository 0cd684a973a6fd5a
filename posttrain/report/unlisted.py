"""Small panels of every metric that `curves.PANELS` does not list, as HTML.

A panel per metric, with a line per environment where the name ends in one;
grouped by the part of the name before the first slash. `time/*` is not drawn,
since the report has a bar of it. The panels are plain SVG, which is drawn
faster and takes less space than figures of matplotlib.
"""

import html
from collections.abc import Collection, Mapping, Sequence

import numpy as np

from posttrain.report import curves

MAX_PANELS = 40  # panels drawn of a group
MAX_LINES = 10  # lines drawn in a panel
MAX_POINTS = 200  # points of a line; longer ones are averaged
WIDTH, HEIGHT, MARGIN = 220, 60, 4
STYLE = """
.unlisted { margin-top: 0.6rem; }
.panels { display: grid; gap: 0.8rem 1.2rem; margin: 0.8rem 0 1.4rem;
  grid-template-columns: repeat(auto-fill, minmax(13rem, 1fr)); }
.panels figure { margin: 0; min-width: 0; }
.panels figcaption { font-size: 0.82rem; overflow-wrap: anywhere; }
.panels small { color: var(--muted); font-size: 0.74rem; display: block; }
.panels small .dot { margin-right: 0.25rem; }
"""

# {line's label: [f64[2, steps] of x and y, per stage]}
Panel = Mapping[str, Sequence[np.ndarray]]


def write(rows: curves.Rows, envs: Collection[str] = ()) -> str:
  """Returns HTML with the groups of panels, '' if there is no other metric.

  Args:
    rows: rows of metrics.jsonl.
    envs: names of the run's environments.
  """
  groups = _groups(rows, envs)
  if not groups:
    return ''
  parts = [_group(prefix, groups[prefix]) for prefix in sorted(groups)]
  return (
    '<h2>All other metrics</h2><p class="note">Over the steps of all stages, '
    'grouped by the first part of the name. Below each panel: the smallest and '
    f'the largest value, and the last one.</p>{"".join(parts)}'
  )


def _groups(
  rows: curves.Rows, envs: Collection[str]
) -> dict[str, dict[str, dict[str, list[np.ndarray]]]]:
  """Returns {prefix: {metric without its environment: panel}}."""
  groups: dict[str, dict[str, dict[str, list[np.ndarray]]]] = {}
  for name, series in curves.series(rows).items():
    known = any(np.isfinite(y).any() for _, y in series)
    if curves.is_listed(name) or name.startswith('time/') or not known:
      continue
    metric, _, env = name.rpartition('/')
    if not (metric and env in envs):
      metric, env = name, ''
    group = groups.setdefault(metric.partition('/')[0], {})
    group.setdefault(metric, {})[env] = series
  return groups


def _group(prefix: str, panels: Mapping[str, Panel]) -> str:
  names = sorted(panels)
  drawn = ''.join(_panel(name, panels[name]) for name in names[:MAX_PANELS])
  rest = ', '.join(html.escape(name) for name in names[MAX_PANELS:])
  more = f'<p class="note">Not drawn: {rest}</p>' if rest else ''
  count = f'{len(names)} metric{"s" if len(names) != 1 else ""}'
  return (
    f'<details class="unlisted"><summary>{html.escape(prefix)} ({count})'
    f'</summary><div class="panels">{drawn}</div>{more}</details>'
  )


def _panel(name: str, panel: Panel) -> str:
  """Returns one metric: its name, its lines, and their values."""
  lines = list(panel.items())[:MAX_LINES]
  points = np.concatenate([part for _, parts in lines for part in parts], 1)
  x, y = points[:, np.isfinite(points[1])]
  low, high = float(y.min()), float(y.max())
  box = (float(x.min()), float(x.max()), low, high)
  shapes, legend = '', ''
  for i, (label, parts) in enumerate(lines):
    color = curves.COLORS[i % len(curves.COLORS)]
    shapes += ''.join(_line(part, box, color) for part in parts)
    legend += _legend(
      label or ('all' if len(panel) > 1 else 'last'), color, parts
    )
  if hidden := len(panel) - len(lines):
    legend += f'<small>and {hidden} more</small>'
  return (
    f'<figure><figcaption>{html.escape(name)}</figcaption>'
    f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{shapes}</svg>'
    f'<small>{low:.4g} to {high:.4g}</small>{legend}</figure>'
  )


def _legend(label: str, color: str, parts: Sequence[np.ndarray]) -> str:
  y = np.concatenate([part[1] for part in parts])
  known = y[np.isfinite(y)]
  last = f'{known[-1]:.4g}' if known.size else 'n/a'
  dot = f'<span class="dot" style="background:{color}"></span>'
  return f'<small>{dot}{html.escape(label)}: {last}</small>'


def _line(
  part: np.ndarray, box: tuple[float, float, float, float], color: str
) -> str:
  """Returns the SVG of one stage of a line; a value that is not finite cuts it.

  Args:
    part: f64[2, steps], x and y.
    box: smallest and largest x, smallest and largest y of the panel.
    color: the line's color.
  """
  left, right, low, high = box
  x, y = _thinned(part)
  # A range without extent is drawn in the middle.
  x = (x - left) / (right - left) if right > left else np.full_like(x, 0.5)
  y = (y - low) / (high - low) if high > low else np.where(y == low, 0.5, y)
  x = MARGIN + x * (WIDTH - 2 * MARGIN)
  y = HEIGHT - MARGIN - y * (HEIGHT - 2 * MARGIN)
  runs = np.ma.clump_unmasked(np.ma.masked_invalid(y))
  shapes = ''
  for run in runs:
    if run.stop - run.start == 1:
      center = f'cx="{x[run][0]:.1f}" cy="{y[run][0]:.1f}"'
      shapes += f'<circle {center} r="2" fill="{color}"/>'
      continue
    points = ' '.join(
      f'{a:.1f},{b:.1f}' for a, b in zip(x[run], y[run], strict=True)
    )
    shapes += (
      f'<polyline points="{points}" fill="none" stroke="{color}" '
      'stroke-width="1.4"/>'
    )
  return shapes


def _thinned(part: np.ndarray) -> np.ndarray:
  """Returns at most `MAX_POINTS` means of consecutive points."""
  size = -(-part.shape[1] // MAX_POINTS)
  if size == 1:
    return part
  return np.stack(
    [part[:, i : i + size].mean(1) for i in range(0, part.shape[1], size)], 1
  )
