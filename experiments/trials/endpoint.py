"""Endpoints that lie, flood, drip and echo: the client, and a whole run."""

import contextlib
import functools
import gc
import gzip
import http.server
import io
import json
import logging
import os
import pathlib
import resource
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from experiments.trials import base
from posttrain import schema
from posttrain.chat import renderer as chat
from posttrain.chat import tokenizers
from posttrain.checkpoints import store
from posttrain.decode import requests
from posttrain.rollout.endpoint import client
from posttrain.util import exits

IDS = np.array([72, 101, 108, 108, 111], np.int32)
ONES = np.ones(len(IDS), np.float32)
KEY = 'trial-Key/with+signs="1234'
VARIABLE = 'POSTTRAIN_TRIAL_API_KEY'
MODEL = 'teacher'
_MIB = 2**20
_SECONDS = 0.7  # of an answer


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


def connect(url: str, timeout: float = 1.0, tries: int = 2, **options):
  """Returns a client that does not pause between tries."""
  os.environ[VARIABLE] = KEY
  cfg = schema.Endpoint(
    name=MODEL, base_url=url, api_key_env=VARIABLE, timeout=timeout, tries=tries
  )
  return client.Endpoint(
    cfg, 'environment sums', sleep=lambda _: None, **options
  )


def refused(request: Callable[[], object], url: str, *words: str) -> str:
  """Returns the text of the EndpointError that a call must raise.

  It must be one line that names the server and has these words, and show the
  key neither in its traceback nor in a log.
  """
  log = io.StringIO()
  handler = logging.StreamHandler(log)
  logging.getLogger('absl').addHandler(handler)
  try:
    result = request()
  except client.EndpointError as error:
    trace = ''.join(traceback.format_exception(error))
    text, shown = str(error), trace + log.getvalue()
  except Exception as error:
    raise AssertionError(
      f'{type(error).__name__} instead of EndpointError: {str(error)[:200]}'
    ) from error
  else:
    raise AssertionError(f'accepted: {str(result)[:200]}')
  finally:
    logging.getLogger('absl').removeHandler(handler)
  assert '\n' not in text and len(text) < 1500, f'{len(text)}: {text[:200]}'
  for word in (MODEL, url.partition('@')[2] or url, *words):
    assert word in text, f'{word!r} is not in: {text}'
  for form in (KEY, 'signs', 'Key/'):
    assert form not in shown, f'the key: {text}'
  return text


def call(endpoint: client.Endpoint, kind: str) -> Callable[[], object]:
  """Returns a call of an endpoint: score, sample, chat or check."""
  request = requests.Request(
    id=1,
    ids=IDS,
    max_tokens=4,
    stop_ids=(257,),
    sampling=requests.Sampling(temperature=1.0),
  )
  renderer = chat.Renderer(tokenizers.Bytes())
  return {
    'score': lambda: endpoint.score([IDS], [ONES]),
    'sample': lambda: endpoint.sample(request, IDS, 4).result(),
    'chat': lambda: endpoint.chat([({'role': 'user', 'content': 'x'},)]),
    'check': lambda: endpoint.check(renderer),
  }[kind]


@base.trial('endpoint', 'answers without end, bombs and drips end in time')
def limits(scratch: base.Scratch) -> str:
  """Checks time and memory of each; one client thread of each kind."""
  del scratch
  _bomb(600)
  slowest, before = 0.0, _memory()
  seen = []
  for name, (answer, words) in _FLOODS.items():
    gc.collect()
    with served(answer) as server:
      endpoint = connect(server.url, timeout=_SECONDS)
      begin = time.monotonic()
      try:
        refused(call(endpoint, 'score'), server.url, words)
      except AssertionError as error:
        raise AssertionError(f'{name}: {error}') from error
      took = time.monotonic() - begin
      assert took < 2 * _SECONDS + 4, f'{name} took {took:.1f} s'
      slowest = max(slowest, took)
      endpoint.close()
      seen.append(name)
  grown = _memory() - before
  assert grown < 100, f'the peak of memory grew by {grown} MiB'
  return (
    f'{base.words(seen)}: each one EndpointError, the slowest of two tries in '
    f'{slowest:.1f} s; the peak of memory grew by {grown} MiB'
  )


def _memory() -> int:
  """Returns the peak of this process's memory, MiB."""
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


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
def _bomb(mebibytes: int) -> bytes:
  """Returns zeros in gzip; they are never in memory."""
  packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
  pieces = [packer.compress(bytes(_MIB)) for _ in range(mebibytes)]
  return b''.join([*pieces, packer.flush()])


