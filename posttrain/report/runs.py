"""A run as the report reads it: the files of its workdir, metrics as curves.

Stages lie side by side on one axis of steps. A value that was not finite is a
gap. `PANELS` lists the metrics with a panel of their own, in their order; the
report draws all others as well, grouped by prefix.
"""

import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.metrics import estimates, statistics, writers
from posttrain.util import disk

PANELS = (  # title, metric or its prefix, how it is drawn
  *((x.panel, x.key, x.kind) for x in statistics.MEASURES),
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

Row = dict[str, Any]
Rows = list[Row]


@dataclasses.dataclass(frozen=True)
class Run:
  """The files of a run, as far as they are written.

  Fields:
    workdir: its folder.
    name: its name in the report.
    rows: rows of metrics.jsonl.
    config: config.json, {} if there is none.
    about: about.json, with devices and versions; {} if there is none.
    written: seconds since 1970 of the last row; None without a row.
  """

  workdir: str
  name: str
  rows: Rows
  config: Row
  about: Row
  written: float | None

  @functools.cached_property
  def stages(self) -> list[str]:
    """The stages that have begun, in their order."""
    return stages(self.rows)

  @functools.cached_property
  def arrays(self) -> dict[str, list[np.ndarray]]:
    """The numbers of every metric, see `arrays`."""
    return arrays(self.rows)

  @property
  def nodes(self) -> dict[str, Row]:
    """The options of each stage, in the order of the config."""
    return {x: self.config[x] for x in self.config.get('stages', ())}

  @property
  def steps(self) -> dict[str, int]:
    """{stage: number of its steps}, in the order of the config."""
    return {k: x['steps'] for k, x in self.nodes.items() if x.get('steps')}

  @property
  def envs(self) -> set[str]:
    """The names of the environments of all stages."""
    return {x for node in self.nodes.values() for x in node.get('envs') or ()}

  @property
  def finished(self) -> bool:
    """Whether the run has come to its end."""
    if self.about:
      return self.about.get('ended') is not None
    last = self.rows[-1] if self.rows else {}
    *_, end = [(None, None), *self.steps.items()]
    return bool(last) and (last['stage'], last['step']) == end

  def rows_of(self, stage: str) -> Rows:
    """Returns the rows of a stage."""
    return [row for row in self.rows if row['stage'] == stage]

  @property
  def ends(self) -> dict[str, tuple[str, int | None]]:
    """{stage: (title of its end, step whose weights it hands on)}.

    The step is None for the last one; where the stage selects, it is the best.
    """
    ends = {}
    for stage in self.stages:
      rows, step = self.rows_of(stage), None
      title = f'after {stage}'
      optim = self.nodes.get(stage, {}).get('optim') or {}
      if optim.get('average') is not None:
        title += ', averaged weights'
      if any('select/best_step' in row for row in rows):
        step = writers.end(rows)['step']
        title += f', at its best step {step}'
      if not self.finished and rows[-1] is self.rows[-1]:
        if rows[-1]['step'] < self.steps.get(stage, 0):
          title = f'{stage} so far'
      ends[stage] = title, step
    return ends


def read(workdir: str, name: str | None = None) -> Run:
  """Reads a workdir; files that are missing are left out.

  Args:
    workdir: the run's folder.
    name: its name in the report; None = the folder's.

  Raises:
    ValueError: a file is damaged.
  """
  path = os.path.join(workdir, 'metrics.jsonl')
  rows = writers.read_metrics(path)
  config, about = (
    disk.read_json_object(file) if os.path.exists(file) else {}
    for file in (
      os.path.join(workdir, name) for name in ('config.json', 'about.json')
    )
  )
  return Run(
    workdir,
    name or os.path.basename(os.path.abspath(workdir)),
    rows,
    config,
    about,
    os.path.getmtime(path) if rows else None,
  )


def files(
  workdir: str, stages: Sequence[str], what: str
) -> list[tuple[str, int, str]]:
  """Returns (stage, step, path) of the files of rollouts, in the run's order.

  Args:
    workdir: the run's folder.
    stages: its stages, in their order.
    what: 'eval', 'suite' or 'train'.
  """
  folder, rollout_files = os.path.join(workdir, 'rollouts'), []
  for name in os.listdir(folder) if os.path.isdir(folder) else ():
    if match := re.fullmatch(rf'(.+)_{what}_(\d+)\.jsonl', name):
      path = os.path.join(folder, name)
      rollout_files.append((match[1], int(match[2]), path))
  order = {stage: place for place, stage in enumerate(stages)}
  return sorted(
    rollout_files, key=lambda x: (order.get(x[0], len(order)), x[1], x[2])
  )


def read_rows(path: str, keys: Sequence[str]) -> Rows:
  """Returns the rows of a file of rollouts; warns of lines that are none.

  Args:
    path: the file.
    keys: the names that each row must have, with a text or a whole number.
  """
  try:
    rows = writers.read(path)
    for row in rows:
      if not all(isinstance(row.get(key), str | int) for key in keys):
        raise ValueError(f'{path} must have {" and ".join(keys)} in each row')
  except (OSError, ValueError) as error:
    warnings.warn(f'the report leaves rollouts out: {error}', stacklevel=2)
    return []
  return rows


def names(workdirs: Sequence[str]) -> list[str]:
  """Returns a name per folder: the last parts of its path that differ."""
  parts = [os.path.abspath(x).strip(os.sep).split(os.sep) for x in workdirs]
  for size in range(1, max(map(len, parts)) + 1):
    short = ['/'.join(x[-size:]) for x in parts]
    if len(set(short)) == len(short):
      return short
  return [f'{x[-1]} ({i})' for i, x in enumerate(parts, 1)]


def stages(rows: Rows) -> list[str]:
  """Returns the names of the stages, in the order in which they ran."""
  return list(dict.fromkeys(row['stage'] for row in rows))


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
    for row in stage_rows:
      for name, value in row.items():
        if name in ('stage', 'step') or estimates.is_bound(name, row):
          continue
        if value is None or isinstance(value, int | float):
          y = np.nan if value is None else value
          points.setdefault(name, []).append((start + row['step'], y))
    for name, pairs in points.items():
      by_metric.setdefault(name, []).append(np.array(pairs, np.float64).T)
    start += max(row['step'] for row in stage_rows)
  return by_metric


def shows(key: str, name: str) -> bool:
  """Returns whether a panel's key is a metric, or its prefix up to / or @."""
  return name == key or key[-1] in '/@' and name.startswith(key)
