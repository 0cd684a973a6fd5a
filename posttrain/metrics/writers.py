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
    """Reads the kept rows; the first write truncates the file after them.

    (Not earlier: a finished stage has a writer, too, which writes nothing, and
    the lines after its position belong to the next stage.)

    Args:
      path: path of metrics.jsonl; created at the first write.
      position: bytes of the file to keep, from `position()`; 0 = none.

    Raises:
      ValueError: a line before `position` is no row.
    """
    kept = b''
    if position and os.path.exists(path):
      with open(path, 'rb') as f:
        kept = f.read(position)
    end = kept.rfind(b'\n') + 1
    if end != position:
      warnings.warn(
        f'{path} must hold the {position} bytes that the checkpoint counted: '
        f'got {end} of whole lines; the metrics of earlier steps are lost, '
        'later ones will be appended',
        stacklevel=2,
      )
    # Stage -> the latest value of each metric.
    self.latest: dict[str, Row] = {}
    for row in read_metrics(path, end):
      self.latest.setdefault(row['stage'], {}).update(row)
    self._path, self._position = path, end

  def write(self, stage: str, step: int, values: Mapping[str, Any]) -> Row:
    """Appends a line, and returns its object.

    Args:
      stage: the stage's name.
      step: the step, above all steps of the stage in the file.
      values: numbers, bools, strings or None, by name; numpy and jax scalars
        are numbers. Nested dicts are flattened with slashes.
    """
    latest = self.latest.setdefault(stage, {})
    last = latest.get('step', -1)
    assert step > last, f'stage {stage} step {step} after step {last}'
    row = to_row(stage, step, values)
    latest |= row
    with open(self._path, 'ab') as f:
      if f.tell() > self._position:
        f.truncate(self._position)
        f.seek(0, os.SEEK_END)
      f.write(json.dumps(row, allow_nan=False).encode() + b'\n')
      self._position = f.tell()
    return row

  def position(self) -> int:
    """Returns the file's length in bytes up to the last line written."""
    return self._position


def to_row(stage: str, step: int, values: Mapping[str, Any]) -> Row:
  """Returns the JSON object of a line: plain values, flat, without NaN."""
  row, nonfinite = {'stage': stage, 'step': int(step)}, []
  for name, value in _flat(values):
    assert name not in row, f'metric {name} was given twice'
    if not isinstance(value, bool | int | float | str | None):
      # A scalar of numpy or jax.
      value = np.asarray(value)
      assert value.ndim == 0, f'metric {name} has shape {value.shape}, not ()'
      value = value.item() if value.dtype.kind in 'biu' else float(value)
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


def read(path: str, keys: Sequence[str] = (), size: int = -1) -> list[Row]:
  """Returns the lines of a JSONL file; [] if the file does not exist.

  A last line without a newline is unfinished and left out.

  Args:
    path: the file.
    keys: names that each line must have, with a text or a whole number.
    size: bytes to read; -1 = all.

  Raises:
    ValueError: a line is no such object; names the file and the line.
  """
  if not os.path.exists(path):
    return []
  with open(path, 'rb') as f:
    lines = f.read(size).split(b'\n')
  rows = []
  for number, line in enumerate(lines[:-1], 1):
    where = f'{path}:{number}'
    row = disk.parse_json(line, where)
    if not isinstance(row, dict) or not all(
      isinstance(row.get(key), str | int) for key in keys
    ):
      raise ValueError(
        f'{where} must be an object with the keys {keys}: got '
        f'{errors.quote(row)}'
      )
    rows.append(row)
  return rows


def read_metrics(path: str, size: int = -1) -> list[Row]:
  """Returns the rows of a metrics.jsonl, of its first bytes; see `read`."""
  return read(path, ('stage', 'step'), size)


def last(path: str) -> Row:
  """Returns the row of the last stage's end in a metrics.jsonl; see `end`.

  It is empty if there are no rows, or no file.
  """
  rows = read_metrics(path)
  own = [row for row in rows if row['stage'] == rows[-1]['stage']]
  return end(own) if own else {}


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

  def __init__(self, path: str):
    """Reads the seconds of the run's earlier processes.

    Args:
      path: the run's metrics.jsonl; it may be missing.
    """
    before = {ELAPSED: 0.0, CPU: 0.0}  # seconds of earlier processes
    with contextlib.suppress(ValueError):  # rows that are not kept may be bad
      for row in read_metrics(path):
        before |= {key: row[key] for key in before if key in row}
    self._zero = preemption.STARTED - before[ELAPSED]
    self._cpu = before[CPU]
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


def useful(row: Mapping[str, Any]) -> float:
  """Returns the seconds of a row's rollout and update, without compilation."""
  parts = (row.get(f'time/{x}') or 0.0 for x in ('rollout', 'update'))
  return max(sum(parts) - (row.get('time/compile') or 0.0), 0.0)


def _flat(values: Mapping[str, Any], prefix: str = ''):
  for name, value in values.items():
    if isinstance(value, Mapping):
      yield from _flat(value, f'{prefix}{name}/')
    else:
      yield prefix + name, value
