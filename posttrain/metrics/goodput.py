"""Goodput: the share of a run's time in steps that counted.

    goodput = seconds of rollouts and updates, without compilation, of the rows
              that are kept / seconds for which the run's processes have run

Steps that a resumed run repeats count once, and the time that was lost with
them, as starts, compilation, evaluations and saves, is in the denominator.
Time in which no process ran is not, nor is that after the last row of a process
that was killed, or of a start that ended before its first row. `time/cpu`
counts the CPU seconds of the same time: of this process, all its threads, and
of those of its children that have ended.
"""

import contextlib
import os
import time
from collections.abc import Iterable, Mapping
from typing import Any

from posttrain.metrics import writers
from posttrain.util import preemption

ELAPSED, CPU = 'time/elapsed', 'time/cpu'
GOODPUT = 'time/goodput'


class Goodput:
  """The goodput of a run that may have been started before."""

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
    for row in reversed(writers.read_metrics(path)):
      if isinstance(row.get(name), float):
        return row[name]
  return 0.0


def useful(row: Mapping[str, Any]) -> float:
  """Returns the seconds of a row's rollout and update, without compilation."""
  parts = (row.get(f'time/{x}') or 0.0 for x in ('rollout', 'update'))
  return max(sum(parts) - (row.get('time/compile') or 0.0), 0.0)
