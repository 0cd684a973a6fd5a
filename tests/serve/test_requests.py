"""Refused requests: the status, the field, one short line."""

import json
import threading
import time

import httpx
import pytest

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
    ('prompt', [None, '', [], [[1], []], ['a', ''], 7, [1, 264], [[-1]]]),
    ('prompt', [[1] * 97, 'x' * 3073, ['x' * 3073], [1] * 3073, [[1]] * 73]),
    ('prompt[0]', [[1, 'a'], [1, True]]),
    ('max_tokens', [95, 0, 2.5, '2', True]),
    ('temperature', [-1, 1e-30, 10**400, [1]]),
    ('top_p', [0, 1.5]),
    ('top_k', [-2]),
    ('min_p', [1]),
    ('n', [0, 129, 128]),
    ('seed', ['x', 2**63]),
    ('stop', [0, False, {}, '', ['a'] * 5, [''], 3, ['a' * 4097]]),
    ('stop_token_ids', [False, '', 0, [264], [*range(9)]]),
    ('logprobs', [6, True]),
    ('prompt_logprobs', [-1, 21]),
    ('echo', [1]),
    ('stream', ['yes']),
    ('stream_options', [{'include_usage': True}, 1]),
    ('best_of', [2]),
    ('presence_penalty', [0.5]),
    ('logit_bias', [{'1': 2}]),
    ('suffix', ['x']),
    ('temprature', [0, 1]),
    ('messages', [[USER]]),
    ('model', [None]),
  ],
)
def test_bad_completion_request_is_refused_with_its_field(
  served, param, values
):
  for value in values:
    body = {**BODY, param.partition('[')[0]: value}
    response = served.client.post('/v1/completions', json=body)
    assert response.status_code == 400, (value, response.text)
    assert response.json()['error']['param'] == param
    assert response.json()['error']['type'] == 'invalid_request_error'
    assert param.partition('[')[0] in message(response)


@pytest.mark.parametrize(
  ('change', 'param'),
  [
    ({'prompt': [1] * 96, 'max_tokens': None}, 'prompt'),
    ({'prompt': [[1]] * 40, 'prompt_logprobs': 0}, 'n'),
    ({'stream': True, 'logprobs': 2}, 'stream'),
    ({'stream': True, 'prompt_logprobs': 1}, 'stream'),
  ],
)
def test_fields_that_do_not_fit_each_other_are_refused(post, change, param):
  change = {**BODY, **change}
  assert post(status=400, **change)['error']['param'] == param


