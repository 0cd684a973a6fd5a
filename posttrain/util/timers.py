"""Timers of the parts of a step: seconds by name.

Each part is a phase of the watchdog.
"""

import collections
import contextlib
import time
from collections.abc import Iterator

from posttrain.util import watchdog


class Timers:
  """Seconds by name, accumulated until `take`.

  timers = Timers()
  with timers('data'):
    batch = next(pipeline)
  timers.take()  # {'data': 0.01}; the next step starts at zero
  """

  def __init__(self):
    self._seconds: dict[str, float] = collections.defaultdict(float)
    self.last: dict[str, float] = {}  # seconds of the latest block of a name

  @contextlib.contextmanager
  def __call__(self, name: str) -> Iterator[None]:
    """Times a block, which is a phase; the first of a name may compile."""
    start = time.perf_counter()
    try:
      with watchdog.phase(name, first=name not in self.last):
        yield
    finally:
      self.last[name] = time.perf_counter() - start
      self._seconds[name] += self.last[name]

  def take(self) -> dict[str, float]:
    """Returns the seconds since the last `take`, and resets them."""
    seconds = dict(self._seconds)
    self._seconds.clear()
    return seconds
