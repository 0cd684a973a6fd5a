"""The learning curves of a run as a figure of matplotlib, for a PNG.

A panel whose metric is missing is left out. `runs.PANELS` lists the metrics.
"""

from typing import Any

import matplotlib
import numpy as np
from matplotlib import figure, ticker

from posttrain.report import runs

INK, MUTED, RULE = '#1f2933', '#7b8794', '#d9dee4'
COLORS = ('#2f6f9f', '#c8553d', '#4a8c5c', '#8a6fb0', '#b58a2c')


def draw(rows: runs.Rows) -> figure.Figure | None:
  """Draws the listed panels that have data; None if there are none."""
  arrays = runs.arrays(rows)
  panels = [
    (
      panel,
      {name: arrays[name] for name in arrays if runs.shows(panel[1], name)},
    )
    for panel in runs.PANELS
  ]
  panels = [(panel, metrics) for panel, metrics in panels if metrics]
  if not panels:
    return None
  columns = min(3, len(panels))
  lines = -(-len(panels) // columns)
  with matplotlib.rc_context(
    {
      'font.size': 9,
      'axes.edgecolor': RULE,
      'text.color': INK,
      'xtick.color': MUTED,
      'ytick.color': MUTED,
      'axes.linewidth': 0.8,
      'font.family': 'sans-serif',
      'axes.unicode_minus': False,
    }
  ):
    drawn = figure.Figure(
      figsize=(3.4 * columns, 2.3 * lines), layout='constrained'
    )
    axes = drawn.subplots(lines, columns, squeeze=False).ravel()
    for axis, (panel, metrics) in zip(axes, panels, strict=False):
      _panel(axis, panel, metrics)
      _mark_stages(axis, rows)
    for axis in axes[len(panels) :]:
      axis.set_axis_off()
  return drawn


def _panel(
  axis: Any, panel: tuple[str, str, str], metrics: dict[str, list[np.ndarray]]
) -> None:
  title, key, kind = panel
  axis.set_title(title, loc='left', fontsize=10, fontweight='bold')
  axis.spines[['top', 'right', 'left']].set_visible(False)
  axis.tick_params(length=0)
  axis.grid(axis='y', color=RULE, linewidth=0.6)
  axis.set_axisbelow(True)
  for i, (name, parts) in enumerate(metrics.items()):
    color, label, total = COLORS[i % len(COLORS)], name.removeprefix(key), 0.0
    for x, y in parts:
      if kind == 'sum':
        y = total + np.nancumsum(y)
        total = y[-1]
      if kind == 'noisy' and len(y) > 60:
        axis.plot(x, y, color=color, alpha=0.25, linewidth=0.8)
        y = _smooth(y, len(y) // 30)
      # Between two evaluations nothing is measured.
      joined = not name.startswith('eval/') or (np.diff(x) <= 1).all()
      marker = 'o' if not joined or kind == 'rate' or len(y) < 3 else None
      axis.plot(
        x,
        y,
        color=color,
        linewidth=1.6 if joined else 0,
        marker=marker,
        markersize=3.5,
        label=label,
      )
      label = None  # once in the legend
  if kind == 'rate':
    axis.set_ylim(-0.03, 1.03)
    axis.yaxis.set_major_formatter(lambda value, _: f'{value:.0%}')
  elif kind != 'log':
    axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
  if kind == 'sum':
    axis.yaxis.set_major_formatter(ticker.EngFormatter(sep=''))
  points = [y for parts in metrics.values() for _, y in parts]
  if kind == 'log' and any((y > 0).any() for y in points):
    axis.set_yscale('log')
  if len(metrics) > 1:
    axis.legend(frameon=False, fontsize=8)


def _smooth(y: np.ndarray, width: int) -> np.ndarray:
  """Returns centred means over `width` neighbours, fewer at the ends."""
  known = np.isfinite(y)
  ones = np.ones(width)
  total = np.convolve(np.where(known, y, 0), ones, 'same')
  count = np.convolve(known, ones, 'same')
  return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _mark_stages(axis: Any, rows: runs.Rows) -> None:
  """Draws a line where one stage ends and the next begins."""
  end = 0
  names = runs.stages(rows)
  for name in names[:-1]:
    end += max(row['step'] for row in rows if row['stage'] == name)
    axis.axvline(end, color=MUTED, linewidth=0.8, linestyle=':')
  axis.set_xlabel(
    ' | '.join(names) + ' step', color=MUTED, fontsize=8, loc='right'
  )
