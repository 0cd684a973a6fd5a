"""The file of metrics, metrics.jsonl.

One strict-JSON object per line: `stage`, `step`, then flat names grouped by
slashes (`loss/total`, `eval/pass_rate/arithmetic`). A number that is not
finite is written as null, because JSON has no NaN and no Infinity; the line
then has `nonfinite`, the names of those values.

A checkpoint stores `Writer.position()`. A resumed run opens the file with it,
and its first write truncates the file there, so that no step appears twice,
none is missing, and a half-written line is gone.

`Goodput` is the share of a run's time in steps that counted.
"""

import contextlib
import errno
import json
import math
import os
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.util import disk, errors, preemption

ELAPSED, CPU = 'time/elapsed', 'time/cpu'
GOODPUT = 'time/goodput'

Row = dict[str, Any]


class Writer:
  """Writes a run's metrics, from a position in the file on."""

  def __init__(self, path: str, position: int):
    """Checks the file; the first write truncates it at `position`.

    (Not earlier: a finished stage has a writer, too, which writes nothing, and
    the lines after its position belong to the next stage.)

    Args:
      path: path of metrics.jsonl; created, with its folder, at the first write.
      position: bytes of the file to keep, from `position()`; 0 = none.

    Raises:
      ValueError: a line before `position` is no row.
    """
    size = os.path.getsize(path) if os.path.exists(path) else 0
    if size < position:
      warnings.warn(
        f'{path} must hold the {position} bytes that the checkpoint counted: '
        f'got {size}; the metrics of earlier steps are lost, later ones '
        f'will be appended',
        stacklevel=2,
      )
      position = _end_of_lines(path, size)
    # Stage -> the latest value of each metric before the position.
    self.latest: dict[str, Row] = {}
    for row in read_metrics(path, position):
      self.latest.setdefault(row['stage'], {}).update(row)
    self._path = path
    self._position = position
    self._file = None
    # Stage -> the step of its last row.
    self._last_step = {k: row['step'] for k, row in self.latest.items()}

  def write(self, stage: str, step: int, values: Mapping[str, Any]) -> Row:
    """Appends a line, flushes it, and returns its object.

    Args:
      stage: the stage's name.
      step: the step, above all steps of the stage in the file.
      values: numbers, bools, strings or None, by name; numpy and jax scalars
        are numbers. Nested dicts are flattened with slashes.

    Raises:
      ValueError: at the first write, if `position` is inside a line.
      FileNotFoundError: the file has been removed since.
    """
    if self._file is None:
      self._open()
    if not os.path.exists(self._path):
      # The open file would take all lines and be gone at the end.
      raise FileNotFoundError(errno.ENOENT, 'the file is gone', self._path)
    last = self._last_step.get(stage, -1)
    assert step > last, f'stage {stage} step {step} after step {last}'
    self._last_step[stage] = step
    row = to_row(stage, step, values)
    self._file.write(json.dumps(row, allow_nan=False).encode() + b'\n')
    self._file.flush()
    self._position = self._file.tell()
    return row

  def position(self) -> int:
    """Returns the file's length in bytes up to the last line written."""
    return self._position

  def close(self) -> None:
    """Closes the file; does nothing the second time."""
    if self._file is not None:
      self._file.close()
    self._file = None

  def _open(self) -> None:
    if not _ends_a_line(self._path, self._position):
      raise ValueError(
        f'{self._path} must have the end of a line at the position that the '
        f'checkpoint counted: got byte {self._position}, inside a line; '
        'restore the file that this run wrote, or delete it to continue '
        'without the metrics of earlier steps'
      )
    os.makedirs(os.path.dirname(os.path.abspath(self._path)), exist_ok=True)
    self._file = open(self._path, 'ab')
    self._file.truncate(self._position)


def to_row(stage: str, step: int, values: Mapping[str, Any]) -> Row:
  """Returns the JSON object of a line: plain values, flat, without NaN."""
  row, nonfinite = {'stage': stage, 'step': int(step)}, []
  for name, value in _flat(values):
    assert name not in row, f'metric {name} was given twice'
    value = _plain(name, value)
    if isinstance(value, float) and not math.isfinite(value):
      nonfinite.append(name)
      value = None
    row[name] = value
  if nonfinite:
    row['nonfinite'] = nonfinite
  return row


def dumps(value: Any) -> str:
  """Returns JSON: null for numbers that are not finite, texts for objects."""

  def finite(node):
    if isinstance(node, Mapping):
      return {key: finite(child) for key, child in node.items()}
    if isinstance(node, list | tuple):
      return [finite(child) for child in node]
    bad = isinstance(node, float) and not math.isfinite(node)
    return None if bad else node

  return json.dumps(finite(value), allow_nan=False, default=str)


def read(path: str) -> list[Row]:
  """Returns the lines of a JSONL file; [] if the file does not exist.

  A last line without a newline is unfinished and left out.

  Raises:
    ValueError: a line is no JSON object; names the file and the line.
  """
  return [row for _, row in _objects(path)]


