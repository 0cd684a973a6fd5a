"""Calls of a user's code: in threads with time limits, or worker processes.

    calls.inline(fn, seconds)        # in one lasting thread
    calls.run(fn, Clock(seconds))    # in a thread of its own
    Pool                             # in several threads, at logical times
    process(path, memory)            # a reward function, in a process

1. All threads are daemons. A call that exceeds its limit raises `Late` and is
   given up: its thread cannot be ended, runs on and is counted (`hung`), and
   another one takes its place. More than `MOST_HUNG` of them end the run.
2. The clock of a call stops while it waits for its judge, since judges have
   time limits of their own.
3. A function's process starts with its first call, and is killed with its
   process group when a call exceeds its limit; it starts again with the next
   call. It ends with the run, also if that is killed.
4. What a user's code prints goes to stderr.

In a thread `signal.alarm` raises, and a call that never releases the
interpreter lock cannot be given up.
"""

import collections
import contextlib
import functools
import multiprocessing
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from posttrain.rollout import worker
from posttrain.util import coroutines, errors

T = TypeVar('T')
Thunk = Callable[[], Any]  # a call, without arguments

MOST_HUNG = 64  # threads given up that run on
START_SECONDS = 120.0  # the longest import of a function's module
POLL = 0.02, 60.0  # seconds between looks at the clock: least, most

_lock = threading.Lock()
_hung: list[threading.Thread] = []


class Late(Exception):
  """A call exceeded its time limit; `seconds`: the limit."""

  def __init__(self, seconds: float):
    super().__init__(f'the call exceeded its limit of {seconds:g} s')
    self.seconds = seconds


class TooManyThreads(RuntimeError):
  """More calls that were given up run on than a process can carry."""


class EndpointError(RuntimeError):
  """A server that does not answer, refuses, or gives an invalid answer.

  `status` is the HTTP status of an answer; None = no answer.
  """

  def __init__(self, message: str, status: int | None = None):
    super().__init__(message)
    self.status = status


def hung() -> int:
  """Returns the number of threads that were given up and still run."""
  with _lock:
    _hung[:] = [thread for thread in _hung if thread.is_alive()]
    return len(_hung)


class Clock:
  """The seconds of a call: `wall`, and `own`, which excludes its judge."""

  def __init__(self, timeout: float):
    """Starts the clock; `timeout`: the most own seconds."""
    self.timeout, self._lock, self._over = timeout, threading.Lock(), False
    # Judge calls now, the start of the first, seconds of those before.
    self._judging, self._since, self._judged = 0, 0.0, 0.0
    self.restart()

  def restart(self) -> None:
    """Starts the clock again, before the call has begun."""
    self._start = time.monotonic()

  @property
  def wall(self) -> float:
    """Seconds since the start."""
    return time.monotonic() - self._start

  @property
  def own(self) -> float:
    """Returns the seconds since the start, calls of a judge not counted."""
    now = time.monotonic()
    judged = self._judged + (now - self._since if self._judging else 0.0)
    return now - self._start - judged

  @contextlib.contextmanager
  def stopped(self) -> Iterator[None]:
    """Stops the clock while the block, or a decorated judge, runs."""
    with self._lock:
      if self._over:
        raise RuntimeError('a finished call must not use its judge')
      if not self._judging:
        self._since = time.monotonic()
      self._judging += 1
    try:
      yield
    finally:
      with self._lock:
        self._judging -= 1
        if not self._judging:
          self._judged += time.monotonic() - self._since

  def wait(self, done: threading.Event) -> bool:
    """Waits for `done`; returns False if the timeout comes first."""
    low, high = POLL
    while not done.wait(min(max(self.timeout - self.own, low), high)):
      with self._lock:
        if not self._judging and self.own >= self.timeout:
          self._over = True
          return done.is_set()
    return True


def untimed(judge: Callable[..., T]) -> Callable[..., T]:
  """Returns a judge whose calls stop the clock of the thread's call."""

  def call_judge(*args, **kwargs):
    call = getattr(coroutines.local, 'call', None)
    with contextlib.nullcontext() if call is None else call.clock.stopped():
      return judge(*args, **kwargs)

  return call_judge


class _Output:
  """Stdout; for threads that make calls of a user's code, stderr."""

  def __init__(self, stdout: Any):
    self._stdout = stdout

  def __getattr__(self, name: str) -> Any:
    calls = hasattr(coroutines.local, 'call')
    return getattr(sys.stderr if calls else self._stdout, name)


