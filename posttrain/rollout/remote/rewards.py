"""A reward function in a worker process.

The interface is that of `grading.isolated.Worker`, and so are the rewards. A
call whose worker is lost is made once more, in another one: a function is
called with the same arguments, and may be called twice. An exception of the
function is a fault, as in a thread; so is a call over its timeout, whose worker
is killed.
"""

from collections.abc import Callable, Mapping
from typing import Any

from posttrain.rollout.grading import calls, isolated, values
from posttrain.rollout.remote import workers
from posttrain.util import foreign

TRIES = 2  # workers that a call may have


class Worker:
  """One function's worker."""

  def __init__(self, start: Callable[[], workers.Handle]):
    """Starts nothing yet; `start`: begins to start a process."""
    self._start = start
    self._handle: workers.Handle | None = None
    self.losses = 0  # workers that were lost or given up

  def call(
    self,
    arguments: Mapping[str, Any],
    logged: dict[str, list[float]],
    clock: calls.Clock,
    count: int,
    weight: float,
  ) -> list[values.Value]:
    """Calls the function; its loggers append to `logged`.

    Raises:
      Fault: it failed, or its workers did.
    """
    option = "rollout.workers='ray'"
    message = isolated.message_of(arguments, count, weight, option)
    for left in reversed(range(TRIES)):
      try:
        return isolated.rewards_of(self._reply(message, clock), logged, count)
      except workers.Lost as error:
        self._lose()
        if not left:
          raise calls.Fault(
            f'must return rewards: {TRIES} workers were lost, the last: '
            f'{foreign.text(error, 200)}'
          ) from None
      except workers.TimedOut:
        self._lose()
        raise calls.Fault(calls.late(clock)) from None
    raise AssertionError('the last try returns or raises')

  def _reply(self, message: bytes, clock: calls.Clock) -> Mapping[str, Any]:
    if self._handle is None:
      self._handle = self._start()
    self._handle.start()
    clock.restart()
    return self._handle.call(clock.timeout, 'call', message)

  def _lose(self) -> None:
    self.losses += 1
    self.stop()

  def stop(self) -> None:
    """Kills the process, if one runs."""
    handle, self._handle = self._handle, None
    if handle is not None:
      handle.kill()
