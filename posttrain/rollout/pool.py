"""Calls that may wait, in threads, taken up at logical times.

    calls.add(uid, call)         # runs in a thread
    calls.tick()                 # the engine has decoded another chunk
    calls.due(idle=False)        # [(uid, result)] of those whose time has come

A call is due a fixed number of chunks after it was added, in the order in
which calls were added, however long it took: where one has not returned by
then, it is waited for. So what follows from it never depends on the clock.
"""

import collections
import concurrent.futures
from collections.abc import Callable
from typing import Any


class Pool:
  """A context: threads that are started when there is a call, and ended."""

  def __init__(self, threads: int, chunks: int):
    """Args: threads: at most; chunks: after which a call is due."""
    self._threads, self._chunks, self._now = threads, chunks, 0
    self._executor: concurrent.futures.Executor | None = None
    # (when it is due, uid, call), oldest first.
    self._calls: collections.deque[
      tuple[int, int, concurrent.futures.Future]
    ] = collections.deque()

  def __enter__(self) -> 'Pool':
    return self

  def __exit__(self, *error) -> None:
    """Forgets calls that have not begun, and waits for those that have."""
    if self._executor is not None:
      self._executor.shutdown(cancel_futures=True)

  def __len__(self) -> int:
    """Returns the number of calls that have not been taken up."""
    return len(self._calls)

  def add(self, uid: int, call: Callable[[], Any]) -> None:
    """Runs a call as soon as a thread is free."""
    if self._executor is None:
      self._executor = concurrent.futures.ThreadPoolExecutor(self._threads)
    due = self._now + self._chunks
    self._calls.append((due, uid, self._executor.submit(call)))

  def tick(self) -> None:
    """Counts a chunk."""
    self._now += 1

  def due(self, idle: bool) -> list[tuple[int, Any]]:
    """Returns what is due, with what it returned; raises what it raised.

    Args:
      idle: nothing decodes: the time of the next is now.
    """
    if idle and self._calls:
      self._now = max(self._now, self._calls[0][0])
    found = []
    while self._calls and self._calls[0][0] <= self._now:
      _, uid, call = self._calls.popleft()
      found.append((uid, call.result()))
    return found
