"""Calls that may hang: each in a daemon thread, with a limit to its time.

1. `call` runs a function, or the coroutine that it makes, and waits for it.
   Coroutines share one event loop, for what a module keeps from call to call
   (a semaphore, an HTTP client) belongs to a loop. Whoever blocks that loop
   costs the next call a second, and the module what it kept.
2. What is not back in time is abandoned: a coroutine is cancelled, a thread is
   left to itself, and nobody reads what it says later. An exit does not wait
   for it.
3. While it asks a judge its time stands still, for judges have limits of their
   own; one that was abandoned may ask no more.

A thread cannot have signals (`signal.alarm` raises in it), and nothing can
leave one that never lets go of the interpreter, such as a regex that
backtracks. Threads and tasks that a function makes by itself are its own
affair.
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

from posttrain.rollout.endpoint import client

WORKERS = 32  # threads that `asyncio.to_thread` has at a time, in a call
PATIENCE = 1.0  # seconds that a loop has to answer behind an abandoned call
POLL = 0.02, 60.0  # seconds between two looks at the clock: at least, at most
RAISED = client.EndpointError, KeyboardInterrupt  # which are no faults


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
        raise RuntimeError('a finished call must not use its judge')
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
    EndpointError: a server that judges is away; the first of a group.
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
  error = _leaf(made.error)
  if isinstance(error, RAISED):
    raise error
  if error is not None:
    raise Fault(
      f'must return rewards: it raised {type(error).__name__}: {error}; None '
      'says that a rollout is not scorable'
    ) from error
  return made.found


def _leaf(error: BaseException | None) -> BaseException | None:
  """Of a group, the first that is no fault, if it has one; else itself."""
  if not isinstance(error, BaseExceptionGroup):
    return error
  found = error.subgroup(RAISED)
  while isinstance(found, BaseExceptionGroup):
    found = found.exceptions[0]
  return found or error


class _Call:
  """A call under way."""

  def __init__(self, fn: Callable, given: Mapping[str, Any]):
    self.found: Any = None
    self.error: BaseException | None = None
    self.done = threading.Event()
    # Of a coroutine.
    self._loop: _Loop | None = None
    self._future: concurrent.futures.Future | None = None
    self._abandoned = False
    threading.Thread(
      target=self._run, args=(fn, given), name=f'reward {fn}', daemon=True
    ).start()

  def abandon(self) -> None:
    """Cancels what can be cancelled; nothing where it is done."""
    self._abandoned = True
    if self._future is not None and not self.done.is_set():
      self._cancel()

  def _run(self, fn, given) -> None:
    try:
      found = fn(**given)
      if inspect.iscoroutine(found):
        self._submit(found)
        return
      self.found = found
    except BaseException as error:  # for `call` to raise
      self.error = error
    self.done.set()

  def _submit(self, coroutine) -> None:
    self._loop = _Loop.get()
    self._future = self._loop.submit(self._finish(coroutine))
    if self._abandoned:  # before there was something to cancel
      self._cancel()

  def _cancel(self) -> None:
    self._future.cancel()
    self._loop.doubt()

  async def _finish(self, coroutine) -> None:
    try:
      self.found = await coroutine
    except BaseException as error:  # for `call` to raise, and not for the loop
      self.error = error
    self.done.set()


class _Loop:
  """An event loop, in a daemon thread of its own."""

  _lock, _latest = threading.Lock(), None

  def __init__(self):
    self._answered = threading.Event()
    self._answered.set()
    self._loop = asyncio.new_event_loop()
    threading.Thread(target=self._run, name='reward loop', daemon=True).start()

  @classmethod
  def get(cls) -> '_Loop':
    """Returns that of all calls, or a new one if somebody blocks it."""
    with cls._lock:
      if cls._latest is None or not cls._latest._answered.wait(PATIENCE):
        cls._latest = cls()
      return cls._latest

  def submit(self, coroutine) -> concurrent.futures.Future:
    """Runs a coroutine; what hangs in other calls' threads takes it no room."""
    self._loop.call_soon_threadsafe(
      lambda: self._loop.set_default_executor(_Threads())
    )
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

  def doubt(self) -> None:
    """Asks for a sign of life, which `get` waits for."""
    self._answered = answered = threading.Event()
    self._loop.call_soon_threadsafe(answered.set)

  def _run(self) -> None:
    while True:  # whoever stops it
      # Of a task that a function made: whoever awaits it hears of it as well.
      with contextlib.suppress(KeyboardInterrupt, SystemExit):
        self._loop.run_forever()


class _Threads(concurrent.futures.ThreadPoolExecutor):
  """Daemons, for an exit waits for other executors' threads."""

  def __init__(self):
    super().__init__()
    self._asked = collections.deque()  # (future, fn, args, kwargs)
    self._lock, self._alive = threading.Lock(), 0

  def submit(self, fn, /, *args, **kwargs):
    future = concurrent.futures.Future()
    with self._lock:
      self._asked.append((future, fn, args, kwargs))
      if self._alive < WORKERS:
        threading.Thread(target=self._work, daemon=True).start()
        self._alive += 1
    return future

  def _work(self) -> None:
    while True:
      with self._lock:
        if not self._asked:
          self._alive -= 1
          return
        future, fn, args, kwargs = self._asked.popleft()
      if not future.set_running_or_notify_cancel():
        continue
      try:
        future.set_result(fn(*args, **kwargs))
      except BaseException as error:
        future.set_exception(error)