def read_metrics(path: str, size: int = -1) -> list[Row]:
  """Returns the rows of a metrics.jsonl; see `read`.

  Args:
    path: the file; it may be missing.
    size: bytes to read; -1 = all.

  Raises:
    ValueError: a line is no row of metrics; names the file and the line.
  """
  try:
    objects = _objects(path, size)
    for where, row in objects:
      step = row.get('step')
      if not isinstance(row.get('stage'), str) or type(step) is not int:
        raise ValueError(
          f'{where} must have a stage and a step: got {errors.quote(row)}'
        )
  except ValueError as error:
    raise ValueError(
      f'{error}; repair or delete that line, or move the file away: the '
      'checkpoints do not need it'
    ) from error
  return [row for _, row in objects]


def last(path: str) -> Row:
  """Returns the row of the last stage's end in a metrics.jsonl; see `end`.

  Raises:
    ValueError: there is none.
  """
  rows = read_metrics(path)
  if not rows:
    raise ValueError(
      f'{path} must hold the metrics of a finished run: got none; the '
      'checkpoints do not need it, and posttrain.evaluate measures them again'
    )
  return end([row for row in rows if row['stage'] == rows[-1]['stage']])


def end(rows: Sequence[Row]) -> Row:
  """Returns the row of the weights that a stage hands on.

  The last one; where the stage selects (`eval.best`), that of its best step.

  Args:
    rows: all rows of a stage, at least one.
  """
  steps = {row['step']: row for row in rows}
  best = [row['select/best_step'] for row in rows if 'select/best_step' in row]
  return steps.get(best[-1], rows[-1]) if best else rows[-1]


class Goodput:
  """The share of a run's time in steps that counted.

      goodput = seconds of rollouts and updates, without compilation, of the
                rows that are kept / seconds of all processes of the run

  Steps that a resumed run repeats count once, and the time that was lost with
  them, as starts, compilation, evaluations and saves, is in the denominator.
  Time in which no process ran is not, nor is that after the last row of a
  process that was killed, or of a start that ended before its first row.
  `time/cpu` counts the CPU seconds of the same time: of this process, all its
  threads, and of those of its children that have ended.
  """

  def __init__(self, path: str, began: float = preemption.STARTED):
    """Reads the seconds of the run's earlier processes.

    Args:
      path: the run's metrics.jsonl; it may be missing.
      began: the start of this process, of `time.monotonic`.
    """
    self._zero = began - _last(path, ELAPSED)
    self._cpu = _last(path, CPU)  # seconds of earlier processes
    self._useful = 0.0

  def keep(self, rows: Iterable[Mapping[str, Any]]) -> None:
    """Sets the rows that count so far."""
    self._useful = sum(map(useful, rows))

  def add(self, row: Mapping[str, Any]) -> dict[str, float]:
    """Counts a new row; returns its `time/elapsed`, `cpu` and `goodput`."""
    self._useful += useful(row)
    elapsed = time.monotonic() - self._zero
    cpu = self._cpu + sum(os.times()[:4])
    return {ELAPSED: elapsed, CPU: cpu, GOODPUT: self._useful / elapsed}


def _last(path: str, name: str) -> float:
  """Returns the seconds in the file's last row with them; 0: there is none."""
  with contextlib.suppress(ValueError):  # rows that are not kept may be damaged
    for row in reversed(read_metrics(path)):
      if isinstance(row.get(name), float):
        return row[name]
  return 0.0


def useful(row: Mapping[str, Any]) -> float:
  """Returns the seconds of a row's rollout and update, without compilation."""
  parts = (row.get(f'time/{x}') or 0.0 for x in ('rollout', 'update'))
  return max(sum(parts) - (row.get('time/compile') or 0.0), 0.0)


def _objects(path: str, size: int = -1) -> list[tuple[str, Row]]:
  """Returns ('FILE:LINE', JSON object) of each line in the first bytes."""
  if not os.path.exists(path):
    return []
  with open(path, 'rb') as f:
    lines = f.read(size).split(b'\n')
  objects = []
  for number, line in enumerate(lines[:-1], 1):
    if not line.strip():
      continue
    where = f'{path}:{number}'
    value = disk.parse_json(line, where)
    if not isinstance(value, dict):
      raise ValueError(
        f'{where} must be a JSON object: got {errors.quote(value)}'
      )
    objects.append((where, value))
  return objects


def _flat(values: Mapping[str, Any], prefix: str = ''):
  for name, value in values.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f'{prefix}{name}/')
    else:
      yield prefix + name, value


def _plain(name: str, value: Any) -> bool | int | float | str | None:
  """Converts a numpy or jax scalar to Python's."""
  if value is None or isinstance(value, bool | int | float | str):
    return value
  value = np.asarray(value)
  assert value.ndim == 0, f'metric {name} has shape {value.shape}, not ()'
  if value.dtype.kind in 'biu':
    return value.item()
  return float(value)  # bfloat16, too


def _end_of_lines(path: str, size: int) -> int:
  """Returns the position after the last whole line."""
  if not size:
    return 0
  with open(path, 'rb') as f:
    return f.read().rfind(b'\n') + 1


def _ends_a_line(path: str, position: int) -> bool:
  """Returns whether `position` is 0 or just after a line."""
  if not position:
    return True
  with open(path, 'rb') as f:
    f.seek(position - 1)
    return f.read(1) == b'\n'
