"""Seconds per name, accumulated between two takes."""

import collections
import contextlib
import time
from collections.abc import Iterator


class Timers:
  """Seconds per name, accumulated until they are taken.

  timers = Timers()
  with timers('data'):
    batch = next(pipeline)
  timers.take()  # {'data': 0.01}; the next step starts at zero
  """

  def __init__(self):
    self._now = collections.Counter()

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    start = time.perf_counter()
    try:
      yield
    finally:
      self._now[name] += time.perf_counter() - start

  def take(self) -> dict[str, float]:
    """Returns the seconds since the last take, and starts from zero."""
    taken = dict(self._now)
    self._now.clear()
    return taken
