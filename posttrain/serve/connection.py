"""Connections with deadlines: uvicorn's, which has one between requests only.

A connection is closed if the head of a request takes longer than `HEAD`
seconds, its body longer than `BODY`, or if its client does not read what is
sent for `READ` seconds. With too many connections, the one that has waited
longest for a head is closed, so that half-sent heads keep no client out.
"""

import asyncio
import functools
import json
import resource
import time
from typing import Any

import h11
from uvicorn.protocols.http import h11_impl

from posttrain.serve import fields

HEAD, BODY, READ = 10.0, 60.0, 60.0  # seconds
KEEP_ALIVE = 5  # seconds between two requests; uvicorn's own setting
MAX_HEAD = 2**14  # bytes; uvicorn's own setting
_MOST = 1000  # connections


@functools.cache
def max_connections() -> int:
  """Returns the most open connections: half of the process's descriptors."""
  descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
  if descriptors == resource.RLIM_INFINITY:
    return _MOST
  return max(min(_MOST, descriptors // 2), 1)


class Connection(h11_impl.H11Protocol):
  """One client's connection."""

  def __init__(self, *args: Any, **kwargs: Any):
    super().__init__(*args, **kwargs)
    self._awaited = ''  # 'head', 'body', or '' while a request is handled
    self._timer: asyncio.TimerHandle | None = None
    self._unread_timer: asyncio.TimerHandle | None = None
    self._since = time.monotonic()  # a head is awaited

  def connection_made(self, transport: Any) -> None:
    super().connection_made(transport)
    self._watch()
    if len(self.connections) > max_connections():
      waiting = [x for x in self.connections if x._awaited == 'head']
      min(waiting, key=lambda x: x._since).transport.abort()

  def connection_lost(self, exc: Exception | None) -> None:
    for timer in (self._timer, self._unread_timer):
      if timer is not None:
        timer.cancel()
    self._unset_keepalive_if_required()
    super().connection_lost(exc)

  def data_received(self, data: bytes) -> None:
    super().data_received(data)
    self._watch()

  def on_response_complete(self) -> None:
    super().on_response_complete()
    self._watch()

  def pause_writing(self) -> None:
    super().pause_writing()
    self._unread_timer = self.loop.call_later(READ, self.transport.abort)

  def resume_writing(self) -> None:
    if self._unread_timer is not None:
      self._unread_timer.cancel()
      self._unread_timer = None
    super().resume_writing()

  def _watch(self) -> None:
    """Starts the deadline of what is awaited now, unless it runs already."""
    awaited = {h11.IDLE: 'head', h11.SEND_BODY: 'body'}.get(
      self.conn.their_state, ''
    )
    if awaited == self._awaited:
      return
    self._awaited = awaited
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None
    if awaited:
      self._since = time.monotonic()
      seconds = HEAD if awaited == 'head' else BODY
      self._timer = self.loop.call_later(seconds, self._late, seconds)

  def _late(self, seconds: float) -> None:
    """Closes the connection, with status 408 if no response has begun."""
    if self.transport.is_closing():
      return
    head = self._awaited == 'head'
    begun = bool(self.conn.trailing_data[0])  # of a head
    if begun if head else not self.cycle.response_started:
      message = f"the request's {self._awaited} must arrive in {seconds:g} s"
      refusal = fields.Refused(408, message, code='request_timeout')
      body = json.dumps(refusal.body)
      self.transport.write(
        'HTTP/1.1 408 Request Timeout\r\nconnection: close\r\n'
        'content-type: application/json\r\n'
        f'content-length: {len(body)}\r\n\r\n{body}'.encode()
      )
    self.transport.close()
