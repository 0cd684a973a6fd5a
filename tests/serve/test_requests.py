"""Refused requests: the status, the field, one short line."""

import json
import threading
from concurrent import futures

import httpx
import pytest

from experiments.trials import base
from tests.serve import conftest

BODY = {'model': conftest.NAME, 'prompt': 'ab', 'max_tokens': 2}
JSON = {'Content-Type': 'application/json'}
USER = {'role': 'user', 'content': 'hi'}
CHAT = {'model': conftest.NAME, 'max_tokens': 2, 'messages': [USER]}


def message(response):
  error = response.json()['error']
  assert error.keys() == {'message', 'type', 'param', 'code'}
  assert len(response.text) < 1000 and error['message'].isprintable()
  return error['message']


@pytest.mark.parametrize(
  ('param', 'values'),
  [
    ('prompt', ['', [1, 264], 'x' * 3073, [[1]] * 73]),
    ('prompt[0]', [[1, 'a']]),
    ('max_tokens', [95, 0]),
    ('temperature', [-1, 10**400]),
    ('n', [0, 129]),
    ('stop', [3, ['a'] * 65, ['a' * 4097]]),
    ('stop_token_ids', [[264]]),
    ('logprobs', [6]),
    ('best_of', [2]),
    ('temprature', [0]),
    ('messages', [['hi'], [{'role': 'me', 'content': ''}], [USER] * 97]),
    ('messages', [[{**USER, 'content': [{'type': 'image_url'}]}]]),
    ('messages', [[{**USER, 'tool_calls': {'name': 'f'}}]]),
    ('messages', [[{**USER, 'name': 'Ann'}], [{**USER, 'cache': True}]]),
    ('top_logprobs', [2]),
    ('tools', [[{'type': 'function'}]]),
  ],
)
def test_bad_request_is_refused_with_its_field(served, param, values):
  name = param.partition('[')[0]
  chat = name in ('messages', 'top_logprobs', 'tools')
  path, body = ('chat/completions', CHAT) if chat else ('completions', BODY)
  for value in values:
    response = served.client.post(f'/v1/{path}', json={**body, name: value})
    assert response.status_code == 400, (value, response.text)
    assert response.json()['error']['param'] == param and message(response)


@pytest.mark.parametrize('content', [b'{', b'[1]', b'\xff', b'[' * 50_000])
def test_bodies_that_are_no_json_object_are_refused(served, content):
  response = served.client.post(
    '/v1/completions', content=content, headers=JSON
  )
  assert response.status_code == 400
  assert 'the body must be' in message(response)


def test_unknown_models_routes_and_methods_are_refused(served):
  client = served.client
  response = client.post('/v1/completions', json={**BODY, 'model': 'gpt-4'})
  assert response.status_code == 404 and message(response)
  assert response.json()['error']['code'] == 'model_not_found'
  assert client.get('/v1/embeddings').status_code == 404
  assert client.get('/v1/completions').status_code == 405


def test_fields_without_effect_are_accepted(post):
  body = {**BODY, 'temperature': 0}
  unused = {'user': 'me', 'presence_penalty': 0, 'logit_bias': {}, 'n': 1}
  assert post(**body)['choices'] == post(**body, **unused)['choices']
  # Clients list all fields of a message.
  empty = {'refusal': None, 'tool_calls': []}
  post('chat/completions', messages=[USER | empty], max_tokens=1)


def test_large_bodies_are_refused(served):
  def pieces():  # sent without a length
    yield from [b' ' * 1000] * 70

  for content in (json.dumps({**BODY, 'user': 'x' * 2**16}), pieces()):
    response = served.client.post(
      '/v1/completions', content=content, headers=JSON
    )
    assert response.status_code == 413 and '65536 bytes' in message(response)


def test_full_server_responds_429_with_retry_after(start):
  with (
    start(max_jobs=2) as server,
    httpx.Client(base_url=server.url, timeout=60) as other,
    futures.ThreadPoolExecutor() as pool,
  ):
    gate, step = threading.Event(), server.worker._engine.step
    server.worker._engine.step = lambda: gate.wait(60) and step()
    first = pool.submit(other.post, '/v1/completions', json={**BODY, 'n': 2})
    base.wait_for(lambda: server.client.get('/health').json()['under_way'] > 1)
    response = server.client.post('/v1/completions', json=BODY)
    assert response.status_code == 429 and message(response)
    assert int(response.headers['Retry-After']) > 0
    gate.set()
    assert first.result().status_code == 200
    assert server.client.post('/v1/completions', json=BODY).status_code == 200
