"""Sessions with an OpenEnv server: JSON messages over a WebSocket.

    client:  {"type": "reset", "data": {"seed": 7}}
    server:  {"type": "observation", "data":
              {"observation": {...}, "reward": null, "done": false}}
    client:  {"type": "step", "data": {...the action...}}
    server:  an observation, or {"type": "error", "data": {"code": ..., ...}}

The server creates an environment for each connection. Only the package
`websockets` is needed; it is imported when a session is opened.

Each exchange has a deadline up to its last byte (`loops`) and a largest size.
Redirects are not followed, and passwords in the address are not shown.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from posttrain.util import floats, foreign, json_files, loops

REFUSALS = ('VALIDATION_ERROR', 'INVALID_JSON')  # of an action
_MAX_BYTES = 2**24  # of a message from the server, decompressed
_MAX_REASON = 4000  # characters of a refusal, which become an observation


class BadAction(Exception):
  """An action that the server refused; the message is the server's reason."""


class Session:
  """An open connection, with its own environment on the server."""

  def __init__(self, url: str, connect_timeout: float, message_timeout: float):
    """Opens the connection.

    Args:
      url: ws:// or wss://.
      connect_timeout: seconds to open the connection, and to close it.
      message_timeout: seconds until a message must be answered.

    Raises:
      ConnectionError: there is no WebSocket server at the url.
    """
    from websockets import exceptions

    self._url = _shown(url)
    self._connect_timeout = connect_timeout
    self._message_timeout = message_timeout
    self._closed_error = exceptions.ConnectionClosed
    self._calls = loops.Calls()
    try:
      self._socket = self._calls.run(
        _open(url, connect_timeout), connect_timeout
      )
    except (OSError, EOFError, exceptions.WebSocketException) as error:
      raise ConnectionError(
        f'url must name a server that answers in connect_timeout='
        f'{connect_timeout:g} s: got {self._url!r}; {foreign.error(error)}'
      ) from None

  def request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sends a message and returns the `data` of the server's reply.

    Args:
      kind: 'reset' or 'step'.
      data: options of the reset, or the action.

    Returns:
      {'observation': ..., 'reward': ..., 'done': ...}

    Raises:
      BadAction: the server refused the action.
      TimeoutError: the server did not answer in time.
      ConnectionError: the server closed the connection.
      RuntimeError: the server answered with an error or with anything but an
        observation, or has no free session.
    """
    message = json.dumps({'type': kind, 'data': data})
    try:
      answer = self._calls.run(self._ask(message), self._message_timeout)
    except TimeoutError:
      raise TimeoutError(
        f'{self._url} must answer a {kind} in message_timeout='
        f'{self._message_timeout:g} s: got nothing whole'
      ) from None
    except self._closed_error as error:
      raise ConnectionError(
        f'{self._url} must stay connected, and send at most {_MAX_BYTES} bytes '
        f'at once: {foreign.text(error)}'
      ) from None
    name, data = self._read(answer, kind)
    if name == 'observation':
      return data
    code, text = data.get('code'), _explain(data)
    if kind == 'step' and code in REFUSALS:
      raise BadAction(_cut(text))
    raise RuntimeError(
      f'{self._url} answers a {kind} with {foreign.text(code)}: '
      f'{foreign.text(text)}'
    )

  def _read(self, answer: str | bytes, kind: str) -> tuple[Any, dict[str, Any]]:
    """Returns type and data of a message; RuntimeError if they do not fit."""
    try:
      message = json_files.parse(answer, 'a message', _MAX_BYTES)
    except ValueError:
      message = None
    data = message.get('data') if isinstance(message, dict) else None
    if not isinstance(data, dict):
      raise RuntimeError(
        f'{self._url} must answer a {kind} with a JSON object that has an '
        f'object data: got {foreign.quote(answer)}'
      )
    if message.get('type') != 'observation':
      return message.get('type'), data
    for field, (must, fits) in _FIELDS.items():
      if not fits(data.get(field)):
        raise RuntimeError(
          f'{self._url} must answer a {kind} with {field} that is {must}: got '
          f'{foreign.quote(data.get(field))}'
        )
    return 'observation', data

  def close(self) -> None:
    """Closes the session and waits until the server has freed it."""
    with contextlib.suppress(
      self._closed_error, TimeoutError, concurrent.futures.CancelledError
    ):
      self._calls.run(
        self._exchange('{"type": "close"}'), self._connect_timeout
      )
    self._calls.cancel()
    # Its closing handshake has a time limit, and nothing waits for it.
    loops.start(self._socket.close())

  async def _ask(self, message: str) -> str | bytes:
    """Returns the answer to a message, or an error that came before it."""
    with contextlib.suppress(TimeoutError, self._closed_error):
      async with asyncio.timeout(0):  # only what has arrived already
        early = await self._socket.recv()
      if 'observation' not in str(early):  # such as that the server is full
        return early
      raise RuntimeError(
        f'{self._url} must send one message for each request: got another one, '
        f'{foreign.quote(early)}'
      )
    return await self._exchange(message)

  async def _exchange(self, message: str) -> str | bytes:
    # A server that closes sends the reason first: it can still be received.
    with contextlib.suppress(self._closed_error):
      await self._socket.send(message)
    return await self._socket.recv()


async def _open(url: str, timeout: float) -> Any:
  """Returns an open connection; redirects are errors."""
  from websockets.asyncio import client

  class Connect(client.connect):
    """A connection to the named server alone."""

    def process_redirect(self, exc: Exception) -> Exception:
      return exc

  return await Connect(
    url,
    open_timeout=timeout,
    close_timeout=timeout,
    # Pings keep an idle connection open. A server may answer late: it has
    # `message_timeout`.
    ping_timeout=None,
    max_size=_MAX_BYTES,
    max_queue=1,  # a message per request; the rest waits at the server
  )


def _shown(url: str) -> str:
  """Returns an address without user, password and query; masks their values."""
  parts = urllib.parse.urlsplit(url)
  user, _, host = parts.netloc.rpartition('@')
  for secret in (
    user.partition(':')[2],
    *(value for _, value in urllib.parse.parse_qsl(parts.query)),
  ):
    foreign.mask(urllib.parse.unquote(secret))
  return urllib.parse.urlunsplit((parts.scheme, host, parts.path, '', ''))


def _cut(text: str) -> str:
  left_out = len(text) - _MAX_REASON
  if left_out <= 0:
    return text
  return f'{text[:_MAX_REASON]}... ({left_out} more characters)'


def _is_reward(value: Any) -> bool:
  """Returns whether a value is None or a finite number."""
  return value is None or (
    isinstance(value, int | float) and floats.is_finite(value)
  )


# Field of an observation's data -> (requirement in words, check of a value).
_FIELDS = {
  'observation': ('an object', lambda x: isinstance(x, dict)),
  'reward': ('null or a finite number', _is_reward),
  'done': ('true or false', lambda x: x is None or isinstance(x, bool)),
}


def _explain(data: Mapping[str, Any]) -> str:
  """Returns the message of an error, with those about each action field."""
  errors = data.get('errors')
  fields = (
    f'{".".join(map(str, error.get("loc") or ()))}: {error.get("msg")}'
    for error in (errors if isinstance(errors, list) else ())
    if isinstance(error, dict) and isinstance(error.get('loc'), list | None)
  )
  return '; '.join((str(data.get('message')), *fields))
