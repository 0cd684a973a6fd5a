"""Environment calls in threads, whose results arrive at logical times.

    calls.add(uid, call)         # runs in a thread
    calls.tick()                 # the engine has decoded another chunk
    calls.due(idle=False)        # [(uid, result)] of the calls that are due

A call is due a fixed number of chunks after it was added, in the order in
which calls were added, whatever its duration: a due call that has not returned
is waited for. So the order of results never depends on the clock.

A call has a time limit, from its start in a thread. One that exceeds it is left
behind: its result is `limits.Late`, and another thread takes the place of its
own (`abandoned`).
"""

import collections
import concurrent.futures
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from posttrain.envs import base
from posttrain.rollout import abandoned, limits
from posttrain.rollout.grading import calls as timed_calls

EXIT_SECONDS = 5.0  # the longest wait for all running calls after an exception


class Episode(Protocol):
  """What the pool needs of the episode that a call is made for."""

  def leave_behind(self) -> None:
    """Leaves the episode to its call, which has not returned."""

  def close_after_call(self) -> None:
    """Closes the episode, in the call's thread, once the call has returned."""


class Pool:
  """A context with daemon threads, which start with the first calls."""

  def __init__(self, threads: int, chunks: int, timeout: float):
    """Creates a pool without calls.

    Args:
      threads: the number of threads, at most, without abandoned ones.
      chunks: the number of chunks after which a call is due.
      timeout: the time limit of a call, in seconds.
    """
    self._threads, self._chunks, self._timeout = threads, chunks, timeout
    self._now, self._workers = 0, 0
    self._lock = threading.Lock()
    # Calls that have not begun, and (chunk at which it is due, uid, call) of
    # those whose results were not returned yet; both oldest first.
    self._queue: collections.deque[_Call] = collections.deque()
    self._calls: collections.deque[tuple[int, int, _Call]] = collections.deque()

  def __enter__(self) -> 'Pool':
    return self

  def __exit__(self, *error) -> None:
    """Drops calls that have not begun, and waits a while for the others."""
    with self._lock:
      self._queue.clear()
    end = time.monotonic() + EXIT_SECONDS
    for _, _, call in self._calls:
      call.cancel()
    for _, _, call in self._calls:
      if not call.done.wait(max(end - time.monotonic(), 0)):
        self._abandon(call)

  def __len__(self) -> int:
    """Returns the number of calls whose results were not returned yet."""
    return len(self._calls)

  def add(
    self, uid: int, fn: Callable[[], Any], episode: Episode | None = None
  ) -> None:
    """Runs a call as soon as a thread is free.

    Args:
      uid: names the result.
      fn: the call.
      episode: the episode that it calls, whose methods are called if the call
        is left behind; None = a call of no episode.
    """
    call = _Call(fn, self._timeout, episode)
    self._calls.append((self._now + self._chunks, uid, call))
    with self._lock:
      self._queue.append(call)
      self._start_worker()

  def tick(self) -> None:
    """Counts a decoded chunk."""
    self._now += 1

  def due(self, idle: bool) -> list[tuple[int, Any]]:
    """Returns (uid, result) of each due call; raises the call's exception.

    Args:
      idle: nothing decodes, so that the oldest call is due now.
    """
    if idle and self._calls:
      self._now = max(self._now, self._calls[0][0])
    results = []
    while self._calls and self._calls[0][0] <= self._now:
      _, uid, call = self._calls[0]
      # Calls begin in their order, and the older ones have returned or were
      # left behind: this one has a thread.
      result = self._wait(call)
      self._calls.popleft()
      results.append((uid, result))
    return results

  def _wait(self, call: '_Call') -> Any:
    call.begun.wait()
    if not call.clock.wait(call.done) and self._abandon(call):
      return limits.Late(self._timeout)
    return call.future.result()

  def _start_worker(self) -> None:
    """Starts a thread if calls wait and there are few; under the lock."""
    if self._queue and self._workers < self._threads:
      self._workers += 1
      threading.Thread(
        target=self._work, name='environment', daemon=True
      ).start()

  def _abandon(self, call: '_Call') -> bool:
    """Leaves a call behind, with its thread; False if it has just returned."""
    with self._lock:
      if call.done.is_set():
        return False
      call.is_left_behind = True
      self._workers -= 1
      abandoned.add(call.thread)
      self._start_worker()
    if call.episode is not None:
      call.episode.leave_behind()
    return True

  def _work(self) -> None:
    while True:
      with self._lock:
        if not self._queue:
          self._workers -= 1
          return
        call = self._queue.popleft()
      call.run()
      with self._lock:
        call.done.set()
        is_left_behind = call.is_left_behind
      if is_left_behind:
        if call.episode is not None:
          call.episode.close_after_call()
        return


class _Call:
  """One call: queued, running, returned or left behind."""

  def __init__(
    self, fn: Callable[[], Any], timeout: float, episode: Episode | None
  ):
    self._fn, self._timeout, self.episode = fn, timeout, episode
    self.future = concurrent.futures.Future()
    self.begun, self.done = threading.Event(), threading.Event()
    self.is_left_behind = False
    # Both set before `begun`.
    self.clock: timed_calls.Clock
    self.thread: threading.Thread

  def run(self) -> None:
    """Runs the call in this thread."""
    self.thread = threading.current_thread()
    self.clock = timed_calls.Clock(self._timeout)
    if not self.future.set_running_or_notify_cancel():
      self.begun.set()
      return
    self.begun.set()
    try:
      with limits.TimedBy(self.clock):
        self.future.set_result(self._fn())
    except base.TimeLimit:  # of a worker process, which has been given up
      self.future.set_result(limits.Late(self._timeout))
    except BaseException as error:  # `due` raises it
      self.future.set_exception(error)

  def cancel(self) -> None:
    """Drops the call if it has not begun."""
    if self.future.cancel():
      self.begun.set()
      self.done.set()
