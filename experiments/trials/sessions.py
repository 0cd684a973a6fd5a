"""Sessions with environment servers that flood, drip and hang."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

from websockets.sync import server as websocket_server

from experiments.trials import base
from posttrain.envs.adapters import session

MIB = 2**20
SECONDS = 0.7  # of a message


@base.trial('endpoint', 'a session with a hostile environment server ends')
def sessions(scratch: base.Scratch) -> str:
  """Sends messages that are too large, without end, late, of other forms."""
  del scratch
  slowest = 0.0
  for name, (handler, error, words) in _MESSAGES.items():
    begin = time.monotonic()
    try:
      with _serving(handler) as url:
        _step(url, error, words)
    except AssertionError as failure:
      raise AssertionError(f'{name}: {failure}') from failure
    took = time.monotonic() - begin
    assert took < 6, f'{name} took {took:.1f} s'
    slowest = max(slowest, took)
  return (
    f'{base.words(_MESSAGES)}: each one error of one line, the slowest after '
    f'{slowest:.1f} s'
  )


def _step(url: str, kind: type[Exception], words: str) -> None:
  opened = None
  seconds = SECONDS if kind is TimeoutError else 10.0
  try:
    opened = session.Session(url, seconds, seconds)
    opened.request('step', {'text': 'x'})
  except kind as error:
    text = str(error)
    assert words in text and url in text, text
    assert '\n' not in text and len(text) < 1500, f'{len(text)} characters'
  else:
    raise AssertionError('accepted')
  finally:
    if opened is not None:
      opened.close()


@contextlib.contextmanager
def _serving(handler: Callable) -> Iterator[str]:
  with websocket_server.serve(
    handler, '127.0.0.1', 0, close_timeout=0.2
  ) as server:
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f'ws://127.0.0.1:{server.socket.getsockname()[1]}/ws'
    server.shutdown()


def _message(*parts: str | bytes) -> Callable:
  """Returns a server that answers with a message; several parts: fragments."""

  def handler(connection) -> None:
    with contextlib.suppress(Exception):
      connection.recv()
      connection.send(parts[0] if len(parts) == 1 else iter(parts))
      connection.recv(timeout=3)

  return handler


def _dripping(connection) -> None:
  with contextlib.suppress(Exception):
    connection.recv()
    connection.send(iter(lambda: time.sleep(0.05) or ' ', None))


def _data(data: str) -> Callable:
  return _message(f'{{"type": "observation", "data": {data}}}')


_MESSAGES: dict[str, tuple[Callable, type[Exception], str]] = {
  '32 MiB that compress to 32 KiB': (
    _message(' ' * 2**25),
    ConnectionError,
    'at most',
  ),
  '20 MiB in fragments': (
    _message(*[' ' * MIB] * 20),
    ConnectionError,
    'at most',
  ),
  'a drip of fragments': (_dripping, TimeoutError, 'message_timeout'),
  'silence': (lambda _: time.sleep(2), TimeoutError, 'message_timeout'),
  'deep JSON': (_message('[' * 100_000), RuntimeError, 'JSON object'),
  'bytes that are no text': (
    _message(b'\xff' * 9),
    RuntimeError,
    'JSON object',
  ),
  'an error of a megabyte': (
    _message(f'{{"type": "error", "data": {{"message": "{"A" * MIB}"}}}}'),
    RuntimeError,
    'answers a step',
  ),
  'a list': (_data('[]'), RuntimeError, 'object data'),
  'no observation': (_data('{}'), RuntimeError, 'observation'),
  'a reward of 400 digits': (
    _data(f'{{"observation": {{}}, "reward": {"9" * 400}}}'),
    RuntimeError,
    'reward',
  ),
}
