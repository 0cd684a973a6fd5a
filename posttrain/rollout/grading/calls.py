"""Calls of reward functions, each in a daemon thread with a time limit.

1. `call` runs a function, or the coroutine that it returns, and waits for it.
   Coroutines share one event loop, because objects that a module keeps between
   calls (a semaphore, an HTTP client) belong to a loop. If a call blocks that
   loop, the next call waits a second and gets a new loop, and the module loses
   those objects.
2. A call over its timeout is abandoned: a coroutine is cancelled, a thread runs
   on, and its result is ignored. It does not delay the exit of the process.
3. The clock stops while the call waits for a judge, since judges have timeouts
   of their own; an abandoned call can no longer use its judge.

Signals do not work in these threads (`signal.alarm` raises), and a call that
never releases the interpreter lock, such as a regex that backtracks, cannot be
abandoned. Threads and tasks that a function starts itself are not managed.
"""

import asyncio
import collections
import concurrent.futures
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from posttrain.rollout import abandoned
from posttrain.rollout.endpoint import client
from posttrain.rollout.grading import values

Fault = values.Fault

WORKERS = 32  # the most threads of `asyncio.to_thread` per call
LOOP_TIMEOUT = 1.0  # seconds for a loop to respond after an abandoned call
POLL = 0.02, 60.0  # seconds between checks of the clock: least, most
RAISED = client.EndpointError  # raised, not a fault


class Clock:
  """The seconds of a call: `wall`, and `own`, which excludes its judge."""

  def __init__(self, timeout: float):
    """Starts the clock; `timeout`: the most own seconds."""
    self.timeout = timeout
    self.restart()
    self._lock, self._over = threading.Lock(), False
    # Judge calls now, the start of the first, seconds of those before.
    self._judging, self._since, self._judged = 0, 0.0, 0.0

  def restart(self) -> None:
    """Starts the clock again, before the call has begun."""
    self._start = time.monotonic()

  @property
  def wall(self) -> float:
    """Seconds since the start."""
    return time.monotonic() - self._start

  @property
  def own(self) -> float:
    """Seconds since the start without those of judge calls."""
    now = time.monotonic()
    judged = self._judged + (now - self._since if self._judging else 0.0)
    return now - self._start - judged

  def untimed(self, judge: Callable) -> Callable:
    """Returns the judge, wrapped so that its calls stop the clock."""

    def timed_judge(*args, **kwargs):
      self._pause()
      try:
        return judge(*args, **kwargs)
      finally:
        self._resume()

    return timed_judge

  def wait(self, done: threading.Event) -> bool:
    """Waits for `done`; returns False if the timeout comes first."""
    low, high = POLL
    while not done.wait(min(max(self.timeout - self.own, low), high)):
      with self._lock:
        if not self._judging and self.own >= self.timeout:
          self._over = True
          return done.is_set()
    return True

  def stop(self) -> None:
    """Ends the call: its judge raises from now on."""
    with self._lock:
      self._over = True

  def _pause(self) -> None:
    with self._lock:
      if self._over:
        raise RuntimeError('a finished call must not use its judge')
      if not self._judging:
        self._since = time.monotonic()
      self._judging += 1

  def _resume(self) -> None:
    with self._lock:
      self._judging -= 1
      if not self._judging:
        self._judged += time.monotonic() - self._since


def call(
  fn: Callable,
  arguments: Mapping[str, Any],
  clock: Clock,
  convert: Callable[[Any], Any] | None = None,
) -> Any:
  """Returns the result of a function, or of its coroutine.

  Args:
    fn: the function; it runs outside of any event loop, also in a notebook.
    arguments: by name.
    clock: a new clock for this call.
    convert: applied to the result within the time limit, since the result may
      be an object of the user; None = the result as it is.

  Raises:
    Fault: the function raised, which is the fault's cause, or exceeded its
      timeout.
    EndpointError: a judge's server is away; the first one of a group.
  """
  running = _Call(fn, arguments, convert or (lambda result: result))
  try:
    if not clock.wait(running.done):
      raise Fault(late(clock))
  finally:
    clock.stop()
    running.abandon()
  if running.error is not None:
    raise running.error
  return running.result


def late(clock: Clock) -> str:
  """Returns the error of a call that exceeded its timeout."""
  return (
    f'must return within its timeout of {clock.timeout:.4g} s: it did not, and '
    'was abandoned'
  )


def _error(raised: BaseException) -> BaseException:
  """Returns the exception that `call` raises for that of a function.

  It is made where the function runs, within the time limit: a message that it
  quotes is a user's code as well.
  """
  error = _leaf(raised)
  if _is(error, Fault, RAISED):
    return error
  fault = values.raised(error)
  fault.__cause__ = error
  return fault


