"""Time limits of calls into environments.

    with limits.Inline(seconds) as inline:    # in this thread
      result = inline(call)
    result = limits.aside(call, seconds)      # in a thread of its own

1. `Inline` needs no thread, and costs about a microsecond per call: an alarm of
   the operating system (SIGALRM) interrupts the call, as Ctrl-C would. Signals
   reach the main thread alone; in another thread the calls have no limit. An
   alarm that an environment sets itself replaces this one in its context.
2. `aside` waits for a daemon thread. A call over its limit runs on in it, and
   its result is ignored; see `abandoned`.

Neither ends a call into C code that neither returns nor checks for signals: an
environment that waits in such code sets `blocking`. The clock stops while a
call waits for its judge (`untimed`), since judges have timeouts of their own.
"""

import dataclasses
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

from posttrain.envs import base
from posttrain.rollout import abandoned
from posttrain.rollout.grading import calls
from posttrain.util import exits, watchdog

AGAIN = 1.0  # seconds until an alarm is repeated, if the call swallows it
MOST_ALARMS = 30  # that a call may swallow; one more ends the process


@dataclasses.dataclass(frozen=True)
class Late:
  """The result of a call that exceeded its limit."""

  seconds: float  # the limit


_local = threading.local()  # `clock` of the thread's call, if it has a limit


class Inline:
  """A context whose calls have a limit each; contexts may nest.

  One alarm serves all calls: if it fires early in a call, because it was set
  before an earlier one, it is set again for the rest of the limit.
  """

  def __init__(self, seconds: float):
    """Sets no alarm yet; `seconds`: the limit of a call."""
    self._seconds = seconds
    # Of the running call, the last: alarms that it has swallowed.
    self._is_on, self._start, self._alarms = False, 0.0, 0
    self._outer: Any = None  # what the alarm replaces

  def __enter__(self) -> 'Inline':
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and hasattr(signal, 'setitimer'):  # not on Windows
      handler = signal.signal(signal.SIGALRM, self._fire)
      self._outer = handler, self._set(self._seconds)
    return self

  def __exit__(self, *error) -> None:
    if self._outer is None:
      return
    handler, timer = self._outer
    signal.setitimer(signal.ITIMER_REAL, *timer)
    if handler is not None:  # one that Python has not set
      signal.signal(signal.SIGALRM, handler)

  def __call__(self, call: Callable[[], Any]) -> Any:
    """Returns the result of a call, or `Late`."""
    if self._outer is None:
      return call()
    outer, _local.clock = getattr(_local, 'clock', None), self
    self._start, self._is_on, self._alarms = time.monotonic(), True, 0
    try:
      result = call()
      self._is_on = False
      return Late(self._seconds) if self._alarms else result
    except base.TimeLimit:
      self._is_on = False
      self._set(self._seconds)
      return Late(self._seconds)
    finally:
      self._is_on = False
      _local.clock = outer

  def untimed(self, judge: Callable) -> Callable:
    """Returns the judge, wrapped so that its calls stop the clock."""

    def timed_judge(*args, **kwargs):
      start, self._is_on = time.monotonic(), False
      try:
        return judge(*args, **kwargs)
      finally:
        self._start += time.monotonic() - start
        self._is_on = True

    return timed_judge

  def _fire(self, number: int, frame: Any) -> None:
    """Handles the signal."""
    left = self._start + self._seconds - time.monotonic()
    if self._is_on and left <= 0:
      self._alarms += 1
      if self._alarms > MOST_ALARMS:
        self._end()
      raise base.TimeLimit  # and again, if the call swallows it
    self._set(left if self._is_on else self._seconds)

  def _end(self) -> None:
    """Ends the process: nothing else ends a call that swallows every alarm."""
    watchdog.end(
      f'a call {watchdog.describe()} goes on after its time limit of '
      f'{self._seconds:g} s, because it catches every exception; let it catch '
      'Exception instead, or set blocking = True',
      exits.STALLED,
    )

  def _set(self, seconds: float) -> tuple[float, float]:
    return signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN)


def aside(call: Callable[[], Any], seconds: float) -> Any:
  """Returns the result of a call in a daemon thread, or `Late`.

  Raises:
    BaseException: what the call raised.
  """
  clock, done, results = calls.Clock(seconds), threading.Event(), []

  def run():
    try:
      with TimedBy(clock):
        results.append((call(), None))
    except BaseException as error:  # raised below
      results.append((None, error))
    done.set()

  thread = threading.Thread(target=run, name='environment', daemon=True)
  thread.start()
  if not clock.wait(done):
    abandoned.add(thread)
    return Late(seconds)
  ((result, error),) = results
  if error is not None:
    raise error
  return result


class TimedBy:
  """Sets the clock of the calls of this thread."""

  def __init__(self, clock: calls.Clock):
    """Takes the clock of one call."""
    self._clock = clock

  def __enter__(self) -> None:
    _local.clock = self._clock

  def __exit__(self, *error) -> None:
    _local.clock = None


def untimed(judge: Callable) -> Callable:
  """Returns an environment's judge, whose calls stop the caller's clock."""

  def call_judge(*args, **kwargs):
    clock = getattr(_local, 'clock', None)
    timed = judge if clock is None else clock.untimed(judge)
    return timed(*args, **kwargs)

  return call_judge
