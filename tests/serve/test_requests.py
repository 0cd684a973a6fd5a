"""Refused requests: the status, and the name of the field."""

import json
import threading
import time

import httpx
import pytest

from tests.serve import conftest

BODY = {'model': conftest.NAME, 'prompt': 'ab', 'max_tokens': 2}
JSON = {'Content-Type': 'application/json'}
CHAT = {
  'model': conftest.NAME,
  'max_tokens': 2,
  'messages': [{'role': 'user', 'content': 'hi'}],
}


def message(response):
  error = response.json()['error']
  assert error.keys() == {'message', 'type', 'param', 'code'}
  return error['message']


@pytest.mark.parametrize(
  ('change', 'param', 'pattern'),
  [
    ({'prompt': None}, 'prompt', 'must be a text, token ids'),
    ({'prompt': ''}, 'prompt', 'not be empty'),
    ({'prompt': []}, 'prompt', 'not be empty'),
    ({'prompt': [[1], []]}, 'prompt', r'prompt\[1\] must have a token'),
    ({'prompt': ['a', '']}, 'prompt', r'prompt\[1\] must have a token'),
    ({'prompt': 7}, 'prompt', 'must be a text'),
    ({'prompt': [1, 'a']}, 'prompt[0]', 'must be a text'),
    ({'prompt': [1, True]}, 'prompt[0]', 'must be a text'),
    ({'prompt': [1, 264]}, 'prompt', r'ids in \[0, 264\).*got 264'),
    ({'prompt': [[-1]]}, 'prompt', 'got -1'),
    ({'prompt': [1] * 97}, 'prompt', 'context of 96 tokens: got 97'),
    ({'prompt': [1] * 96, 'max_tokens': None}, 'prompt', 'be shorter than'),
    ({'max_tokens': 95}, 'max_tokens', 'got 95 after a prompt of 2'),
    ({'max_tokens': 0}, 'max_tokens', 'whole number in'),
    ({'max_tokens': 2.5}, 'max_tokens', 'whole number in'),
    ({'max_tokens': '2'}, 'max_tokens', "got '2'"),
    ({'max_tokens': True}, 'max_tokens', 'got True'),
    ({'temperature': -1}, 'temperature', 'must be 0'),
    ({'temperature': 1e-30}, 'temperature', 'must be 0'),
    ({'temperature': 10**400}, 'temperature', 'must be 0'),
    ({'temperature': [1]}, 'temperature', 'must be 0'),
    ({'top_p': 0}, 'top_p', r'in \(0, 1\]'),
    ({'top_p': 1.5}, 'top_p', r'in \(0, 1\]'),
    ({'top_k': -2}, 'top_k', 'whole number'),
    ({'min_p': 1}, 'min_p', r'in \[0, 1\)'),
    ({'n': 0}, 'n', r'in \[1, 128\]'),
    ({'n': 129}, 'n', r'in \[1, 128\]'),
    ({'n': 128}, 'n', 'at most 72 sequences'),
    ({'prompt': [[1]] * 40, 'prompt_logprobs': 0}, 'n', 'over 40 prompts'),
    ({'seed': 'x'}, 'seed', 'whole number'),
    ({'stop': 0}, 'stop', 'got 0'),
    ({'stop': False}, 'stop', 'got False'),
    ({'stop': {}}, 'stop', 'got {}'),
    ({'stop': ''}, 'stop', "got ''"),
    ({'stop_token_ids': False}, 'stop_token_ids', 'got False'),
    ({'stop_token_ids': ''}, 'stop_token_ids', "got ''"),
    ({'stop_token_ids': 0}, 'stop_token_ids', 'got 0'),
    ({'seed': 2**63}, 'seed', 'whole number'),
    ({'stop': ['a'] * 5}, 'stop', 'at most 4'),
    ({'stop': ['']}, 'stop', 'be a text'),
    ({'stop': 3}, 'stop', 'be a text'),
    ({'stop_token_ids': [264]}, 'stop_token_ids', r'ids in \[0, 264\)'),
    ({'stop_token_ids': [*range(9)]}, 'stop_token_ids', 'at most 8 ids'),
    ({'logprobs': 6}, 'logprobs', r'in \[0, 5\]'),
    ({'logprobs': True}, 'logprobs', 'whole number'),
    ({'prompt_logprobs': -1}, 'prompt_logprobs', r'in \[0, 20\]'),
    ({'echo': 1}, 'echo', 'true or false'),
    ({'stream': 'yes'}, 'stream', 'true or false'),
    ({'stream': True, 'logprobs': 2}, 'stream', 'be false where'),
    ({'stream': True, 'prompt_logprobs': 1}, 'stream', 'be false where'),
    (
      {'stream_options': {}, 'stream': True, 'logit_bias': {'1': 2}},
      'logit_bias',
      'does not support',
    ),
    ({'stream_options': {'include_usage': True}}, 'stream_options', 'left out'),
    ({'best_of': 2}, 'best_of', 'does not support'),
    ({'presence_penalty': 0.5}, 'presence_penalty', 'does not support'),
    ({'frequency_penalty': 1}, 'frequency_penalty', 'does not support'),
    ({'suffix': 'x'}, 'suffix', 'does not support'),
    ({'temprature': 1}, 'temprature', "did you mean 'temperature'"),
    ({'messages': CHAT['messages']}, 'messages', 'no such field'),
    ({'model': None}, 'model', "name of a model, 'tiny'"),
  ],
)
def test_bad_completion_request_is_refused_with_its_field(
  served, change, param, pattern
):
  response = served.client.post('/v1/completions', json={**BODY, **change})
  assert response.status_code == 400, response.text
  assert response.json()['error']['param'] == param
  assert response.json()['error']['type'] == 'invalid_request_error'
  with pytest.raises(AssertionError, match=pattern):
    raise AssertionError(message(response))
  assert param.partition('[')[0] in message(response)


