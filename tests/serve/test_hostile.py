"""Large requests and responses, unpleasant fields, clients that leave."""

import asyncio
import json
import socket
import threading
import time

import httpx
import pytest

from posttrain.serve import app, bodies, fields, output, pool, protocol
from tests.serve import conftest

BODY = {'model': conftest.NAME, 'prompt': 'ab', 'max_tokens': 2}
JSON = {'Content-Type': 'application/json'}


@pytest.mark.parametrize(
  ('path', 'change', 'pattern'),
  [
    ('completions', {'stop': ['a' * 4097]}, 'stop must have at most 4096'),
    ('completions', {'prompt': 'x' * 3073}, '96 tokens: got 3073 characters'),
    ('completions', {'prompt': ['x' * 3073]}, 'got 3073 characters'),
    ('completions', {'prompt': [1] * 3073}, 'got 3073 entries'),
    (
      'completions',
      {'prompt': [[1] * 60] * 60, 'prompt_logprobs': 20, 'max_tokens': 0},
      'n must request at most 72 sequences',
    ),
    (
      'chat/completions',
      {'messages': [{'role': 'user', 'content': ''}] * 97},
      'got 97 messages',
    ),
    (
      'chat/completions',
      {'messages': [{'role': 'user', 'content': 'x' * 5000}]},
      'characters or more',
    ),
    (
      'chat/completions',
      {'messages': [{'role': 'user', 'content': '', 'x': [[''] * 5000]}]},
      'characters or more',
    ),
  ],
)
def test_requests_that_cannot_fit_are_refused_before_rendering(
  served, policy, monkeypatch, path, change, pattern
):
  def never(*_, **__):
    raise AssertionError('must not be rendered')

  monkeypatch.setattr(type(policy.renderer), 'render', never)
  monkeypatch.setattr(type(policy.renderer.tokenizer), 'encode_scaffold', never)
  body = {'model': conftest.NAME, 'max_tokens': 2, **change}
  if path == 'completions':
    body = {'prompt': [1], **body}
  response = served.client.post(f'/v1/{path}', json=body)
  assert response.status_code == 400 and pattern in response.text, response.text


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


def test_responses_with_too_many_copies_of_prompts_are_refused(
  post, monkeypatch
):
  monkeypatch.setattr(protocol, 'MAX_ECHOED', 100)
  body = {'prompt': ['ab' * 10] * 2, 'max_tokens': 1, 'echo': True}
  assert post(**body, n=2)['choices']  # 80
  error = post(status=400, **body, n=3)['error']
  assert error['param'] == 'echo' and 'got 120' in error['message']
  body = {'prompt': [[1] * 9] * 2, 'max_tokens': 1, 'return_token_ids': True}
  assert post(**body, n=5)['choices']  # 90
  error = post(status=400, **body, n=6)['error']
  assert error['param'] == 'return_token_ids' and 'got 108' in error['message']
  chat = {'messages': [{'role': 'user', 'content': 'a' * 40}], 'max_tokens': 1}
  chat |= {'return_token_ids': True, 'n': 4}
  post('chat/completions', **chat)  # one copy
  post('chat/completions', status=400, **chat, stream=True)


@pytest.mark.parametrize(
  'change',
  [{'echo': True}, {'return_token_ids': True}, {'echo': True, 'logprobs': 0}],
)
def test_large_responses_are_not_written_in_the_event_loop(
  post, monkeypatch, change
):
  threads, write = [], output.Writer.whole

  def recorded(self, *args):
    threads.append(threading.current_thread().name)
    return write(self, *args)

  monkeypatch.setattr(output.Writer, 'whole', recorded)
  monkeypatch.setattr(app, '_INLINE', 2000)
  body = {'prompt': 'a' * 90, 'max_tokens': 1}
  post(**body)
  post(**body, n=8, **change)
  assert threads[0] != 'posttrain-request' == threads[1]


def test_a_stream_of_ready_chunks_lets_others_run():
  class Call:
    async def chunks(self):
      for index in range(5):
        yield {'index': index}

  async def main():
    order = []

    async def other():
      for _ in range(5):
        order.append('other')
        await asyncio.sleep(0)

    task = asyncio.ensure_future(other())
    async for _ in app._events(Call()):
      order.append('chunk')
    await task
    return order

  assert asyncio.run(main())[:4] == ['chunk', 'other', 'chunk', 'other']


