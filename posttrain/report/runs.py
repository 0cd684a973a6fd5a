"""A run as the report reads it: the files of its workdir."""

import dataclasses
import functools
import os
import re
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.metrics import writers
from posttrain.report import series
from posttrain.util import json_files

Ends = dict[str, tuple[str, int | None]]


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
  rows: series.Rows
  config: dict[str, Any]
  about: dict[str, Any]
  written: float | None

  @property
  def stages(self) -> list[str]:
    """The stages that have begun, in their order."""
    return series.stages(self.rows)

  @property
  def ends(self) -> Ends:
    """{stage: (title of its end, step, None = its last)}."""
    ends = series.ends(self.rows, _averaged(self.config))
    last = self.rows[-1] if self.rows else {}
    steps = self.steps.get(last.get('stage', ''), 0)
    if not self.finished and last.get('step', steps) < steps:
      ends[last['stage']] = f'{last["stage"]} so far', ends[last['stage']][1]
    return ends

  @property
  def envs(self) -> set[str]:
    """The names of the environments of all stages."""
    nodes = [node.get('envs') for node in self.nodes.values()]
    return {name for node in nodes if isinstance(node, dict) for name in node}

  @functools.cached_property
  def arrays(self) -> dict[str, list[np.ndarray]]:
    """The numbers of every metric, see `series.arrays`."""
    return series.arrays(self.rows)

  @property
  def steps(self) -> dict[str, int]:
    """{stage: number of its steps}, in the order of the config."""
    nodes = self.nodes
    return {
      name: node['steps']
      for name, node in nodes.items()
      if isinstance(node.get('steps'), int)
    }

  @property
  def finished(self) -> bool:
    """Whether the run has come to its end."""
    if self.about:
      return self.about.get('ended') is not None
    last = self.rows[-1] if self.rows else {}
    *_, end = [(None, None), *self.steps.items()]
    return bool(last) and (last['stage'], last['step']) == end

  @property
  def nodes(self) -> dict[str, dict[str, Any]]:
    """The options of each stage, in the order of the config."""
    names = self.config.get('stages')
    names = names if isinstance(names, list) else []
    nodes = {x: self.config.get(x) for x in names if isinstance(x, str)}
    return {name: x for name, x in nodes.items() if isinstance(x, dict)}


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
  return Run(
    workdir,
    name or os.path.basename(os.path.abspath(workdir)),
    rows,
    _object(os.path.join(workdir, 'config.json')),
    _object(os.path.join(workdir, 'about.json')),
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
    match = re.fullmatch(rf'(.+)_{what}_(\d+)\.jsonl', name)
    if match:
      rollout_files.append(
        (match[1], int(match[2]), os.path.join(folder, name))
      )
  order = {stage: place for place, stage in enumerate(stages)}
  return sorted(
    rollout_files, key=lambda x: (order.get(x[0], len(order)), x[1], x[2])
  )


def read_rows(path: str, keys: Sequence[str]) -> list[dict[str, Any]]:
  """Returns the rows of a file of rollouts; warns of lines that are none.

  Args:
    path: the file.
    keys: the names that each row must have, with a text or a whole number.
  """
  try:
    objects = writers.read(path)
  except (OSError, ValueError) as error:
    warnings.warn(f'the report leaves answers out: {error}', stacklevel=2)
    return []
  rows = [
    x for x in objects if all(isinstance(x.get(k), str | int) for k in keys)
  ]
  if len(rows) < len(objects):
    warnings.warn(
      f'the report leaves {len(objects) - len(rows)} answers of {path} out: '
      f'they lack {" or ".join(keys)}',
      stacklevel=2,
    )
  return rows


def names(workdirs: Sequence[str]) -> list[str]:
  """Returns a name per folder: the last parts of its path that differ."""
  parts = [os.path.abspath(x).strip(os.sep).split(os.sep) for x in workdirs]
  for size in range(1, max(map(len, parts)) + 1):
    short = ['/'.join(x[-size:]) for x in parts]
    if len(set(short)) == len(short):
      return short
  return [f'{"/".join(x[-1:])} ({i})' for i, x in enumerate(parts, 1)]


def _object(path: str) -> dict[str, Any]:
  return json_files.read_object(path) if os.path.exists(path) else {}


def _averaged(config: dict[str, Any]) -> set[str]:
  """Returns the stages that keep a moving average of their weights."""
  nodes = [x for x in config.items() if isinstance(x[1], dict)]
  optims = [(name, node.get('optim')) for name, node in nodes]
  return {
    name
    for name, optim in optims
    if isinstance(optim, dict) and optim.get('average') is not None
  }
