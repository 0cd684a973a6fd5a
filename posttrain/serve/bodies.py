"""Bodies of requests: bounded one by one, and all together.

All bodies may be received at a time, up to `HELD` bytes of them; from then on
the oldest one that has not arrived is refused, so that slow clients keep none
out. A large body takes many times its size once it is parsed: one is parsed at
a time, and its memory is returned to the kernel.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette import requests

from posttrain.serve import fields, release

SMALL = 2**16  # bytes; smaller bodies do not wait for each other
HELD = 2**26  # bytes; at least the size of two bodies


class Bodies:
  """Reads bodies, and bounds the memory of all of them."""

  def __init__(self, max_bytes: int):
    """Args: max_bytes: the most bytes of a body."""
    self._max_bytes = max_bytes
    self._max_held = max(HELD, 2 * max_bytes)
    self._held = 0  # bytes of all bodies
    # Bytes of those that have not arrived, the oldest first; a timeout ends
    # its receiver.
    self._arriving: dict[asyncio.Timeout, int] = {}
    self._turn = asyncio.Lock()  # of the large body that is parsed

  @contextlib.asynccontextmanager
  async def read(self, request: requests.Request) -> AsyncIterator[bytes]:
    """Yields the body, whose bytes count as held until the context ends.

    Raises:
      Refused: with 413, it is too large; with 503, too many bytes are held.
      ClientDisconnect: the client has disconnected.
    """
    length = request.headers.get('content-length', '')
    if length.isdecimal() and int(length[:20]) > self._max_bytes:
      raise self._too_large()
    content = await self._receive(request)
    async with contextlib.AsyncExitStack() as stack:
      stack.callback(self._give_back, len(content))
      if len(content) > SMALL:
        stack.callback(release.soon)
        await stack.enter_async_context(self._turn)
      yield content

  async def _receive(self, request: requests.Request) -> bytes:
    """Returns the body; its bytes are held."""
    parts, size, receiver = [], 0, asyncio.timeout(None)
    try:
      async with receiver:
        self._arriving[receiver] = 0
        async for part in request.stream():
          size += len(part)
          if size > self._max_bytes:
            raise self._too_large()
          parts.append(part)
          self._hold(receiver, len(part))
    except TimeoutError:
      raise fields.Refused(
        503,
        f'the server must hold at most {self._max_held} bytes of bodies: got '
        'more, and this one has been arriving for longest; try again later',
      ) from None
    except BaseException:  # the client has left, for example
      self._give_back(self._arriving.pop(receiver, 0))
      raise
    self._held += size - self._arriving.pop(receiver, 0)
    return b''.join(parts)

  def _hold(self, receiver: asyncio.Timeout, size: int) -> None:
    """Counts new bytes; ends the oldest receivers if there are too many."""
    if receiver not in self._arriving:  # it ends
      return
    self._arriving[receiver] += size
    self._held += size
    while self._held > self._max_held and self._arriving:
      oldest = next(iter(self._arriving))
      self._give_back(self._arriving.pop(oldest))
      oldest.reschedule(0)

  def _give_back(self, size: int) -> None:
    self._held -= size

  def _too_large(self) -> fields.Refused:
    return fields.Refused(
      413,
      f'the body must be of at most {self._max_bytes} bytes: got more',
      code='request_too_large',
    )
