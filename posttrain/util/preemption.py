"""Preemption: SIGTERM requests a stop, which the run makes between batches."""

import contextlib
import signal
import weakref
from collections.abc import Callable, Iterator

# Exit code of a run that stopped after saving, to be started again
# (EX_TEMPFAIL).
EXIT_CODE = 75


class Preempted(Exception):
  """Raised when a run stops early on request, after saving."""


class Signal:
  """A request to stop the run."""

  def __init__(self):
    self.requested = False
    self._callbacks: list[weakref.WeakMethod[Callable[[], None]]] = []

  def request(self, *_: object) -> None:
    """Sets the request and calls the callbacks; a signal handler."""
    self.requested = True
    for reference in self._callbacks:
      callback = reference()
      if callback is not None:
        callback()

  def on_request(self, callback: Callable[[], None]) -> None:
    """Registers a callback that ends a wait when a stop is requested.

    Args:
      callback: a bound method. It is kept by a weak reference, so that the
        signal does not keep the objects of a finished stage alive.
    """
    self._callbacks.append(weakref.WeakMethod(callback))

  def check(self, where: str) -> None:
    """Raises `Preempted(where)` after a request; call it when all is saved."""
    if self.requested:
      raise Preempted(where)


@contextlib.contextmanager
def on_sigterm() -> Iterator[Signal]:
  """Yields a signal that SIGTERM requests; restores the handler at the end."""
  stop = Signal()
  before = signal.signal(signal.SIGTERM, stop.request)
  try:
    yield stop
  finally:
    signal.signal(signal.SIGTERM, before)