@pytest.mark.parametrize(
  ('change', 'param', 'pattern'),
  [
    ({'messages': None}, 'messages', 'list of some messages'),
    ({'messages': []}, 'messages', 'list of some messages'),
    ({'messages': ['hi']}, 'messages[0]', 'be an object'),
    ({'messages': [{'role': 'me', 'content': ''}]}, 'messages', "got 'me'"),
    ({'messages': [{'role': 'user'}]}, 'messages', 'content must be a string'),
    (
      {'messages': [{'role': 'user', 'content': [{'type': 'image_url'}]}]},
      'messages[0].content',
      'parts of text',
    ),
    (
      {'messages': [{'role': 'user', 'content': 'x' * 200}]},
      'messages',
      'context of 96',
    ),
    ({'top_logprobs': 2}, 'top_logprobs', '0 where logprobs is false'),
    ({'logprobs': 1}, 'logprobs', 'true or false'),
    ({'logprobs': True, 'top_logprobs': 21}, 'top_logprobs', r'in \[0, 20\]'),
    (
      {'stream': True, 'logprobs': True, 'top_logprobs': 1},
      'stream',
      'be false where',
    ),
    ({'max_completion_tokens': 3}, 'max_tokens', 'agree with'),
    ({'tools': [{'type': 'function'}]}, 'tools', 'does not support'),
    (
      {'response_format': {'type': 'json_object'}},
      'response_format',
      'does not support',
    ),
    ({'prompt': 'x'}, 'prompt', 'no such field'),
    ({'echo': True}, 'echo', 'no such field'),
  ],
)
def test_bad_chat_request_is_refused_with_its_field(
  served, change, param, pattern
):
  response = served.client.post('/v1/chat/completions', json={**CHAT, **change})
  assert response.status_code == 400, response.text
  assert response.json()['error']['param'] == param
  with pytest.raises(AssertionError, match=pattern):
    raise AssertionError(message(response))


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


