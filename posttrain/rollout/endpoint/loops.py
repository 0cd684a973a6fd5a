"""An event loop in a thread, for exchanges that end at a deadline.

The time limits of blocking sockets hold for one read: a server that sends a
byte now and then outlives them. In an event loop one clock covers a whole
exchange (name lookup, connection, TLS, headers, body), and another thread can
end it. All exchanges of the process share one loop; its thread is a daemon.
"""

import asyncio
import concurrent.futures
import functools
import os
import threading
from collections.abc import Coroutine
from typing import Any

_lock = threading.Lock()


class Calls:
  """Coroutines that other threads wait for; `cancel` ends all of them."""

  def __init__(self):
    self._lock, self._cancelled = threading.Lock(), False
    self._running: set[concurrent.futures.Future] = set()

  def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """Runs a coroutine in the loop; returns its result.

    Args:
      coroutine: of any thread; it must not block.
      seconds: the most time.

    Raises:
      TimeoutError: it took longer; it was cancelled.
      concurrent.futures.CancelledError: `cancel` was called.
    """
    with self._lock:
      if self._cancelled:
        coroutine.close()
        raise concurrent.futures.CancelledError
      future = start(_limited(coroutine, seconds))
      self._running.add(future)
    try:
      return future.result()
    finally:
      future.cancel()  # after an interrupt of this thread
      with self._lock:
        self._running.discard(future)

  def cancel(self) -> None:
    """Cancels all coroutines, also later ones."""
    with self._lock:
      self._cancelled = True
      running = tuple(self._running)
    for future in running:
      future.cancel()


def start(coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
  """Starts a coroutine in the loop."""
  with _lock:
    loop = _loop(os.getpid())
  return asyncio.run_coroutine_threadsafe(coroutine, loop)


async def _limited(coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
  async with asyncio.timeout(seconds):
    return await coroutine


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
  """Returns the loop of a process; a forked process has no thread of it."""
  del pid
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, name='network', daemon=True).start()
  return loop
