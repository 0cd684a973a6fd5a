"""Environment calls in threads, whose results arrive at logical times.

    calls.add(uid, call)         # runs in a thread
    calls.tick()                 # the engine has decoded another chunk
    calls.due(idle=False)        # [(uid, result)] of the calls that are due

A call is due a fixed number of chunks after it was added, in the order in
which calls were added, whatever its duration: a due call that has not returned
is waited for. So the order of results never depends on the clock.
"""

import collections
import concurrent.futures
from collections.abc import Callable
from typing import Any


class Pool:
  """A context with threads, which start with the first call."""

  def __init__(self, threads: int, chunks: int):
    """Creates a pool without calls.

    Args:
      threads: the number of threads, at most.
      chunks: the number of chunks after which a call is due.
    """
    self._threads, self._chunks, self._now = threads, chunks, 0
    self._executor: concurrent.futures.Executor | None = None
    # (chunk at which it is due, uid, call), oldest first.
    self._calls: collections.deque[
      tuple[int, int, concurrent.futures.Future]
    ] = collections.deque()

  def __enter__(self) -> 'Pool':
    return self

  def __exit__(self, *error) -> None:
    """Drops calls that have not begun, and waits for the others."""
    if self._executor is not None:
      self._executor.shutdown(cancel_futures=True)

  def __len__(self) -> int:
    """Returns the number of calls whose results were not returned yet."""
    return len(self._calls)

  def add(self, uid: int, call: Callable[[], Any]) -> None:
    """Runs a call as soon as a thread is free."""
    if self._executor is None:
      self._executor = concurrent.futures.ThreadPoolExecutor(self._threads)
    due = self._now + self._chunks
    self._calls.append((due, uid, self._executor.submit(call)))

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
      _, uid, call = self._calls.popleft()
      results.append((uid, call.result()))
    return results