class Call:
  """One call: queued, running, returned or given up."""

  def __init__(self, fn: Thunk, clock: Clock, after: Thunk | None = None):
    """Queues a call.

    Args:
      fn: the call.
      clock: restarted when the call begins.
      after: called in the call's thread if it returns after it was given up.
    """
    self._fn, self.clock, self._after = fn, clock, after
    self.started, self.done = threading.Event(), threading.Event()
    self.is_given_up = False
    # Cancels the coroutine that the call waits for.
    self.cancel: Thunk = lambda: None
    self._thread: threading.Thread | None = None
    self._value, self._error = None, None

  def run(self) -> None:
    """Runs the call in this thread."""
    coroutines.local.call, self._thread = self, threading.current_thread()
    if not isinstance(sys.stdout, _Output):
      output: Any = _Output(sys.stdout)
      sys.stdout = output
    self.clock.restart()
    self.started.set()
    try:
      self._value = self._fn()
    except BaseException as error:  # `result` raises it
      self._error = error
    with _lock:
      self.done.set()
    if self.is_given_up and self._after is not None:
      self._after()

  def result(self) -> Any:
    """Waits for the result; raises what the call raised.

    Raises:
      Late: it exceeded its limit.
      TooManyThreads: so did too many before, which run on.
    """
    try:
      self.started.wait()
      in_time = self.clock.wait(self.done)
    except BaseException:  # Ctrl-C
      self.give_up()
      raise
    if not in_time and self.give_up():
      if (count := hung()) > MOST_HUNG:
        raise TooManyThreads(
          'calls of environments and reward functions must return: got '
          f'{count} that were given up and still run, expected at most '
          f'{MOST_HUNG}; fix what hangs'
        )
      raise Late(self.clock.timeout)
    if self._error is not None:
      raise self._error
    return self._value

  def give_up(self) -> bool:
    """Leaves the call to its thread; False if it has just returned."""
    with _lock:
      if self.done.is_set():
        return False
      self.is_given_up = True
      if self._thread is not None:
        _hung.append(self._thread)
    self.cancel()
    return True


class Pool:
  """Daemon threads that make calls in the order in which they are added.

      calls.add(uid, call)         # runs in a thread
      calls.tick()                 # the engine has decoded another chunk
      calls.due(idle=False)        # [(uid, result)] of the calls that are due

  A call is due a fixed number of chunks after it was added, in the order in
  which calls were added, whatever its duration: a due call that has not
  returned is waited for. So the order of results never depends on the clock.
  """

  def __init__(self, threads: int, chunks: int = 0, timeout: float = 0.0):
    """Creates a pool without calls; threads start with the first ones.

    Args:
      threads: largest number of threads, calls that were given up not counted.
      chunks: the number of chunks after which a call is due.
      timeout: the time limit of a call that is added, in seconds.
    """
    self._most, self._chunks, self._timeout = threads, chunks, timeout
    self._threads = self._open = self._now = 0
    self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
    self._lock = threading.Lock()
    # (chunk at which it is due, uid, call), oldest first.
    self._calls: collections.deque[tuple[int, int, Call]] = collections.deque()

  def __enter__(self) -> 'Pool':
    return self

  def __exit__(self, *error) -> None:
    """Drops calls that have not begun, and gives the others up."""
    with contextlib.suppress(queue.Empty):
      while True:
        self._queue.get_nowait()
    for _ in range(self._threads):
      self._queue.put(None)
    for _, _, call in self._calls:
      if call.started.is_set():
        call.give_up()

  def __len__(self) -> int:
    """Returns the number of calls whose results were not returned yet."""
    return len(self._calls)

  def submit(
    self, fn: Thunk, seconds: float, after: Thunk | None = None
  ) -> Call:
    """Queues a call with a time limit; see `Call`."""
    call = Call(fn, Clock(seconds), after)
    self._queue.put(call)
    self._count(1, 0)
    return call

  def result(self, call: Call) -> Any:
    """Returns a call's result; as `Call.result`."""
    try:
      return call.result()
    finally:
      if call.is_given_up:
        self._count(-1, -1)

  def add(self, uid: int, fn: Thunk, after: Thunk | None = None) -> None:
    """Runs a call as soon as a thread is free; `uid` names the result."""
    call = self.submit(fn, self._timeout, after)
    self._calls.append((self._now + self._chunks, uid, call))

  def tick(self) -> None:
    """Counts a decoded chunk."""
    self._now += 1

  def due(self, idle: bool) -> list[tuple[int, Any]]:
    """Returns (uid, result) of each due call; of one over its limit, `Late`.

    Raises what a call has raised.

    Args:
      idle: nothing decodes, so that the oldest call is due now.
    """
    if idle and self._calls:
      self._now = max(self._now, self._calls[0][0])
    results = []
    while self._calls and self._calls[0][0] <= self._now:
      _, uid, call = self._calls[0]
      try:
        result = self.result(call)
      except Late as error:
        result = error
      self._calls.popleft()
      results.append((uid, result))
    return results

  def _count(self, calls: int, threads: int) -> None:
    """Changes the numbers; starts a thread if calls would wait for it."""
    with self._lock:
      self._open += calls
      self._threads += threads
      if self._threads < min(self._open, self._most):
        self._threads += 1
        threading.Thread(target=self._work, daemon=True).start()

  def _work(self) -> None:
    while (call := self._queue.get()) is not None:
      call.run()
      if call.is_given_up:
        return
      self._count(-1, 0)


