"""Endpoints that lie, flood, drip and echo: the client, and a whole run."""

import gc
import io
import json
import logging
import os
import pathlib
import resource
import time
import traceback
from collections.abc import Callable

import numpy as np

from experiments.trials import base
from experiments.trials import endpoint_servers as servers
from posttrain import schema
from posttrain.chat import renderer as chat
from posttrain.chat import tokenizers
from posttrain.checkpoints import reading
from posttrain.decode import requests
from posttrain.rollout.endpoint import client
from posttrain.util import exits

IDS = np.array([72, 101, 108, 108, 111], np.int32)
ONES = np.ones(len(IDS), np.float32)
KEY = 'trial-Key/with+signs="1234'
VARIABLE = 'POSTTRAIN_TRIAL_API_KEY'


def connect(url: str, timeout: float = 1.0, tries: int = 2, **options):
  """Returns a client that does not pause between tries."""
  os.environ[VARIABLE] = KEY
  cfg = schema.Endpoint(
    name=servers.MODEL,
    base_url=url,
    api_key_env=VARIABLE,
    timeout=timeout,
    tries=tries,
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
  for word in (servers.MODEL, url.partition('@')[2] or url, *words):
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
  servers.bomb(600)
  slowest, before = 0.0, _memory()
  seen = []
  for name, (answer, words) in servers.FLOODS.items():
    gc.collect()
    with servers.served(answer) as server:
      endpoint = connect(server.url, timeout=servers.SECONDS)
      begin = time.monotonic()
      try:
        refused(call(endpoint, 'score'), server.url, words)
      except AssertionError as error:
        raise AssertionError(f'{name}: {error}') from error
      took = time.monotonic() - begin
      assert took < 2 * servers.SECONDS + 4, f'{name} took {took:.1f} s'
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


@base.trial('endpoint', 'a redirect is not followed, the key stays')
def redirects(scratch: base.Scratch) -> str:
  """Redirects to another server, which must see nothing."""
  del scratch
  with servers.served(servers.honest) as other:
    for status in (301, 302, 303, 307, 308):
      with servers.served(
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
    with servers.served(
      lambda handler, _, status=status: handler.send(
        {'error': handler.headers['Authorization'] + ' me:open%2Fsesame'},
        status,
      )
    ) as server:
      url = server.url.replace('://', '://me:open%2Fsesame@')
      os.environ.pop(VARIABLE, None)
      cfg = schema.Endpoint(name=servers.MODEL, base_url=url, tries=1)
      endpoint = client.Endpoint(cfg, 'x', sleep=lambda _: None)
      text = refused(call(endpoint, 'chat'), url)
      for form in ('open/sesame', 'open%2Fsesame', 'bWU6b3Blbi9zZXNhbWU='):
        assert form not in text, text
      endpoint.close()
  return text


@base.trial('endpoint', 'a run with a hostile endpoint loses nothing')
def hostile_run(scratch: base.Scratch) -> str:
  """Runs opd against a server that turns hostile in the third step."""
  done, _ = _opd(scratch, 'honest', servers.honest, 0)
  assert done.code == 0, done.err[-900:]
  # A step has 8 requests.
  done, url = _opd(scratch, 'hostile', servers.hostile, 18)
  base.expect_line(done, exits.FAILED, servers.MODEL, url, 'prompt_logprobs')
  assert KEY not in done.err and 'signs' not in done.err, 'the key is shown'
  line = done.last
  (*_, last) = _steps(scratch.folder / 'hostile')
  assert last == 2, f'the last saved step is {last}'
  done, _ = _opd(scratch, 'hostile', servers.honest, 0)
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
  last: Callable[[servers.Handler, dict], None],
  after: int,
) -> tuple[base.Done, str]:
  """Runs opd; after some scoring requests, answers are those of `last`."""
  count = [0]

  def answer(handler: servers.Handler, body: dict) -> None:
    count[0] += 'prompt_logprobs' in body
    (last if count[0] > after else servers.honest)(handler, body)

  with servers.served(answer) as server:
    node = {
      'type': 'endpoint',
      'name': servers.MODEL,
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
    reading.read_sums(str(workdir / 'checkpoints' / 'main')),
  ]
