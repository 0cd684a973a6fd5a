"""SIGTERM asks a run to save and leave; the answer comes between batches."""

import contextlib
import signal
import weakref
from collections.abc import Callable, Iterator

# Exit code of a run that saved itself and can be started again (EX_TEMPFAIL).
EXIT_CODE = 75


class Preempted(Exception):
  """The run stopped early, on request, with everything saved."""


class Signal:
  """Whether somebody asked the run to stop."""

  def __init__(self):
    self.requested = False
    self._wakes: list[weakref.WeakMethod] = []

  def request(self, *_) -> None:
    self.requested = True
    for known in self._wakes:
      wake = known()
      if wake is not None:
        wake()

  def wakes(self, wake: Callable[[], None]) -> None:
    """Has a request end what would otherwise be waited for.

    Args:
      wake: a method; called as long as somebody else holds its object, so that
        the signal keeps nothing of a stage that is over.
    """
    self._wakes.append(weakref.WeakMethod(wake))

  def check(self, where: str) -> None:
    """Raises `Preempted` if it was asked; call it when all is saved."""
    if self.requested:
      raise Preempted(where)


@contextlib.contextmanager
def on_sigterm() -> Iterator[Signal]:
  """Turns SIGTERM into a request while the context lasts."""
  stop = Signal()
  before = signal.signal(signal.SIGTERM, stop.request)
  try:
    yield stop
  finally:
    signal.signal(signal.SIGTERM, before)