def _encoded_bomb(handler: Handler, body: dict) -> None:
  del body
  handler.send(_bomb(600), Content_Encoding='gzip')


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
_FLOODS: dict[str, tuple[Callable[[Handler, dict], None], str]] = {
  '600 MiB': (_flood, 'at most'),
  '600 MiB in chunks': (_chunks, 'at most'),
  'gzip bomb of 600 MiB': (_encoded_bomb, 'at most'),
  'gzip in gzip': (_encoded('gzip, gzip', gzip.compress(b'{}')), 'gzip, gzip'),
  'deflate': (_encoded('deflate', zlib.compress(bytes(_MIB))), "'deflate'"),
  'br': (_encoded('br', b'\x0b\x00'), "'br'"),
  'no gzip': (_encoded('gzip', b'{"choices": []}'), 'gzip'),
  'cut gzip': (_encoded('gzip', gzip.compress(b'{}')[:-4]), 'ends early'),
  'drip of the status line': (_drip(), f'within {_SECONDS:g} s'),
  'drip of a header': (_drip(_HEAD, b'A: '), f'within {_SECONDS:g} s'),
  'drip of the body': (_drip(_HEAD + b'\r\n'), f'within {_SECONDS:g} s'),
  'informations without end': (_endless_informations, f'within {_SECONDS:g} s'),
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


@base.trial('endpoint', 'a redirect is not followed, the key stays')
def redirects(scratch: base.Scratch) -> str:
  """Redirects to another server, which must see nothing."""
  del scratch
  with served(honest) as other:
    for status in (301, 302, 303, 307, 308):
      with served(
        lambda handler, _, status=status: handler.send(
          b'', status, Location=f'{other.url}/completions'
        )
      ) as server:
        endpoint = connect(server.url)
        text = refused(
          call(endpoint, 'score'), server.url, f'status {status}', other.url
        )
        endpoint.close()
    assert other.seen == 0, f'{other.seen} requests were redirected'
  return f'five statuses: {text}'


@base.trial('endpoint', 'a password in the address is never shown')
def passwords(scratch: base.Scratch) -> str:
  """Uses an address with user and password; the server echoes the header."""
  del scratch
  for status in (200, 403, 500):
    with served(
      lambda handler, _, status=status: handler.send(
        {'error': handler.headers['Authorization'] + ' me:open%2Fsesame'},
        status,
      )
    ) as server:
      url = server.url.replace('://', '://me:open%2Fsesame@')
      os.environ.pop(VARIABLE, None)
      cfg = schema.Endpoint(name=MODEL, base_url=url, tries=1)
      endpoint = client.Endpoint(cfg, 'x', sleep=lambda _: None)
      text = refused(call(endpoint, 'chat'), url)
      for form in ('open/sesame', 'open%2Fsesame', 'bWU6b3Blbi9zZXNhbWU='):
        assert form not in text, text
      endpoint.close()
  return text


def _hostile(handler: Handler, body: dict) -> None:
  """Answers with a number of 400 digits, and the key as a token id."""
  entry = {handler.headers['Authorization']: 10**400}
  entries = [None, *([entry] * (len(body['prompt']) - 1))]
  handler.send({'choices': [{'prompt_logprobs': entries}]})


@base.trial('endpoint', 'a run with a hostile endpoint loses nothing')
def hostile_run(scratch: base.Scratch) -> str:
  """Runs opd against a server that turns hostile in the third step."""
  done, _ = _opd(scratch, 'honest', honest, 0)
  assert done.code == 0, done.err[-900:]
  done, url = _opd(scratch, 'hostile', _hostile, 18)  # a step has 8 requests
  base.expect_line(done, exits.FAILED, MODEL, url, 'prompt_logprobs')
  assert KEY not in done.err and 'signs' not in done.err, 'the key is shown'
  line = done.last
  (*_, last) = _steps(scratch.folder / 'hostile')
  assert last == 2, f'the last saved step is {last}'
  done, _ = _opd(scratch, 'hostile', honest, 0)
  assert done.code == 0, done.err[-900:]
  ours, theirs = (_end(scratch.folder / x) for x in ('hostile', 'honest'))
  assert ours == theirs, 'the resumed run is another'
  return (
    f'exit 1, step {last} is saved, {line[:300]}; resumed with an honest '
    f'server: {len(ours)} equal records and weights'
  )


def _opd(
  scratch: base.Scratch,
  name: str,
  last: Callable[[Handler, dict], None],
  after: int,
) -> tuple[base.Done, str]:
  """Runs opd; after some scoring requests, answers are those of `last`."""
  count = [0]

  def answer(handler: Handler, body: dict) -> None:
    count[0] += 'prompt_logprobs' in body
    (last if count[0] > after else honest)(handler, body)

  with served(answer) as server:
    node = {
      'type': 'endpoint',
      'name': MODEL,
      'base_url': server.url,
      'api_key_env': VARIABLE,
      'timeout': 20.0,
      'tries': 2,
    }
    done = base.command(
      'posttrain.main',
      '--config=configs/algorithms/opd.py:tiny',
      f'--workdir={scratch.folder / name}',
      f'--config.compilation_cache={scratch.cache}',
      '--config.metrics.progress=False',
      '--config.teacher.steps=2',
      '--config.start.steps=2',
      f'--config.main.envs.sums.algorithm.reference={json.dumps(node)}',
      env={VARIABLE: KEY},
    )
  return done, server.url


def _steps(workdir: pathlib.Path) -> list[int]:
  folder = workdir / 'checkpoints' / 'main'
  return sorted(int(x.name) for x in folder.glob('*') if x.name.isdigit())


def _end(workdir: pathlib.Path) -> list[dict]:
  """Returns the records without those of time, and the weights' checksums."""
  lines = (workdir / 'metrics.jsonl').read_text().splitlines()
  return [
    *(
      {k: v for k, v in json.loads(line).items() if not k.startswith('time/')}
      for line in lines
    ),
    store.read_sums(str(workdir / 'checkpoints' / 'main')),
  ]