_INLINE = Pool(1)


def inline(
  fn: Callable[[], T], seconds: float, after: Thunk | None = None
) -> T:
  """Returns the result of a call in the thread that all such calls share.

  One at a time: objects that belong to a thread can be kept between calls.
  Arguments and exceptions are those of `Call`.
  """
  return _INLINE.result(_INLINE.submit(fn, seconds, after))


def run(fn: Callable[[], T], clock: Clock) -> T:
  """Returns the result of a call in a thread of its own; as `Call.result`."""
  call = Call(fn, clock)
  threading.Thread(target=call.run, daemon=True).start()
  return call.result()


@functools.cache
def process(path: str, memory: int | None, identity: int = 0) -> 'Process':
  """Returns the process of a function, one for all who call it.

  Args:
    path, memory: see `Process`.
    identity: differs for functions of one path, as after another import.
  """
  del identity
  return Process(path, memory)


class Process:
  """The worker process of a reward function."""

  def __init__(self, path: str, memory: int | None):
    """Starts nothing yet.

    Args:
      path: 'package.module:function'.
      memory: the bytes that the function may allocate after its import; None =
        no limit.
    """
    self._path, self._memory = path, memory
    self.popen: subprocess.Popen | None = None
    self._socket: Any = None
    self._at_exit: Any = None

  def __call__(self, call: worker.Call, clock: Clock) -> worker.Reply:
    """Returns the reply to a call, which may be a fault.

    Raises:
      Late: the function exceeded its time limit.
    """
    if not isinstance(message := pickled(call), bytes):
      return message
    try:
      if self.popen is None or self.popen.poll() is not None:
        self.stop()
        reply = run(self._start, Clock(START_SECONDS))
        if reply.error:
          self.stop()
          return reply
      clock.restart()
      reply = run(lambda: self._exchange(message), clock)
    except (OSError, EOFError) as error:
      if self.popen is None:
        end = f'cannot start: {error}'
        return worker.Reply(error=f'must return rewards: its process {end}')
      try:
        code = self.popen.wait(1.0)
        end = f'ended with exit code {code}'
        if code < 0:
          end = f'was ended by {signal.Signals(-code).name}'
      except subprocess.TimeoutExpired:
        end = 'closed its socket'
      self.stop()
      return worker.Reply(error=f'must return rewards: its process {end}')
    except BaseException:
      self.stop()
      raise
    if reply.is_full:
      self.stop()
    return reply

  def stop(self) -> None:
    """Kills the process and its group."""
    popen, self.popen = self.popen, None
    if popen is not None:
      self._at_exit.detach()
      self._socket.close()
      _kill(popen)

  def _start(self) -> worker.Reply:
    mine, theirs = multiprocessing.Pipe()
    descriptor = theirs.fileno()
    with contextlib.closing(theirs):
      self.popen = subprocess.Popen(
        [
          sys.executable,
          '-P',
          '-c',
          f'from posttrain.rollout import worker; worker.main({descriptor})',
        ],
        stdin=subprocess.PIPE,  # it closes when the run ends
        stdout=2,
        pass_fds=(descriptor,),
        start_new_session=True,
        env={
          **os.environ,
          'PYTHONPATH': os.pathsep.join(map(os.path.abspath, sys.path)),
          'JAX_PLATFORMS': 'cpu',
        },
      )
    self._socket = mine
    self._at_exit = weakref.finalize(self, _kill, self.popen)
    return self._exchange(pickle.dumps((self._path, self._memory)))

  def _exchange(self, message: bytes) -> worker.Reply:
    """Sends a message; returns the reply, or raises at the process's end."""
    popen, socket = self.popen, self._socket
    socket.send_bytes(message)
    # A child of the function may hold the socket open after its end.
    while not socket.poll(0.1):
      if popen.poll() is not None and not socket.poll():
        raise EOFError
    return socket.recv()


def pickled(call: worker.Call) -> bytes | worker.Reply:
  """Returns the message of a call, or the fault that names an argument."""
  try:
    return pickle.dumps(tuple(call))
  except Exception:
    for name, value in call.arguments.items():
      try:
        pickle.dumps(value)
      except Exception as error:
        return worker.Reply(
          error='must get arguments that can be pickled, since it runs in '
          f'another process: got {name}: {errors.describe(error)}'
        )
    raise


def _kill(popen: subprocess.Popen) -> None:
  """Kills the group of a process, and waits for the process."""
  with contextlib.suppress(OSError):
    os.killpg(popen.pid, signal.SIGKILL)
  popen.wait()
  if popen.stdin is not None:
    popen.stdin.close()