@pytest.mark.parametrize(
  'value',
  [
    'data:image/png;base64,' + 'QUJD' * 9999,
    ['QUJD' * 9999] * 3,
    {'QUJD' * 9999: ['QUJD' * 9999]},
    '\ud800' * 9000,
    '\x1b[31m\n' * 2000,
    10**900,
  ],
  ids=['text', 'list', 'object', 'surrogates', 'escapes', 'digits'],
)
def test_refusals_are_one_short_printable_line(served, value):
  for path, body in (
    ('completions', {**BODY, 'max_tokens': value}),
    ('completions', {**BODY, 'model': value}),
    ('completions', {**BODY, str(value): 1}),
    ('completions', {**BODY, 'prompt': value}),
    (
      'chat/completions',
      {'model': 'tiny', 'messages': [{'role': value, 'content': 'a'}]},
    ),
    (
      'chat/completions',
      {'model': 'tiny', 'messages': [{'role': 'user', 'content': [value]}]},
    ),
  ):
    content = json.dumps(body)
    if len(content) > 2**16:
      continue
    response = served.client.post(f'/v1/{path}', content=content, headers=JSON)
    assert response.status_code in (400, 404), response.text
    assert len(response.text) < 1000
    assert response.json()['error']['message'].isprintable()


def test_bodies_of_too_many_values_are_refused_unparsed(monkeypatch):
  monkeypatch.setattr(fields, 'MAX_VALUES', 10)
  assert fields.parse(b'{"a":[1,2,3]}') == {'a': [1, 2, 3]}
  for rest in (b'1,' * 20, b'[[[{}]]],' * 3, b'[' * 20, b'{"a":' * 5):
    with pytest.raises(fields.Refused, match='at most 10 commas') as error:
      fields.parse(b'{"a":[' + rest)
    assert error.value.status == 413


@pytest.mark.parametrize(
  ('content', 'problem'),
  [
    (b'{"n":1,"n":2}', 'twice'),
    (b'{"a":' * 200, 'nested deeper'),
    (b'{"a":' + b'9' * 2000 + b'}', '2000 digits'),
    (b'\xff', 'no UTF-8'),
  ],
)
def test_unpleasant_json_is_refused_in_one_line(served, content, problem):
  response = served.client.post(
    '/v1/completions', content=content, headers=JSON
  )
  assert response.status_code == 400
  message = response.json()['error']['message']
  assert message.startswith('the body must be JSON') and problem in message


def test_large_bodies_wait_for_each_other(served, monkeypatch):
  """Bodies above the small size still pass, parsed one at a time."""
  monkeypatch.setattr(bodies, 'SMALL', 100)
  body = {**BODY, 'user': 'x' * 5000, 'temperature': 0}
  responses = [
    served.client.post('/v1/completions', json=body) for _ in range(3)
  ]
  texts = {response.json()['choices'][0]['text'] for response in responses}
  assert len(texts) == 1


def test_a_model_is_described_by_its_name(served):
  client = served.client
  (listed,) = client.get('/v1/models').json()['data']
  assert client.get('/v1/models/tiny').json() == listed
  for name in ('other', 'a/b', 'x' * 3000):
    response = client.get(f'/v1/models/{name}')
    assert response.status_code == 404
    assert response.json()['error']['code'] == 'model_not_found'
    assert len(response.text) < 500


def test_developer_messages_are_those_of_the_system(post):
  prompts = [
    post(
      'chat/completions',
      messages=[
        {'role': role, 'content': 'Be brief.'},
        {'role': 'user', 'content': 'hi'},
      ],
      max_tokens=1,
      return_token_ids=True,
    )['prompt_token_ids']
    for role in ('developer', 'system')
  ]
  assert prompts[0] == prompts[1]


def test_chats_have_up_to_20_alternatives_in_order(post):
  (choice,) = post(
    'chat/completions',
    messages=[{'role': 'user', 'content': 'hi'}],
    max_tokens=3,
    logprobs=True,
    top_logprobs=20,
  )['choices']
  for entry in choice['logprobs']['content']:
    tops = [x['logprob'] for x in entry['top_logprobs']]
    assert len(tops) == 20 and tops == sorted(tops, reverse=True)


def test_reading_a_chat_is_told_that_its_client_has_left(served, monkeypatch):
  told, reads = threading.Event(), threading.Event()

  def read(content, policy, *, chat, cancelled):
    reads.set()
    while not cancelled():
      time.sleep(0.01)
    told.set()
    raise fields.Refused(400, 'nobody reads this')

  monkeypatch.setattr(protocol, 'read', read)
  content = json.dumps({'messages': []}).encode()
  url = httpx.URL(served.url)
  with socket.create_connection((url.host, url.port)) as client:
    client.sendall(
      b'POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n'
      b'Content-Type: application/json\r\n'
      b'Content-Length: %d\r\n\r\n%s' % (len(content), content)
    )
    assert reads.wait(10)
    assert not told.is_set()
  assert told.wait(10)


def test_a_chat_has_its_place_by_its_messages(served, monkeypatch):
  sizes, run = [], pool.Pool.run

  def recorded(self, size, function):
    sizes.append(size)
    return run(self, size, function)

  monkeypatch.setattr(pool.Pool, 'run', recorded)
  message = {'role': 'user', 'content': ''}
  for count in (1, 90):
    served.client.post(
      '/v1/chat/completions',
      json={'model': conftest.NAME, 'messages': [message] * count},
    )
  assert sizes[1] - sizes[0] > 89 * 500