def _leaf(error: BaseException) -> BaseException:
  """Returns the first exception of a group that is no fault, or the error."""
  leaves = [error]
  while leaves:
    leaf = leaves.pop(0)
    if _is(leaf, RAISED):
      return leaf
    if _is(leaf, BaseExceptionGroup):
      # A class may define other `exceptions`.
      leaves = [*BaseExceptionGroup.exceptions.__get__(leaf), *leaves]
  return error


def _is(error: BaseException | None, *kinds: type[BaseException]) -> bool:
  """Returns `isinstance(error, kinds)`; a class may define `__class__`."""
  return issubclass(type(error), kinds)


class _Call:
  """A running call."""

  def __init__(
    self,
    fn: Callable,
    arguments: Mapping[str, Any],
    convert: Callable[[Any], Any],
  ):
    self._convert = convert
    self.result: Any = None
    self.error: BaseException | None = None
    self.done = threading.Event()
    # If the function returns a coroutine.
    self._loop: _Loop | None = None
    self._future: concurrent.futures.Future | None = None
    self._abandoned = False
    self._thread = threading.Thread(
      target=self._run, args=(fn, arguments), name='reward', daemon=True
    )
    self._thread.start()

  def abandon(self) -> None:
    """Cancels a coroutine, or leaves a thread, that has not finished."""
    self._abandoned = True
    if self.done.is_set():
      return
    if self._future is not None:
      self._cancel()
    else:
      abandoned.add(self._thread)

  def _run(self, fn, arguments) -> None:
    try:
      result = fn(**arguments)
      if inspect.iscoroutine(result):
        self._submit(result)
        return
      self.result = self._convert(result)
    except BaseException as error:  # `call` raises it
      self.error = _error(error)
    self.done.set()

  def _submit(self, coroutine) -> None:
    self._loop = _Loop.get()
    self._future = self._loop.submit(self._finish(coroutine))
    if self._abandoned:  # before the coroutine was submitted
      self._cancel()

  def _cancel(self) -> None:
    self._future.cancel()
    self._loop.probe()

  async def _finish(self, coroutine) -> None:
    try:
      self.result = self._convert(await coroutine)
    except BaseException as error:  # `call` raises it, not the loop
      self.error = _error(error)
    self.done.set()


class _Loop:
  """An event loop in its own daemon thread."""

  _lock, _latest = threading.Lock(), None

  def __init__(self):
    self._responsive = threading.Event()
    self._responsive.set()
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
      target=self._run, name='reward loop', daemon=True
    )
    self._thread.start()

  @classmethod
  def get(cls) -> '_Loop':
    """Returns the shared loop, or a new one if that is blocked."""
    with cls._lock:
      latest = cls._latest
      if latest is not None and not latest._responsive.wait(LOOP_TIMEOUT):
        abandoned.add(latest._thread)
        latest = None
      cls._latest = latest or cls()
      return cls._latest

  def submit(self, coroutine) -> concurrent.futures.Future:
    """Runs a coroutine, with threads that hanging calls do not use up."""
    self._loop.call_soon_threadsafe(
      lambda: self._loop.set_default_executor(_Threads())
    )
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

  def probe(self) -> None:
    """Checks that the loop is not blocked; `get` waits for the result."""
    self._responsive = responsive = threading.Event()
    self._loop.call_soon_threadsafe(responsive.set)

  def _run(self) -> None:
    while True:  # a function may stop the loop
      # Raised by a function's own task; its awaiter gets the exception too.
      with contextlib.suppress(KeyboardInterrupt, SystemExit):
        self._loop.run_forever()


class _Threads(concurrent.futures.ThreadPoolExecutor):
  """Daemon threads: the exit waits for threads of other executors."""

  def __init__(self):
    super().__init__()
    self._queue = collections.deque()  # (future, fn, args, kwargs)
    self._lock, self._alive = threading.Lock(), 0

  def submit(
    self, fn: Callable, /, *args: Any, **kwargs: Any
  ) -> concurrent.futures.Future:
    """Queues a call; starts a thread for it if there are few."""
    future = concurrent.futures.Future()
    with self._lock:
      self._queue.append((future, fn, args, kwargs))
      if self._alive < WORKERS:
        threading.Thread(target=self._work, daemon=True).start()
        self._alive += 1
    return future

  def _work(self) -> None:
    while True:
      with self._lock:
        if not self._queue:
          self._alive -= 1
          return
        future, fn, args, kwargs = self._queue.popleft()
      if not future.set_running_or_notify_cancel():
        continue
      try:
        future.set_result(fn(*args, **kwargs))
      except BaseException as error:
        future.set_exception(error)
