"""A session of an OpenEnv server: JSON messages over a WebSocket.

    we:      {"type": "reset", "data": {"seed": 7}}
    server:  {"type": "observation", "data":
              {"observation": {...}, "reward": null, "done": false}}
    we:      {"type": "step", "data": {...the action...}}
    server:  the like; or {"type": "error", "data": {"code": ..., ...}}

The server makes an environment for each connection. Only the package
`websockets` is needed, which is imported when a session is opened.
"""

import contextlib
import json
from collections.abc import Mapping
from typing import Any

REFUSALS = ('VALIDATION_ERROR', 'INVALID_JSON')  # of an action
_MAX_BYTES = 2**27  # of a message from the server


class BadAction(Exception):
  """What the server does not take for an action; says why."""


class Session:
  """An open connection, and the environment behind it."""

  def __init__(self, url: str, connect_timeout: float, message_timeout: float):
    """Connects.

    Args:
      url: ws:// or wss://.
      connect_timeout: seconds; also of taking leave.
      message_timeout: seconds until a message must be answered.

    Raises:
      ConnectionError: no server there, or none that speaks WebSocket.
    """
    from websockets import exceptions
    from websockets.sync import client

    self._url, self._wait = url, message_timeout
    self._leave = connect_timeout
    self._closed = exceptions.ConnectionClosed
    self._open = contextlib.ExitStack()
    try:
      self._socket = self._open.enter_context(
        client.connect(url, open_timeout=connect_timeout, max_size=_MAX_BYTES)
      )
    except (OSError, exceptions.WebSocketException) as error:
      raise ConnectionError(
        f'url must name a server that answers in connect_timeout='
        f'{connect_timeout:g} s: got {url!r}; {type(error).__name__}: {error}'
      ) from error

  def ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns {'observation': ..., 'reward': ..., 'done': ...}.

    Args:
      kind: 'reset' or 'step'.
      data: options of the reset; the action.

    Raises:
      BadAction: the server does not take the action.
      TimeoutError, ConnectionError: it does not answer; it has closed.
      RuntimeError: it says that it failed, or has no place left.
    """
    try:
      # A server that closes has said why before: that is still to be read.
      with contextlib.suppress(self._closed):
        self._socket.send(json.dumps({'type': kind, 'data': data}))
      reply = json.loads(self._socket.recv(timeout=self._wait))
    except TimeoutError:
      raise TimeoutError(
        f'{self._url} must answer a {kind} in message_timeout='
        f'{self._wait:g} s: got nothing'
      ) from None
    except self._closed as error:
      raise ConnectionError(
        f'{self._url} must stay connected: {error}'
      ) from error
    told = reply['data']
    if reply['type'] == 'observation':
      return told
    code, said = told.get('code'), _explain(told)
    if kind == 'step' and code in REFUSALS:
      raise BadAction(said)
    raise RuntimeError(f'{self._url} answers a {kind} with {code}: {said}')

  def close(self) -> None:
    """Takes leave, and waits until the server has a free place again."""
    with contextlib.suppress(self._closed, TimeoutError):
      self._socket.send('{"type": "close"}')
      self._socket.recv(timeout=self._leave)
    self._open.close()


def _explain(told: Mapping[str, Any]) -> str:
  """Returns the words of an error, with those on each field of an action."""
  fields = (
    f'{".".join(map(str, error.get("loc", ())))}: {error.get("msg")}'
    for error in told.get('errors', ())
  )
  return '; '.join((str(told.get('message')), *fields))
