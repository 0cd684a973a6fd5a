"""Bodies of requests, read up to a size; few large ones at a time.

A large body takes many times its size once it is parsed: two are received at a
time, one is parsed at a time, and its memory is returned to the kernel.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette import requests

from posttrain.serve import fields, release

SMALL = 2**16  # bytes; smaller bodies are held without a permit
_LARGE = 2  # larger bodies that are received at a time


class Bodies:
  """Reads bodies, and bounds the memory of all of them."""

  def __init__(self, max_bytes: int):
    """Args: max_bytes: the most bytes of a body."""
    self._max_bytes = max_bytes
    self._permits = asyncio.Semaphore(_LARGE)
    self._turn = asyncio.Lock()  # of the large body that is parsed

  @contextlib.asynccontextmanager
  async def read(self, request: requests.Request) -> AsyncIterator[bytes]:
    """Yields the body; once it ends, another large one may be read.

    A large body waits for a permit with all but its beginning left in the
    connection.

    Raises:
      Refused: with 413; it is too large.
      ClientDisconnect: the client has disconnected.
    """
    length = request.headers.get('content-length', '')
    if length.isdecimal() and int(length[:20]) > self._max_bytes:
      raise self._too_large()
    async with contextlib.AsyncExitStack() as stack:
      parts, size = [], 0
      async for part in request.stream():
        parts.append(part)
        if size <= SMALL < size + len(part):
          await stack.enter_async_context(self._permits)
        size += len(part)
        if size > self._max_bytes:
          raise self._too_large()
      content = b''.join(parts)
      parts.clear()
      if size > SMALL:
        await stack.enter_async_context(self._turn)
        stack.callback(release.soon)
      yield content

  def _too_large(self) -> fields.Refused:
    return fields.Refused(
      413,
      f'the body must be of at most {self._max_bytes} bytes: got more',
      code='request_too_large',
    )
