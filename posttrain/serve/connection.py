"""Connections with deadlines: uvicorn's, which has one between requests only.

A connection is closed if the head of a request takes longer than `HEAD`
seconds, its body longer than `BODY`, or if its client does not read what is
sent for `READ` seconds. With too many connections, one whose client keeps the
server waiting is closed, so that half-sent requests keep no client out; the
same with more than `MAX_UNSENT` bytes of responses that clients do not read.

Parsing takes bounded time per read: a head has at most `MAX_HEAD` bytes, chunks
at least `MIN_CHUNK` on average, and nothing is parsed of a request that has its
response already: its connection closes.
"""

import asyncio
import collections
import functools
import http
import json
import logging
import re
import resource
import sys
import time
from collections.abc import Iterable
from typing import Any

import h11
from uvicorn.protocols.http import h11_impl

from posttrain.serve import fields, release

HEAD, BODY, READ = 10.0, 60.0, 60.0  # seconds
KEEP_ALIVE = 5  # seconds between two requests; uvicorn's own setting
MAX_HEAD, MAX_LINES = 2**14, 128  # bytes and lines of a head
# Bytes that a chunk must have, on average after the first ones: each takes
# 10 us to parse in the event loop, whatever its size.
MIN_CHUNK, FREE_CHUNKS = 256, 256
_MOST = 1000  # connections
MAX_UNSENT = 2**26  # bytes of responses, over all connections


_BLANK_LINE = re.compile(rb'\n\r?\n')
# uvicorn warns of each request that is not HTTP, or asks for a WebSocket: any
# client could fill the log.
_LOGGER = logging.getLogger('absl.uvicorn')
_LOGGER.setLevel(logging.ERROR)


