"""The numbers of metrics.jsonl as curves: stages, series, panels.

Stages lie side by side on one axis of steps. A value that was not finite is a
gap. `PANELS` lists the metrics with a panel of their own, in their order; the
report draws all others as well, grouped by prefix.
"""

from collections.abc import Collection
from typing import Any

import numpy as np

from posttrain.metrics import estimates, held_out, writers

PANELS = (  # title, metric or its prefix, how it is drawn
  *((x.panel, x.key, x.kind) for x in held_out.MEASURES),
  ('Pass rate of k answers', 'eval/pass@', 'rate'),
  ('Format rate', 'eval/format_rate/', 'rate'),
  ('Reward of rollouts', 'rollout/reward/', 'noisy'),
  ('Entropy, nats per token', 'eval/entropy/', 'plain'),
  ('Length of answers, tokens', 'eval/length/', 'plain'),
  ('KL to the start, nats per token', 'eval/kl/', 'plain'),
  ('KL to the reference', 'ref_kl/kl', 'noisy'),
  ('Sampler against trainer, |nats|', 'mismatch/', 'log'),
  ('Reward margin of pairs', 'rewards/margins', 'noisy'),
  ('Training loss', 'loss/total', 'noisy'),
  ('Gradient norm', 'optim/grad_norm', 'noisy'),
  ('Learning rate', 'optim/lr', 'plain'),
  ('Tokens trained on', 'batch/tokens', 'sum'),
)

Rows = list[dict[str, Any]]


def stages(rows: Rows) -> list[str]:
  """Returns the names of the stages, in the order in which they ran."""
  return list(dict.fromkeys(row['stage'] for row in rows))


def ends(
  rows: Rows, averaged: Collection[str] = ()
) -> dict[str, tuple[str, int | None]]:
  """Returns {stage: (title of its end, step whose weights it hands on)}.

  The step is None for the last one; where the stage selects, it is the best.

  Args:
    rows: rows of metrics.jsonl.
    averaged: stages whose averaged weights are evaluated.
  """
  titles = {}
  for stage in stages(rows):
    stage_rows = [row for row in rows if row['stage'] == stage]
    title, step = f'after {stage}', None
    if stage in averaged:
      title += ', averaged weights'
    if any('select/best_step' in row for row in stage_rows):
      step = writers.end(stage_rows)['step']
      title += f', at its best step {step}'
    titles[stage] = title, step
  return titles


def arrays(rows: Rows) -> dict[str, list[np.ndarray]]:
  """Returns the numbers of every metric: {metric: [f64[2, steps], per stage]}.

  The two rows of an array are x, the steps of all stages one after another, and
  y, NaN for null. Bounds of intervals and values that are no numbers are left
  out.

  Args:
    rows: rows of metrics.jsonl.
  """
  by_metric: dict[str, list[np.ndarray]] = {}
  start = 0
  for stage in stages(rows):
    points: dict[str, list[tuple[float, float]]] = {}
    stage_rows = [row for row in rows if row['stage'] == stage]
    names = dict.fromkeys(
      name
      for row in stage_rows
      for name in row
      if name not in ('stage', 'step') and not estimates.is_bound(name, row)
    )
    for row in stage_rows:
      for name in names.keys() & row.keys():
        value = row[name]
        if value is None or isinstance(value, int | float):
          y = np.nan if value is None else value
          points.setdefault(name, []).append((start + row['step'], y))
    for name in names:
      if name in points:
        array = np.array(points[name], np.float64).T
        by_metric.setdefault(name, []).append(array)
    start += max(row['step'] for row in stage_rows)
  return by_metric


def is_listed(name: str) -> bool:
  """Returns whether a panel of `PANELS` shows the metric."""
  return any(shows(key, name) for _, key, _ in PANELS)


def shows(key: str, name: str) -> bool:
  """Returns whether a panel's key is a metric, or its prefix up to / or @."""
  return name == key or key[-1] in '/@' and name.startswith(key)
