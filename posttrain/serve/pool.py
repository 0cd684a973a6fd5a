"""Threads for the slow parts of requests: reading a body, writing a response.

1. A few threads share one queue, so that no number of requests takes more of
   the process than they do. A thread ends when the queue is empty.
2. Small tasks go first: a task's place is its arrival plus its size at `RATE`,
   so that large ones fall behind small ones, and still have their turn.
3. Large tasks never run in all threads at once: however many wait, a small one
   waits for small ones only.
4. A task whose caller was cancelled is dropped; one that runs is left to end
   by what its caller told it, and its result is ignored.
"""

import asyncio
import contextlib
import dataclasses
import heapq
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar('T')

RATE = 2**19  # bytes per second of a task's place in the queue
LARGE = 2**16  # bytes from which a task is large


class Full(Exception):
  """Too many tasks wait."""


@dataclasses.dataclass(order=True)
class _Task:
  place: float
  number: int
  large: bool = dataclasses.field(compare=False)
  run: Callable[[], Any] | None = dataclasses.field(compare=False)
  loop: asyncio.AbstractEventLoop = dataclasses.field(compare=False)
  future: asyncio.Future[Any] = dataclasses.field(compare=False)


class Pool:
  """A few threads with one queue."""

  def __init__(self, threads: int, max_waiting: int):
    """Starts no thread.

    Args:
      threads: the most threads.
      max_waiting: the most tasks that wait for one.
    """
    self._threads, self._max_waiting = threads, max_waiting
    self._lock = threading.Lock()
    self._queues: dict[bool, list[_Task]] = {False: [], True: []}  # by large
    self._large = 0  # large tasks that run
    self._numbers = itertools.count()
    self._running = 0  # threads

  async def run(self, size: int, function: Callable[[], T]) -> T:
    """Returns the function's result, from a thread.

    Args:
      size: bytes that it reads or writes, or work that takes as long as
        reading so many; smaller tasks go first.
      function: is not called if the caller is cancelled before its turn.

    Raises:
      Full: `max_waiting` tasks wait.
      Exception: the function's.
    """
    loop = asyncio.get_running_loop()
    task = _Task(
      time.monotonic() + size / RATE,
      next(self._numbers),
      size >= LARGE,
      function,
      loop,
      loop.create_future(),
    )
    with self._lock:
      waiting = sum(map(len, self._queues.values()))
      if waiting >= self._max_waiting:
        raise Full(f'{waiting} requests of {self._max_waiting}')
      heapq.heappush(self._queues[task.large], task)
      starts = self._running < self._threads
      self._running += starts
    if starts:
      threading.Thread(
        target=self._work, name='posttrain-request', daemon=True
      ).start()
    try:
      return await task.future
    except asyncio.CancelledError:
      self._drop(task)
      raise
    finally:
      del task  # an error in its future holds this frame: a cycle

  def _drop(self, task: _Task) -> None:
    with self._lock:
      task.run = None
      queue = self._queues[task.large]
      if task in queue:
        queue.remove(task)
        heapq.heapify(queue)

  def _next(self) -> _Task | None:
    """Removes the task that is next; None if none may run now."""
    queues = [self._queues[False]]
    if self._large < max(self._threads - 1, 1):
      queues.append(self._queues[True])
    queue = min(filter(None, queues), key=lambda queue: queue[0], default=None)
    return None if queue is None else heapq.heappop(queue)

  def _work(self) -> None:
    while True:
      with self._lock:
        task = self._next()
        if task is None:
          self._running -= 1
          return
        self._large += task.large
        function = task.run
      assert function is not None  # else it is no longer in a queue
      try:
        result, error = function(), None
      except BaseException as raised:  # any: the caller gets it
        result, error = None, raised
      with self._lock:
        self._large -= task.large
      with contextlib.suppress(RuntimeError):  # the event loop is closed
        task.loop.call_soon_threadsafe(_resolve, task.future, result, error)
      del task, function, result, error  # a waiting thread holds no request


def _resolve(future: asyncio.Future, result: Any, error: Any) -> None:
  if future.done():  # cancelled
    return
  if error is None:
    future.set_result(result)
  else:
    future.set_exception(error)