@functools.cache
def max_connections() -> int:
  """Returns the most open connections: half of the process's descriptors."""
  descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  if descriptors == resource.RLIM_INFINITY:
    return _MOST
  return max(min(_MOST, descriptors // 2), 1)


class _Requests(h11.Connection):
  """The parser of one connection's requests, with bounds of its own."""

  def __init__(self):
    super().__init__(h11.SERVER, MAX_HEAD)
    self._chunks, self._bytes = 0, 0  # of the body
    self.largest = 0  # bytes of an event of the response
    self.ends = False  # with this response, which its request has not awaited

  def next_event(self):
    """Returns the next event, as h11 does.

    Raises:
      RemoteProtocolError: the request is not HTTP, or it exceeds a bound.
    """
    if self.their_state is h11.IDLE:  # h11 bounds incomplete heads only
      head, _ = self.trailing_data
      end = _BLANK_LINE.search(head, 0, MAX_HEAD)
      if end is None and len(head) > MAX_HEAD:
        raise h11.RemoteProtocolError(f'a head of more than {MAX_HEAD} bytes')
      if end is not None and head.count(b'\n', 0, end.start()) > MAX_LINES:
        raise h11.RemoteProtocolError(f'a head of more than {MAX_LINES} lines')
    event = super().next_event()
    if isinstance(event, h11.Request):
      self._chunks, self._bytes = 0, 0
    elif isinstance(event, h11.Data):
      self._chunks += event.chunk_start
      self._bytes += len(event.data)
      if self._chunks > FREE_CHUNKS + self._bytes // MIN_CHUNK:
        raise h11.RemoteProtocolError(
          f'chunks of less than {MIN_CHUNK} bytes on average'
        )
    return event

  def send(self, event):
    """Returns the bytes of an event; says so if the connection will end."""
    data = super().send(event) or b''
    is_first = isinstance(event, h11.Response)
    self.largest = max(0 if is_first else self.largest, len(data))
    if is_first and self.their_state is h11.SEND_BODY:
      # Not as a header of h11's: it would have the connection closed at once.
      self.ends = True
      return data[:-2] + b'connection: close\r\n\r\n'
    return data


class Connection(h11_impl.H11Protocol):
  """One client's connection."""

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self.conn, self.logger = _Requests(), _LOGGER
    # 'head', 'body', 'end' of a connection, or '' while a request is handled.
    self._awaited = ''
    self._discards = False  # what the client still sends
    self._timer: asyncio.TimerHandle | None = None
    self._unread_timer: asyncio.TimerHandle | None = None
    self._since = time.monotonic()  # the client is awaited

  @property
  def address(self) -> str:
    """The client's."""
    return self.client[0] if self.client else ''

  @property
  def is_awaited(self) -> bool:
    """Whether the server waits for the client to send or to read."""
    return bool(self._awaited) or self._unread_timer is not None

  @property
  def since(self) -> float:
    """The time from which the client is awaited."""
    return self._since

  @property
  def unsent(self) -> int:
    """Bytes that are held for a client that does not read; 0 if it reads.

    What is written at once is held until the last byte of it is sent.
    """
    if self._unread_timer is None:
      return 0
    return max(self.transport.get_write_buffer_size(), self.conn.largest)

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._watch()
    if len(self.connections) > max_connections():
      _longest_awaited(self.connections).abort()

  def abort(self) -> None:
    """Closes the connection at once."""
    self.connections.discard(self)  # it is lost a little later only
    self.transport.abort()

  def connection_lost(self, exc: Exception | None) -> None:
    if self._timer is not None:
      self._timer.cancel()
    self._end_unread()
    self._unset_keepalive_if_required()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    if not self._discards:
      super().data_received(data)
      self._watch()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    if self.conn.ends:
      self._end()
    self._watch()

  def send_400_response(self, msg: str) -> None:
    del msg  # uvicorn's; the reason is in the parser's error, handled now
    reason = sys.exception()
    self._refuse(
      fields.Refused(400, f'the request must be HTTP/1.1: got {reason}')
    )

  def shutdown(self) -> None:
    if self._discards:
      self.transport.close()
    else:
      super().shutdown()

  def pause_writing(self) -> None:
    super().pause_writing()
    if not self._awaited:
      self._since = time.monotonic()
    self._unread_timer = self.loop.call_later(READ, self.transport.abort)
    unread = [x for x in self.connections if x.unsent]
    while sum(x.unsent for x in unread) > MAX_UNSENT:
      longest = _longest_awaited(unread)
      longest.abort()
      unread.remove(longest)

  def resume_writing(self) -> None:
    self._end_unread()
    super().resume_writing()
    if self.conn.our_state is h11.IDLE and not self.transport.is_closing():
      self.flow.resume_reading()
      self.handle_events()
      self._watch()  # a request that has waited is no longer awaited

  def _end_unread(self) -> None:
    if self._unread_timer is not None:
      self._unread_timer.cancel()
      self._unread_timer = None
      release.soon()

  def handle_events(self) -> None:
    if self.flow.write_paused and self.conn.our_state is h11.IDLE:
      # Else each pipelined request would add a response to the unread one.
      self.flow.pause_reading()
    elif not self._discards:
      super().handle_events()

  def _watch(self) -> None:
    """Starts the deadline of what is awaited now, unless it runs already."""
    awaited = {h11.IDLE: 'head', h11.SEND_BODY: 'body'}.get(
      self.conn.their_state, ''
    )
    if self._discards:
      awaited = 'end'
    if awaited == self._awaited:
      return
    self._awaited = awaited
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None
    if awaited:
      self._since = time.monotonic()
      seconds = {'head': HEAD, 'body': BODY, 'end': KEEP_ALIVE}[awaited]
      self._timer = self.loop.call_later(seconds, self._late, seconds)

  def _late(self, seconds: float) -> None:
    """Closes the connection, with status 408 if a request has begun."""
    if self._awaited == 'end' or not (
      self._awaited == 'body' or self.conn.trailing_data[0]
    ):
      self.transport.close()
      return
    self._refuse(
      fields.Refused(
        408,
        f"the request's {self._awaited} must arrive in {seconds:g} s",
        code='request_timeout',
      )
    )

  def _refuse(self, error: fields.Refused) -> None:
    """Ends the connection, with an error object if no response has begun."""
    cycle = self.cycle
    open_cycle = cycle is not None and not cycle.response_complete
    if self.transport.is_closing() or open_cycle and cycle.response_started:
      self.transport.close()
      return
    if open_cycle:
      cycle.disconnected = True
      cycle.message_event.set()
    phrase = http.HTTPStatus(error.status).phrase
    body = json.dumps(error.body)
    self.transport.write(
      f'HTTP/1.1 {error.status} {phrase}\r\nconnection: close\r\n'
      'content-type: application/json\r\n'
      f'content-length: {len(body)}\r\n\r\n{body}'.encode()
    )
    self._end()

  def _end(self) -> None:
    """Closes the connection once the client does, or after `KEEP_ALIVE` s.

    Until then what it sends is discarded: the kernel answers data for a closed
    connection with a reset, and the client may lose the response.
    """
    self._discards = True
    self.flow.resume_reading()
    self.transport.write_eof()
    self._watch()


def _longest_awaited(connections: Iterable[Connection]) -> Connection:
  """Returns the connection that has kept the server waiting longest.

  It is one of the address with the most of them, so that no address can have
  all places.
  """
  awaited = [x for x in connections if x.is_awaited]
  counts = collections.Counter(x.address for x in awaited)
  return min(awaited, key=lambda x: (-counts[x.address], x.since))
