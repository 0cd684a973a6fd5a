"""The server process: socket, signals, shutdown.

1. The socket is bound before the model is loaded: a port in use is reported at
   once, and port 0 becomes a free one.
2. SIGTERM and SIGINT fail the open calls, so that clients get an error, and end
   the process even if the engine is busy; a second signal ends it at once.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import uvicorn

from posttrain.serve import connection
from posttrain.serve import worker as workers
from posttrain.util import exits

LEAVE = 2  # seconds of grace for the clients, and then for the engine


def bind(host: str, port: int) -> socket.socket:
  """Returns a listening socket; port 0 = any free port.

  Raises:
    ValueError: the address is in use or invalid.
  """
  try:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=2048)
  except OSError as error:
    raise ValueError(
      f'--host and --port must be free: got {host}:{port}; {error}'
    ) from error


def address(listening: socket.socket) -> str:
  """Returns the URL of a socket."""
  host, port = listening.getsockname()[:2]
  return f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'


class Server(uvicorn.Server):
  """Serves an application on a socket until `leave`."""

  def __init__(self, app: Any, worker: workers.Worker):
    """Configures uvicorn.

    Args:
      app: the application, from `app.make`.
      worker: the application's worker, started.
    """
    super().__init__(
      uvicorn.Config(
        app,
        log_level='warning',
        access_log=False,
        lifespan='off',
        ws='none',
        http=connection.Connection,
        h11_max_incomplete_event_size=connection.MAX_HEAD,
        timeout_keep_alive=connection.KEEP_ALIVE,
        timeout_graceful_shutdown=LEAVE,
      )
    )
    self._worker = worker
    self._code = 0

  def serve_on(self, listening: socket.socket) -> int:
    """Serves until `leave`; returns the exit code. Works in any thread."""
    self.run(sockets=[listening])
    return self._code

  def leave(self, signum: int | None = None, _: Any = None) -> None:
    """Starts the shutdown; also a signal handler."""
    if signum and self.should_exit:
      os._exit(self._code)
    self._code = exits.INTERRUPTED if signum == signal.SIGINT else 0
    self.should_exit = True
    # Not in the handler: the interrupted code may hold the worker's lock.
    threading.Thread(target=self._worker.stop, args=(0.0,)).start()

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    """Replaces uvicorn's, which ends the process by the signal."""
    if threading.current_thread() is not threading.main_thread():
      yield
      return
    kinds = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(kind, self.leave) for kind in kinds]
    try:
      yield
    finally:
      for kind, handler in zip(kinds, before, strict=True):
        signal.signal(kind, handler)