def test_unknown_models_routes_and_methods_are_refused(served):
  client = served.client
  response = client.post('/v1/completions', json={**BODY, 'model': 'gpt-4'})
  assert response.status_code == 404
  assert response.json()['error']['code'] == 'model_not_found'
  assert "got 'gpt-4', expected 'tiny'" in message(response)
  assert client.get('/v1/embeddings').status_code == 404
  assert 'path must be' in message(client.get('/v1/embeddings'))
  for response in (
    client.get('/v1/completions'),
    client.post('/v1/models'),
    client.delete('/health'),
  ):
    assert response.status_code == 405
    assert 'method must be' in message(response)


def test_fields_without_effect_are_accepted(post):
  responses = [
    post(**{k: v for k, v in BODY.items() if k != 'model'}, temperature=0, **x)
    for x in (
      {},
      {
        'user': 'me',
        'presence_penalty': 0,
        'frequency_penalty': 0.0,
        'logit_bias': {},
        'suffix': None,
        'best_of': None,
        'n': 1,
        'repetition_penalty': 1.0,
        'metadata': {'a': 'b'},
      },
    )
  ]
  assert responses[0]['choices'] == responses[1]['choices']


def test_large_bodies_are_refused(served):
  body = json.dumps({**BODY, 'user': 'x' * 2**16})
  response = served.client.post('/v1/completions', content=body, headers=JSON)
  assert response.status_code == 413 and '65536 bytes' in message(response)

  def pieces():  # sent without a length
    yield from [b' ' * 1000] * 70

  response = served.client.post(
    '/v1/completions', content=pieces(), headers=JSON
  )
  assert response.status_code == 413


def test_api_key_is_required_if_set(start):
  with start(api_key='secret') as server:
    for headers in (
      {},
      {'Authorization': 'Bearer wrong'},
      {'Authorization': 'secret'},
      {'Authorization': 'Basic secret'},
    ):
      for response in (
        server.client.get('/v1/models', headers=headers),
        server.client.post('/v1/completions', json=BODY, headers=headers),
        server.client.post('/v1/chat/completions', json=CHAT, headers=headers),
      ):
        assert response.status_code == 401
        assert 'Authorization' in message(response)
    good = {'Authorization': 'Bearer secret'}
    assert server.client.get('/v1/models', headers=good).status_code == 200
    assert server.client.get('/health').status_code == 200


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
      assert (
        response.status_code == 429
        and 'queue must not be full' in message(response)
      )
      assert int(response.headers['Retry-After']) > 0
      gate.set()
      thread.join()
    assert finished[0].status_code == 200
    assert server.client.post('/v1/completions', json=BODY).status_code == 200


@pytest.mark.parametrize(
  ('change', 'param'),
  [
    ({'name': 'bob'}, 'messages[0].name'),
    ({'foo': 1}, 'messages[0].foo'),
    ({'tool_call_id': 'x'}, 'messages[0].tool_call_id'),
    (
      {'content': [{'type': 'text', 'text': 'a', 'cache_control': {'x': 1}}]},
      'messages[0].content.cache_control',
    ),
  ],
)
def test_fields_of_messages_that_nothing_reads_are_refused(post, change, param):
  messages = [{'role': 'user', 'content': 'hi', **change}]
  path = 'chat/completions'
  error = post(path, status=400, messages=messages, max_tokens=1)['error']
  assert error['param'] == param and 'must be left out' in error['message']


def test_empty_fields_of_messages_are_those_of_clients_that_list_all(post):
  message = {'role': 'user', 'content': 'hi', 'refusal': None, 'tool_calls': []}
  message |= {'name': None, 'annotations': [], 'reasoning_content': ''}
  post('chat/completions', messages=[message], max_tokens=1)


def test_fields_that_the_template_reads_reach_it():
  from posttrain.serve import fields, texts

  message = {'role': 'tool', 'content': 'hi', 'name': 'bob'}
  names = texts._names('{{ message.name }}')
  assert texts._message(message, 'm', names) == message
  with pytest.raises(fields.Refused, match='m.name must be left out'):
    texts._message(message, 'm', texts._names('{{ message.names }}'))