@pytest.mark.parametrize(
  ('change', 'param'),
  [
    ({'messages': None}, 'messages'),
    ({'messages': []}, 'messages'),
    ({'messages': ['hi']}, 'messages[0]'),
    ({'messages': [{'role': 'me', 'content': ''}]}, 'messages'),
    ({'messages': [{'role': 'user'}]}, 'messages'),
    (
      {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
      'messages[0].content',
    ),
    ({'messages': [{**USER, 'content': 'x' * 200}]}, 'messages'),
    ({'messages': [{**USER, 'content': 'x' * 9000}]}, 'messages'),
    ({'messages': [USER] * 97}, 'messages'),
    ({'messages': [{**USER, 'name': 'bob'}]}, 'messages[0].name'),
    ({'messages': [{**USER, 'foo': 1}]}, 'messages[0].foo'),
    (
      {
        'messages': [
          {**USER, 'content': [{'type': 'text', 'text': 'a', 'x': [1]}]}
        ]
      },
      'messages[0].content.x',
    ),
    ({'top_logprobs': 2}, 'top_logprobs'),
    ({'logprobs': 1}, 'logprobs'),
    ({'logprobs': True, 'top_logprobs': 21}, 'top_logprobs'),
    ({'stream': True, 'logprobs': True, 'top_logprobs': 1}, 'stream'),
    ({'max_completion_tokens': 3}, 'max_tokens'),
    ({'tools': [{'type': 'function'}]}, 'tools'),
    ({'response_format': {'type': 'json_object'}}, 'response_format'),
    ({'prompt': 'x'}, 'prompt'),
    ({'echo': True}, 'echo'),
  ],
)
def test_bad_chat_request_is_refused_with_its_field(served, change, param):
  response = served.client.post('/v1/chat/completions', json={**CHAT, **change})
  assert response.status_code == 400, response.text
  assert response.json()['error']['param'] == param and message(response)


def test_requests_that_cannot_fit_are_refused_before_rendering(
  post, policy, monkeypatch
):
  def never(*_, **__):
    raise AssertionError('must not be rendered')

  monkeypatch.setattr(type(policy.renderer), 'render', never)
  monkeypatch.setattr(type(policy.renderer.tokenizer), 'encode_scaffold', never)
  post(status=400, prompt=['x' * 3073])
  for messages in ([USER] * 97, [{**USER, 'x': [[''] * 5000]}]):
    post('chat/completions', status=400, messages=messages)


@pytest.mark.parametrize(
  'content',
  [
    b'',
    b'{',
    b'[1]',
    b'"x"',
    b'\xff\xfe',
    b'[' * 50_000,
    b'{"a": 1} x',
    b'{"n": ' + b'9' * 5000 + b'}',
  ],
)
def test_bodies_that_are_no_json_object_are_refused(served, content):
  response = served.client.post(
    '/v1/completions', content=content, headers=JSON
  )
  assert response.status_code == 400
  assert 'the body must be' in message(response)


@pytest.mark.parametrize(
  'value',
  [
    'data:image/png;base64,' + 'QUJD' * 9999,
    {'QUJD' * 9999: ['QUJD' * 99]},
    '\ud800' * 9000,
    '\x1b[31m\n' * 2000,
    10**900,
  ],
  ids=['text', 'object', 'surrogates', 'escapes', 'digits'],
)
def test_refusals_are_one_short_printable_line(served, value):
  for path, body in (
    ('completions', {**BODY, 'max_tokens': value}),
    ('completions', {**BODY, 'model': value}),
    ('completions', {**BODY, str(value): 1}),
    ('completions', {**BODY, 'prompt': value}),
    ('chat/completions', {**CHAT, 'messages': [{**USER, 'role': value}]}),
    ('chat/completions', {**CHAT, 'messages': [{**USER, 'content': [value]}]}),
  ):
    content = json.dumps(body)
    if len(content) <= 2**16:
      response = served.client.post(
        f'/v1/{path}', content=content, headers=JSON
      )
      assert response.status_code in (400, 404), response.text
      assert message(response)


def test_responses_with_too_many_logprobs_are_refused(post, monkeypatch):
  from posttrain.serve import protocol

  monkeypatch.setattr(protocol, 'MAX_LOGPROBS', 100)
  body = {'prompt': [[1] * 9] * 2, 'max_tokens': 1}
  assert post(**body, n=2, logprobs=4)['choices']  # 20
  assert post(**body, prompt_logprobs=4)['choices']  # 90
  error = post(status=400, **body, prompt_logprobs=5)['error']
  assert error['param'] == 'prompt_logprobs' and 'got 108' in error['message']
  error = post(status=400, **body, echo=True, logprobs=5)['error']
  assert error['param'] == 'logprobs' and 'got 120' in error['message']


def test_unknown_models_routes_and_methods_are_refused(served):
  client = served.client
  (listed,) = client.get('/v1/models').json()['data']
  assert client.get('/v1/models/tiny').json() == listed
  for response in (
    client.post('/v1/completions', json={**BODY, 'model': 'gpt-4'}),
    client.get('/v1/models/a/b'),
    client.get(f'/v1/models/{"x" * 3000}'),
  ):
    assert response.status_code == 404 and message(response)
    assert response.json()['error']['code'] == 'model_not_found'
  assert client.get('/v1/embeddings').status_code == 404
  for response in (
    client.get('/v1/completions'),
    client.post('/v1/models'),
    client.delete('/health'),
  ):
    assert response.status_code == 405 and message(response)


def test_fields_without_effect_are_accepted(post):
  body = {**BODY, 'temperature': 0}
  unused = {
    'user': 'me',
    'presence_penalty': 0,
    'frequency_penalty': 0.0,
    'logit_bias': {},
    'suffix': None,
    'best_of': None,
    'n': 1,
    'repetition_penalty': 1.0,
    'metadata': {'a': 'b'},
  }
  assert post(**body)['choices'] == post(**body, **unused)['choices']
  # Clients list all fields of a message.
  empty = {'refusal': None, 'tool_calls': [], 'annotations': [], 'name': ''}
  post('chat/completions', messages=[{**USER, **empty}], max_tokens=1)


def test_fields_that_the_template_reads_reach_it():
  from posttrain.serve import protocol

  tool = {'role': 'tool', 'content': 'hi', 'name': 'bob'}
  names = protocol._names('{{ message.name }}')
  assert protocol._message(tool, 'm', names) == tool
  with pytest.raises(protocol.Refused, match='m.name must be left out'):
    protocol._message(tool, 'm', protocol._names('{{ message.names }}'))


def test_large_bodies_are_refused(served):
  def pieces():  # sent without a length
    yield from [b' ' * 1000] * 70

  for content in (json.dumps({**BODY, 'user': 'x' * 2**16}), pieces()):
    response = served.client.post(
      '/v1/completions', content=content, headers=JSON
    )
    assert response.status_code == 413 and '65536 bytes' in message(response)


def test_full_server_responds_429_with_retry_after(start):
  with start(max_jobs=2) as server:
    gate, finished, step = threading.Event(), [], server.worker._engine.step
    server.worker._engine.step = lambda: gate.wait(60) and step()
    with httpx.Client(base_url=server.url, timeout=60) as other:
      thread = threading.Thread(
        target=lambda: finished.append(
          other.post('/v1/completions', json={**BODY, 'n': 2})
        )
      )
      thread.start()
      while server.client.get('/health').json()['under_way'] < 2:
        time.sleep(0.01)
      response = server.client.post('/v1/completions', json=BODY)
      assert response.status_code == 429 and message(response)
      assert int(response.headers['Retry-After']) > 0
      gate.set()
      thread.join()
    assert finished[0].status_code == 200
    assert server.client.post('/v1/completions', json=BODY).status_code == 200
