"""Calls that may hang: each in a daemon thread, with a limit to its time.

1. `call` runs a function, or the coroutine that it makes, and waits for it.
2. What is not back in time is abandoned: a coroutine is cancelled, a thread is
   left to itself, and nobody reads what it says later. An exit does not wait
   for it.
3. While it asks a judge its time stands still, for judges have limits of their
   own; one that was abandoned may ask no more.

A thread cannot have signals (`signal.alarm` raises in it), and nothing can
leave one that never lets go of the interpreter, such as a regex that
backtracks. Threads that a function makes by itself are its own affair.
"""

import asyncio
import concurrent.futures
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.rollout import endpoint

WORKERS = 32  # threads that `asyncio.to_thread` has at a time
POLL = 0.02, 60.0  # seconds between two looks at the clock: at least, at most


class Fault(Exception):
  """A call failed: what it must have done, and what it did."""


class Clock:
  """Seconds of a call: `wall`, and `own`, those without its judge."""

  def __init__(self, timeout: float):
    """Starts. Args: timeout: of its own seconds."""
    self.timeout, self._start = timeout, time.monotonic()
    self._lock, self._over = threading.Lock(), False
    # Judges that are asked now, since when; seconds in which there were any.
    self._asking, self._since, self._asked = 0, 0.0, 0.0

  @property
  def wall(self) -> float:
    return time.monotonic() - self._start

  @property
  def own(self) -> float:
    now = time.monotonic()
    asked = self._asked + (now - self._since if self._asking else 0.0)
    return now - self._start - asked

  def without(self, judge: Callable) -> Callable:
    """Returns a judge that stops the clock while it is asked."""

    def ask(*args, **kwargs):
      self._ask()
      try:
        return judge(*args, **kwargs)
      finally:
        self._go_on()

    return ask

  def wait(self, done: threading.Event) -> bool:
    """Returns whether it is done before the time is over."""
    low, high = POLL
    while not done.wait(min(max(self.timeout - self.own, low), high)):
      with self._lock:
        if not self._asking and self.own >= self.timeout:
          self._over = True
          return done.is_set()
    return True

  def stop(self) -> None:
    """Lets nobody ask a judge any more."""
    with self._lock:
      self._over = True

  def _ask(self) -> None:
    with self._lock:
      if self._over:
        raise RuntimeError('a call that is over must not ask its judge')
      if not self._asking:
        self._since = time.monotonic()
      self._asking += 1

  def _go_on(self) -> None:
    with self._lock:
      self._asking -= 1
      if not self._asking:
        self._asked += time.monotonic() - self._since


def call(fn: Callable, given: Mapping[str, Any], clock: Clock) -> Any:
  """Returns what the function returns, or its coroutine.

  Args:
    fn: to call; it sees no event loop, a notebook's neither.
    given: its arguments.
    clock: of this call, made just before.

  Raises:
    Fault: it raised, which is the fault's cause, or did not return in time.
    EndpointError: a server that judges is away.
    KeyboardInterrupt: somebody wants all of this to end.
  """
  made = _Call(fn, given)
  try:
    if not clock.wait(made.done):
      raise Fault(
          f'must return within its timeout of {clock.timeout:.4g} s: it did '
          'not, and is left to itself'
      )
  finally:
    clock.stop()
    made.abandon()
  error = made.error
  if isinstance(error, endpoint.EndpointError | KeyboardInterrupt):
    raise error
  if error is not None:
    raise Fault(
        f'must return rewards: it raised {type(error).__name__}: {error}; None '
        'says that a rollout is not scorable'
    ) from error
  return made.found


class _Call:
  """A call under way."""

  def __init__(self, fn: Callable, given: Mapping[str, Any]):
    self.found: Any = None
    self.error: BaseException | None = None
    self.done = threading.Event()
    self._cancel, self._abandoned = None, False
    threading.Thread(
        target=self._run, args=(fn, given), name=f'reward {fn}', daemon=True
    ).start()

  def abandon(self) -> None:
    """Cancels what can be cancelled; nothing where it is done."""
    self._abandoned = True
    if self._cancel is not None:
      with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
        self._cancel()

  def _run(self, fn, given) -> None:
    try:
      found = fn(**given)
      if inspect.iscoroutine(found):
        found = asyncio.run(self._finish(found))
      self.found = found
    except BaseException as error:  # for `call` to raise
      self.error = error
    self.done.set()

  async def _finish(self, coroutine) -> Any:
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    loop.set_default_executor(_Threads())
    self._cancel = lambda: loop.call_soon_threadsafe(task.cancel)
    if self._abandoned:  # before there was something to cancel
      task.cancel()
    return await coroutine


class _Threads(concurrent.futures.ThreadPoolExecutor):
  """Daemons, for an exit waits for other executors' threads."""

  def __init__(self):
    super().__init__()
    self._free = threading.Semaphore(WORKERS)

  def submit(self, fn, /, *args, **kwargs):
    future = concurrent.futures.Future()

    def run():
      with self._free:
        if not future.set_running_or_notify_cancel():
          return
        try:
          future.set_result(fn(*args, **kwargs))
        except BaseException as error:
          future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future
