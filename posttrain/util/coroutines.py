"""Coroutines of a user's code, which all run on one event loop.

Objects that a module keeps between calls (a semaphore, an HTTP client) belong
to a loop. It runs in a thread of its own, because the caller's thread may have
a running loop, such as a notebook's. After a coroutine that is given up the
next one gets a new loop.
"""

import asyncio
import contextlib
import functools
import inspect
import threading
from typing import Any

# `call`: the thread's `calls.Call`; None in the thread of the loop.
local = threading.local()


def wait(result: Any) -> Any:
  """Returns a result, or what it yields once it is awaited, if it can be.

  A call in this thread may cancel the coroutine.

  Raises:
    TypeError: it is a generator, whose text would be its address.
  """
  if inspect.isgenerator(result) or inspect.isasyncgen(result):
    raise TypeError('functions must return their results: got a generator')
  if not inspect.isawaitable(result):
    return result

  async def waiting():
    return await result

  future = asyncio.run_coroutine_threadsafe(waiting(), _loop())

  def cancel():
    future.cancel()
    _loop.cache_clear()  # the coroutine may block it

  call = getattr(local, 'call', None)
  if call is not None:
    call.cancel = cancel
    if call.is_given_up:
      cancel()
  return future.result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
  """Returns the event loop of all coroutines, which runs in a thread."""
  loop = asyncio.new_event_loop()

  def work():
    local.call = None
    while True:  # a function may stop it, or its tasks raise these
      with contextlib.suppress(KeyboardInterrupt, SystemExit):
        loop.run_forever()

  threading.Thread(target=work, daemon=True).start()
  return loop
