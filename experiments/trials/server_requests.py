"""Single requests to the server: foreign pages, the API, short refusals."""

import base64
import json

import httpx

from experiments import served
from experiments.trials import base, server
from experiments.trials.server import CHAT, COMPLETE, JSON

HOSTS = ('localhost', '127.0.0.1', '[::1]', 'LOCALHOST', '127.0.0.1:1')
FOREIGN_HOSTS = (
  'evil.example',
  'evil.example:8000',
  'localhost.evil.example',
  '127.0.0.1.evil.example',
  'x@localhost',
  'localhost.',
  '0.0.0.0',
  '[::1].evil',
  '192.168.0.1',
  '',
  '[',
  'a' * 9000,
)
FOREIGN_TYPES = (
  'text/plain',
  'application/x-www-form-urlencoded',
  'multipart/form-data',
  '',
  'application/jsonp',
  'text/plain; application/json',
  'text/json',
)
FIELDS = (
  'model',
  'prompt',
  'messages',
  'max_tokens',
  'temperature',
  'stop',
  'n',
  'seed',
  'stream',
  'stream_options',
  'stop_token_ids',
  'tools',
  'echo',
  'response_format',
  'logprobs',
  'logit_bias',
  'unknown',
)
DATA = 'data:image/png;base64,' + base64.b64encode(bytes(60_000)).decode()
HOSTILE = (
  DATA,
  [DATA],
  {'url': DATA},
  {DATA: 1},
  [[DATA] * 9],
  [{DATA: DATA}] * 9,
  10**900,
  -(10**900),
  '\x1b[31m\n' * 9000,
  '\u202e' * 9000,
  '\ud800' * 9000,
)


@base.trial('server', 'web pages cannot use a server without a key')
def foreign_pages(scratch: base.Scratch) -> str:
  running = server.running()
  content = json.dumps(served.body(prompt='a', max_tokens=1))
  cases = [(COMPLETE, {'host': host}, 200) for host in HOSTS]
  for path in (COMPLETE, '/v1/models', '/v1/models/bench', '/health'):
    cases += [(path, {'host': host}, 403) for host in FOREIGN_HOSTS]
  cases += [(COMPLETE, {'content-type': x}, 415) for x in FOREIGN_TYPES]
  kind = 'Application/JSON; charset=utf-8'
  cases.append((COMPLETE, {'content-type': kind}, 200))
  with running.client() as client:
    for path, headers, status in cases:
      method = 'POST' if path == COMPLETE else 'GET'
      own = {'host': 'localhost', **JSON, **headers}
      response = client.request(method, path, content=content, headers=own)
      assert response.status_code == status, (headers, response.text[:300])
    # A page may send a body without a type, and ask first.
    response = client.post(COMPLETE, content=content)
    server.refused(response, 415, 'Content-Type')
    preflight = client.options(COMPLETE, headers={'origin': 'http://x'})
    assert 'access-control-allow-origin' not in preflight.headers
  done = base.command(
    'posttrain.serve', '--checkpoint=x', '--host=0.0.0.0', '--port=0'
  )
  base.expect_line(done, 2, '--api_key_env must', '--no_auth')
  return (
    f'{len(cases)} requests: foreign Hosts 403, other content types 415; '
    '--host=0.0.0.0 without a key: exit 2'
  )


@base.trial('server', 'models, roles and top_logprobs as in the API reference')
def api(scratch: base.Scratch) -> str:
  running = server.running()
  with running.client() as client:
    listed = client.get('/v1/models').json()['data'][0]
    assert client.get('/v1/models/bench').json() == listed
    for name in ('gpt-4', 'a/b', '%00', 'x' * 3000, '..%2fhealth'):
      response = client.get(f'/v1/models/{name}')
      server.refused(response, 404, 'model must be')
  ids = []
  for role in ('developer', 'system'):
    response = server.ask(
      running,
      CHAT,
      messages=[
        {'role': role, 'content': 'Be brief.'},
        {'role': 'user', 'content': 'hi'},
      ],
      **{'temperature': 0, 'max_tokens': 4, 'return_token_ids': True},
      **{'logprobs': True, 'top_logprobs': 20},
    )
    assert response.status_code == 200, response.text
    (choice,) = response.json()['choices']
    for entry in choice['logprobs']['content']:
      tops = [x['logprob'] for x in entry['top_logprobs']]
      assert len(tops) == 20 and tops == sorted(tops, reverse=True)
    ids.append((response.json()['prompt_token_ids'], choice['token_ids']))
  assert ids[0] == ids[1], 'developer must be read as system'
  response = server.ask(
    running, CHAT, messages=[], logprobs=True, top_logprobs=21
  )
  server.refused(response, 400)
  return 'models/{id} 200 or 404; developer is system; 20 top_logprobs, sorted'


def _check_short(response: httpx.Response) -> int:
  """Returns the size of an answer, which is right or a short refusal."""
  if response.status_code != 200:
    status = 404 if response.status_code == 404 else 400
    message = server.refused(response, status)
    assert message.isprintable(), f'not printable: {message!r}'
  return len(response.text)


@base.trial('server', 'refusals are one short line, whatever they quote')
def short_refusals(scratch: base.Scratch) -> str:
  bodies = []
  for value in HOSTILE:
    for name in (*FIELDS, DATA):
      path = CHAT if name == 'messages' else COMPLETE
      fields = {'prompt': 'a', 'max_tokens': 1, name: value}
      bodies.append((path, served.body(**fields)))
    for name in ('role', 'content', 'name', 'tool_calls'):
      message = {'role': 'user', 'content': 'a', name: value}
      bodies.append((CHAT, served.body(messages=[message], max_tokens=1)))
    part = [{'type': 'image_url', 'image_url': value}]
    message = {'role': 'user', 'content': part}
    bodies.append((CHAT, served.body(messages=[message], max_tokens=1)))
  with server.running().client() as client:
    sizes = [
      _check_short(client.post(path, content=json.dumps(body), headers=JSON))
      for path, body in bodies
    ]
  return f'{len(sizes)} requests of 80 KB each: at most {max(sizes)} bytes'
