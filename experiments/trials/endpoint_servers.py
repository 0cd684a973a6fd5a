"""Endpoints for trials: well-formed, without end, slow, echoing, hostile."""

import contextlib
import functools
import gzip
import http.server
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator

MODEL = 'teacher'
SECONDS = 0.7  # of an answer
_MIB = 2**20


class Server(http.server.ThreadingHTTPServer):
  """A server in a thread; `answer` writes each answer."""

  daemon_threads = True

  def __init__(self, answer: Callable[['Handler', dict], None]):
    super().__init__(('127.0.0.1', 0), Handler)
    self.answer, self.seen = answer, 0  # `seen`: requests
    threading.Thread(target=self.serve_forever, daemon=True).start()

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self.server_address[1]}/v1'

  def handle_error(self, request, client_address) -> None:
    """Says nothing: clients that leave are what is tried here."""


class Handler(http.server.BaseHTTPRequestHandler):
  """One connection."""

  protocol_version = 'HTTP/1.1'
  disable_nagle_algorithm = True

  def _do(self) -> None:
    size = int(self.headers.get('Content-Length') or 0)
    body = json.loads(self.rfile.read(size) or '{}')
    self.server.seen += 1
    self.server.answer(self, body)

  do_GET = do_POST = _do

  def log_message(self, *args) -> None:
    del args

  def send(self, body: bytes | dict, status: int = 200, **headers) -> None:
    """Sends a whole answer."""
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    self.send_response(status)
    for name, value in headers.items():
      self.send_header(name.replace('_', '-'), value)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)


@contextlib.contextmanager
def served(answer: Callable[[Handler, dict], None]) -> Iterator[Server]:
  """Yields a server."""
  server = Server(answer)
  try:
    yield server
  finally:
    server.shutdown()
    server.server_close()


def honest(handler: Handler, body: dict) -> None:
  """Answers as a server whose logprobs are a function of two tokens."""
  if handler.path == '/v1/models':
    handler.send({'data': [{'id': MODEL}]})
  elif handler.path == '/v1/completions' and 'prompt_logprobs' in body:
    ids = body['prompt']
    entries: list = [None]
    for before, token in zip(ids[:-1], ids[1:], strict=True):
      logprob = -0.01 - (before * 31 + token * 17) % 97 / 20
      entries.append({str(token): {'logprob': logprob}})
    handler.send({'choices': [{'prompt_logprobs': entries}]})
  else:
    handler.send({'error': {'message': 'not here'}}, 404)


def _flood(handler: Handler, body: dict) -> None:
  del body
  handler.send_response(200)
  handler.send_header('Content-Length', str(600 * _MIB))
  handler.end_headers()
  for _ in range(600):
    handler.wfile.write(b' ' * _MIB)


def _chunks(handler: Handler, body: dict) -> None:
  del body
  handler.send_response(200)
  handler.send_header('Transfer-Encoding', 'chunked')
  handler.end_headers()
  for _ in range(600):
    handler.wfile.write(b'%x\r\n' % _MIB + b' ' * _MIB + b'\r\n')


@functools.cache
def bomb(mebibytes: int) -> bytes:
  """Returns zeros in gzip; they are never in memory."""
  packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
  pieces = [packer.compress(bytes(_MIB)) for _ in range(mebibytes)]
  return b''.join([*pieces, packer.flush()])


def _encoded_bomb(handler: Handler, body: dict) -> None:
  del body
  handler.send(bomb(600), Content_Encoding='gzip')


def _encoded(coding: str, data: bytes) -> Callable[[Handler, dict], None]:
  return lambda handler, _: handler.send(data, Content_Encoding=coding)


def _drip(*starts: bytes) -> Callable[[Handler, dict], None]:
  """Returns an answer that sends these bytes, then one byte per 0.1 s."""

  def answer(handler: Handler, body: dict) -> None:
    del body
    for start in starts:
      handler.wfile.write(start)
    while True:
      time.sleep(0.1)
      handler.wfile.write(b' ' if starts else b'H')

  return answer


def _endless_informations(handler: Handler, body: dict) -> None:
  del body
  while True:
    handler.wfile.write(b'HTTP/1.1 103 Early Hints\r\n\r\n' * 100)


def _echoed_header(handler: Handler, body: dict) -> None:
  del body
  key = handler.headers['Authorization'].encode()
  handler.wfile.write(
    b'HTTP/1.1 200 OK\r\nBad Header \x01: ' + key + b'\r\n\r\n'
  )


def _echo(status: int) -> Callable[[Handler, dict], None]:
  def answer(handler: Handler, body: dict) -> None:
    del body
    key = handler.headers['Authorization']
    handler.send({'error': {'message': f'{key} {"QUJD" * 5000}'}}, status)

  return answer


_HEAD = b'HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n'
FLOODS: dict[str, tuple[Callable[[Handler, dict], None], str]] = {
  '600 MiB': (_flood, 'at most'),
  '600 MiB in chunks': (_chunks, 'at most'),
  'gzip bomb of 600 MiB': (_encoded_bomb, 'at most'),
  'gzip in gzip': (_encoded('gzip, gzip', gzip.compress(b'{}')), 'gzip, gzip'),
  'deflate': (_encoded('deflate', zlib.compress(bytes(_MIB))), "'deflate'"),
  'br': (_encoded('br', b'\x0b\x00'), "'br'"),
  'no gzip': (_encoded('gzip', b'{"choices": []}'), 'gzip'),
  'cut gzip': (_encoded('gzip', gzip.compress(b'{}')[:-4]), 'ends early'),
  'drip of the status line': (_drip(), f'within {SECONDS:g} s'),
  'drip of a header': (_drip(_HEAD, b'A: '), f'within {SECONDS:g} s'),
  'drip of the body': (_drip(_HEAD + b'\r\n'), f'within {SECONDS:g} s'),
  'informations without end': (_endless_informations, f'within {SECONDS:g} s'),
  'a key in an invalid header': (_echoed_header, ''),
  'a key and base64 in an error': (_echo(400), '[masked]'),
  'a key in a busy answer': (_echo(503), '[masked]'),
  'a cut body': (
    lambda handler, _: (
      handler.wfile.write(_HEAD + b'\r\n{'),
      handler.connection.shutdown(2),
    ),
    '',
  ),
}


def hostile(handler: Handler, body: dict) -> None:
  """Answers with a number of 400 digits, and the key as a token id."""
  entry = {handler.headers['Authorization']: 10**400}
  entries = [None, *([entry] * (len(body['prompt']) - 1))]
  handler.send({'choices': [{'prompt_logprobs': entries}]})
