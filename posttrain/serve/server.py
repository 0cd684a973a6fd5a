"""The process around the application: a socket, signals, and the way out.

1. The socket is bound before the model is loaded: a port that is taken is
   known at once, and port 0 becomes a free one.
2. SIGTERM and SIGINT fail what is under way, so that its clients hear of it,
   and end the process, whatever the engine is doing; a second one at once.
"""

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator

import uvicorn

from posttrain.serve import worker as workers

INTERRUPTED = 130  # exit code after SIGINT
LEAVE = 2  # seconds that the clients, and then the engine, get


def bind(host: str, port: int) -> socket.socket:
  """Returns a socket that listens there; port 0 = any that is free.

  Raises:
    ValueError: the address cannot be had.
  """
  try:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=2048)
  except OSError as error:
    raise ValueError(
      f'--host and --port must be free: got {host}:{port}; {error}'
    ) from error


def address(listening: socket.socket) -> str:
  """Where clients reach a socket."""
  host, port = listening.getsockname()[:2]
  return f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'


class Server(uvicorn.Server):
  """Serves an application on a socket, until it is told to stop."""

  def __init__(self, app, worker: workers.Worker):
    """Args: app: of `app.make`; worker: its, started."""
    super().__init__(
      uvicorn.Config(
        app,
        log_level='warning',
        access_log=False,
        lifespan='off',
        ws='none',
        timeout_graceful_shutdown=LEAVE,
      )
    )
    self._worker = worker
    self._code = 0

  def serve_on(self, listening: socket.socket) -> int:
    """Serves until `leave`; returns the exit code. Any thread may."""
    self.run(sockets=[listening])
    return self._code

  def leave(self, signum: int | None = None, _=None) -> None:
    """Stops soon; a handler of signals."""
    if signum and self.should_exit:
      os._exit(self._code)
    self._code = INTERRUPTED if signum == signal.SIGINT else 0
    self.should_exit = True
    # Not in the handler: what it interrupts may hold the worker's lock.
    threading.Thread(target=self._worker.stop, args=(0.0,)).start()

  @contextlib.contextmanager
  def capture_signals(self) -> Iterator[None]:
    """In place of uvicorn's, which ends the process by the signal."""
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
