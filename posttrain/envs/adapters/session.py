"""Sessions with an OpenEnv server: JSON messages over a WebSocket.

    client:  {"type": "reset", "data": {"seed": 7}}
    server:  {"type": "observation", "data":
              {"observation": {...}, "reward": null, "done": false}}
    client:  {"type": "step", "data": {...the action...}}
    server:  an observation, or {"type": "error", "data": {"code": ..., ...}}

The server creates an environment for each connection. Only the package
`websockets` is needed; it is imported when a session is opened.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

REFUSALS = ('VALIDATION_ERROR', 'INVALID_JSON')  # of an action
_MAX_BYTES = 2**27  # of a message from the server


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
    from websockets.sync import client

    self._url = url
    self._connect_timeout = connect_timeout
    self._message_timeout = message_timeout
    self._closed_error = exceptions.ConnectionClosed
    self._stack = contextlib.ExitStack()
    try:
      self._socket = self._stack.enter_context(
        client.connect(url, open_timeout=connect_timeout, max_size=_MAX_BYTES)
      )
    except (OSError, exceptions.WebSocketException) as error:
      raise ConnectionError(
        f'url must name a server that answers in connect_timeout='
        f'{connect_timeout:g} s: got {url!r}; {type(error).__name__}: {error}'
      ) from error

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
      RuntimeError: the server answered with an error or has no free session.
    """
    try:
      # A server that closes sends the reason first: it can still be received.
      with contextlib.suppress(self._closed_error):
        self._socket.send(json.dumps({'type': kind, 'data': data}))
      reply = json.loads(self._socket.recv(timeout=self._message_timeout))
    except TimeoutError:
      raise TimeoutError(
        f'{self._url} must answer a {kind} in message_timeout='
        f'{self._message_timeout:g} s: got nothing'
      ) from None
    except self._closed_error as error:
      raise ConnectionError(
        f'{self._url} must stay connected: {error}'
      ) from error
    data = reply['data']
    if reply['type'] == 'observation':
      return data
    code, text = data.get('code'), _explain(data)
    if kind == 'step' and code in REFUSALS:
      raise BadAction(text)
    raise RuntimeError(f'{self._url} answers a {kind} with {code}: {text}')

  def close(self) -> None:
    """Closes the session and waits until the server has freed it."""
    with contextlib.suppress(self._closed_error, TimeoutError):
      self._socket.send('{"type": "close"}')
      self._socket.recv(timeout=self._connect_timeout)
    self._stack.close()


def _explain(data: Mapping[str, Any]) -> str:
  """Returns the message of an error, with those about each action field."""
  fields = (
    f'{".".join(map(str, error.get("loc", ())))}: {error.get("msg")}'
    for error in data.get('errors', ())
  )
  return '; '.join((str(data.get('message')), *fields))
