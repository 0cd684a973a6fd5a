"""Requests to stop a run early: by SIGTERM, or because of a time limit.

The train loop looks at them between batches.
"""

import contextlib
import re
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

from posttrain.util import errors

STARTED = time.monotonic()  # about when the process started
MARGIN = 5.0  # seconds between the last save and the time limit
_LONGEST = 365 * 86_400  # seconds of a time limit; clocks overflow far above
_UNITS = {'d': 86_400, 'h': 3_600, 'm': 60, 's': 1}


class Preempted(Exception):
  """Says where a run stops early on request, and whether that is saved."""


class Signal:
  """A request to stop the run."""

  def __init__(
    self, time_limit: float | None = None, any_of: Callable[[bool], bool] = bool
  ):
    """Starts without a request.

    Args:
      time_limit: seconds of the process, from its start; None = any.
      any_of: returns whether a flag is set in any process of the run; `check`
        and `after_step` call it, so that all stop at the same step.
    """
    self.requested, self._any_of = False, any_of
    self._callbacks: list[weakref.WeakMethod[Callable[[], None]]] = []
    self._step_began, self._steps, self._longest = time.monotonic(), 0, 0.0
    self._end = self._latest = None
    self._is_late = self._has_trained = False
    if time_limit is not None:
      # When the process must have ended, and when it must begin to save.
      self._end = self._latest = STARTED + time_limit - MARGIN
      threading.Thread(target=self._wait, name='limit', daemon=True).start()

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

  def begin_steps(self) -> None:
    """Starts to measure the steps of a stage."""
    self._step_began, self._steps = time.monotonic(), 0

  def after_step(
    self, save_seconds: float, spent: float = 0.0, ahead: float = 0.0
  ) -> bool:
    """Returns whether to save and stop now; called once at the end of a step.

    True after a request, or if the time limit leaves no time for another step,
    as long as the longest of the stage, and its save. The first step, which
    compiles, counts only until there is another.

    Args:
      save_seconds: how long a save takes.
      spent: seconds of the step's evaluation, which others may not have.
      ahead: seconds of the next step's evaluation, 0 if it has none.
    """
    now = time.monotonic()
    last, self._step_began = now - self._step_began - spent, now
    self._steps += 1
    self._longest = last if self._steps <= 2 else max(self._longest, last)
    self._has_trained = True
    if self._end is not None:
      self._latest = self._end - save_seconds
      self.requested |= now + self._longest + ahead > self._latest
    return self._any_of(self.requested)

  def check(self, where: str, is_saved: bool = True) -> None:
    """Stops after a request; call it when all is saved, or nothing was done.

    Args:
      where: what the run has reached, for the message.
      is_saved: whether a checkpoint has it.

    Raises:
      Preempted: after a request.
      ValueError: the time limit has passed before the first step, as it will
        the next time.
    """
    if self._any_of(self._is_late and not self._has_trained):
      raise ValueError(
        '--time_limit must leave time for a step: got '
        f'{time.monotonic() - STARTED:.0f} s that passed before {where}; '
        'nothing was trained, so raise it'
      )
    if self._any_of(self.requested):
      state = 'which is saved'
      if not is_saved:
        state = 'with no step saved after the newest checkpoint'
      raise Preempted(f'{where}, {state}')

  def _wait(self) -> None:
    """Requests the stop at the latest time, also in the middle of a step."""
    while not self.requested:
      assert self._latest is not None
      left = self._latest - time.monotonic()
      if left <= 0:
        self._is_late = not self.requested
        self.request()
      time.sleep(min(max(left, 0.0), 1.0))


@contextlib.contextmanager
def on_sigterm(
  time_limit: float | None = None, any_of: Callable[[bool], bool] = bool
) -> Iterator[Signal]:
  """Yields a signal that SIGTERM requests; restores the handler at the end.

  Args:
    time_limit: as in `Signal`.
    any_of: as in `Signal`.
  """
  stop = Signal(time_limit, any_of)
  before = signal.signal(signal.SIGTERM, stop.request)
  try:
    yield stop
  finally:
    signal.signal(signal.SIGTERM, before)


def seconds(text: str, name: str) -> float:
  """Returns the seconds of a duration such as '3h50m', '90m' or '1d12h'.

  Args:
    text: the duration.
    name: its name in errors, such as '--time_limit'.

  Raises:
    ValueError: it is no duration, 0, or more than a year.
  """
  numbers = re.fullmatch(r'(?:(\d+)d)?(?:(\d+)h)?(?:(\d+)m)?(?:(\d+)s)?', text)
  total = sum(
    int(number or 0) * factor
    for number, factor in zip(
      numbers.groups() if numbers else (), _UNITS.values(), strict=False
    )
  )
  if not 0 < total <= _LONGEST:
    raise ValueError(
      f'{name} must be a duration with units, as in 3h50m or 90s, of at most '
      f'365d: got {errors.quote(text)}'
    )
  return float(total)
