"""The curves of the trials: mean over seeds, and bands from min to max."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Row = Mapping[str, Any]
LEGEND = 'mean over seeds; bands: min to max'
_SMOOTH = 5  # steps that the curve of training averages


def draw(
  curves: Mapping[str, Mapping[str, Sequence[Sequence[Row]]]], path: str
) -> None:
  """Draws a panel per environment, with a curve per variant.

  Args:
    curves: environment -> variant -> the rows of its last stage, per seed.
    path: the file of the picture.
  """
  from matplotlib import figure as mpl_figure

  panels = {
    (env, name): {
      variant: line
      for variant, seeds in variants.items()
      if (line := series(seeds, f'{name}/{env}'))
    }
    for env, variants in curves.items()
    for name in ('rollout/pass_rate', 'eval/pass_rate')
  }
  panels = {key: shown for key, shown in panels.items() if shown}
  if not panels:
    return
  size = (5.0, 3.0 * len(panels))
  figure = mpl_figure.Figure(figsize=size, layout='constrained')
  axes = figure.subplots(len(panels), 1, squeeze=False).ravel()
  for axis, ((env, name), shown) in zip(axes, panels.items(), strict=True):
    for variant, (steps, values) in shown.items():
      (line,) = axis.plot(steps, values.mean(0), label=variant)
      low, high = values.min(0), values.max(0)
      axis.fill_between(steps, low, high, color=line.get_color(), alpha=0.2)
    what = 'in training' if name.startswith('rollout') else 'unseen, greedy'
    axis.set_title(f'{env}: pass rate, {what}', loc='left', fontsize=10)
    axis.set_xlabel('step')
    axis.legend(frameon=False, fontsize=7, title=LEGEND, title_fontsize=7)
  figure.savefig(path, dpi=120)


def series(
  seeds: Sequence[Sequence[Row]], name: str
) -> tuple[np.ndarray, np.ndarray] | None:
  """Returns (steps [T], values [seeds, T]) that all seeds have; None: few."""
  found = [{x['step']: x[name] for x in rows if name in x} for rows in seeds]
  steps = sorted(set.intersection(*map(set, found))) if found else []
  if len(steps) < 2:
    return None
  values = np.array([[x[step] for step in steps] for x in found])
  if name.startswith('rollout/') and len(steps) > 2 * _SMOOTH:
    kernel = np.ones(_SMOOTH) / _SMOOTH
    values = np.array([np.convolve(x, kernel, 'valid') for x in values])
    steps = steps[_SMOOTH - 1 :]
  return np.array(steps), values
