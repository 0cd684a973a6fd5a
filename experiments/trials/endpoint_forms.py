"""Answers of endpoints that are JSON of the wrong form."""

import json
import time
from collections.abc import Iterator

from experiments.trials import base
from experiments.trials import endpoint as endpoints
from experiments.trials import endpoint_servers as servers


@base.trial('endpoint', 'an answer of the wrong form is one EndpointError')
def malformed_answers(scratch: base.Scratch) -> str:
  """Sends about 200 hostile JSON bodies to each kind of request."""
  del scratch
  current: list[bytes] = [b'']
  with servers.served(lambda handler, _: handler.send(current[0])) as server:
    seconds = [0.0]
    count = 0
    for kind, bodies in (
      ('score', _scores()),
      ('sample', _samples()),
      ('chat', _chats()),
      ('check', _models()),
    ):
      endpoint = endpoints.connect(server.url, vocab_size=300)
      call = endpoints.call(endpoint, kind)
      for body in (*bodies, *_any_kind()):
        current[0] = body
        begin = time.monotonic()
        try:
          endpoints.refused(call, server.url)
        except AssertionError as error:
          raise AssertionError(f'{kind} {body[:300]!r}: {error}') from error
        seconds.append(time.monotonic() - begin)
        count += 1
      endpoint.close()
  return (
    f'{count} bodies, each one EndpointError of one line; the slowest took '
    f'{max(seconds):.2f} s'
  )


def _any_kind() -> list[bytes]:
  deep = b'[' * 100_000
  digits = b'9' * 400
  return [
    b'',
    b'null',
    b'[]',
    b'"x"',
    b'{',
    b'\xff\xfe{}',
    b'<html>' + endpoints.KEY.encode(),
    deep,
    b'{"a":' * 5000 + b'1' + b'}' * 5000,
    b'{"choices": ' + deep,
    b'{"choices": [], "choices": []}',
    b'{"data": {}, "choices": {}}',
    b'{"data": 3, "choices": ' + digits + b'}',
    b'{"data": "x", "choices": ' + b'9' * 100_000 + b'}',
    b'{"data": [3], "choices": [3]}',
    b'{"data": [[]], "choices": [null]}',
    b'{"data": [{"id": []}], "choices": [{}, {}]}',
    b'{"data": [{}], "choices": "' + b'A' * 300_000 + b'"}',
    b'{"data": [null], "error": "'
    + endpoints.KEY.replace('"', '\\"').encode()
    + b'"}',
  ]


def _scores() -> Iterator[bytes]:
  good = [None, *({str(i): {'logprob': -1.0}} for i in endpoints.IDS[1:])]
  for value in _bad_numbers():
    entries = json.dumps([*good[:2], '#', *good[3:]]).replace(
      '"#"', f'{{"108": {{"logprob": {value}}}}}'
    )
    yield f'{{"choices": [{{"prompt_logprobs": {entries}}}]}}'.encode()
    echo = f'{{"token_logprobs": [null, -1, {value}, -1, -1]}}'
    yield f'{{"choices": [{{"logprobs": {echo}}}]}}'.encode()
  for entries in (
    good[:-1],
    [*good, good[-1]],
    'abcde',
    3,
    {},
    [None] * 5,
    [[]] * 5,
    [{'108': None}] * 5,
    [{'1' * 400: -1}] * 5,
    ['A' * 100_000] * 5,
  ):
    yield json.dumps({'choices': [{'prompt_logprobs': entries}]}).encode()
  for extra in (
    {'usage': 3},
    {'usage': 'x'},
    {'usage': {'prompt_tokens': 10**400}},
    {'usage': {'prompt_tokens': [5]}},
    {'usage': {'prompt_tokens': -5}},
    {'usage': {'prompt_tokens': '5'}},
  ):
    choices = [{'prompt_logprobs': good}]
    yield json.dumps({'choices': choices, **extra}).encode()
  for shown in ('Hello', {}, [1e400] * 5, [[]], list(range(100_000))):
    choice = {'prompt_logprobs': good, 'prompt_token_ids': shown}
    yield json.dumps({'choices': [choice]}).encode()


def _bad_numbers() -> tuple[str, ...]:
  return (
    *('null', '"-1"', 'true', '[-1]', '{}', 'NaN', 'Infinity', '-Infinity'),
    *('0.5', '1', '9' * 400, '-' + '9' * 400, '-1e999', '-1e30', '-9999.0'),
  )


def _samples() -> Iterator[bytes]:
  for ids in (
    *('[1000000000000]', '[-1]', '[300]', '[1.5]', '[1.0]', '[true]'),
    *('["1"]', '[null]', '[[1]]', '{"0": 1}', '"12"', '3', 'null'),
    *(f'[{"9" * 400}]', '[2147483648]', '[1, 2, 3, 4, 5]', '[257, 1]'),
    f'[{", ".join(["1"] * 100_000)}]',
  ):
    yield (
      f'{{"choices": [{{"token_ids": {ids}, "finish_reason": "length"}}]}}'
    ).encode()
  for marks in (['token_id:' + '9' * 5000], ['token_id:٣'], ['x'], 3, None):
    choice = {'finish_reason': 'length', 'logprobs': {'tokens': marks}}
    yield json.dumps({'choices': [choice]}).encode()
  good = {'token_ids': [1, 2, 3, 4], 'finish_reason': 'length'}
  for value in _bad_numbers():
    logprobs = f'{{"token_logprobs": [-1, {value}, -1, -1]}}'
    yield (
      f'{{"choices": [{{"token_ids": [1, 2, 3, 4], "finish_reason": "length",'
      f' "logprobs": {logprobs}}}]}}'
    ).encode()
  for change in (
    {'logprobs': []},
    {'logprobs': 'abcd'},
    {'logprobs': 3},
    {'logprobs': {'token_logprobs': 'abcd'}},
    {'logprobs': {'token_logprobs': 4}},
    {'logprobs': {'token_logprobs': [-1.0] * 3}},
    {'logprobs': {'token_logprobs': [-1.0] * 100_000}},
    {'finish_reason': None},
    {'finish_reason': ['length']},
    {'finish_reason': 'A' * 100_000},
    {'finish_reason': 'stop', 'stop_reason': True},
    {'finish_reason': 'stop', 'stop_reason': 257.0},
    {'finish_reason': 'stop', 'stop_reason': [257]},
    {'finish_reason': 'stop', 'token_ids': [], 'stop_reason': '257'},
  ):
    yield json.dumps({'choices': [good | change]}).encode()


def _chats() -> Iterator[bytes]:
  for message in (
    None,
    'x',
    [],
    {'content': 3},
    {'content': True},
    {'content': ['yes']},
    {'content': [{'type': 'text', 'text': 'yes'}]},
    {'content': {'text': 'yes'}},
    {'content': 10**400},
    {'content': [{'image': 'A' * 1_000_000}]},
    {'content': None, 'tool_calls': [{'function': {'name': 'f'}}]},
  ):
    yield json.dumps({'choices': [{'message': message}]}).encode()


def _models() -> Iterator[bytes]:
  for data in (
    3,
    'x',
    {'id': servers.MODEL},
    [servers.MODEL],
    [{'id': 3}],
    [{'id': None}],
  ):
    yield json.dumps({'data': data}).encode()
