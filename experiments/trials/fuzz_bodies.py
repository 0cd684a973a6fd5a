"""Requests for the server: right ones, and wrong ones made from them.

A right request fixes its tokens (a seed, or temperature 0), so that its answer
is the same whatever the other requests are.
"""

import copy
import dataclasses
import json
import random
import string
from typing import Any

from experiments.benchmarks import served

JSON = {'content-type': 'application/json'}
PATHS = {False: '/v1/completions', True: '/v1/chat/completions'}
TEXTS = (
  '',
  'a',
  'What is 12 + 30?',
  'na\u00efve \u20ac \u4f60\u597d \U0001f642',
  '<|end|><|user|>',
  '{{ messages }} {% for %}',
  'a\x00b\x1b[31m\u202e',
  'word ' * 30,
)


@dataclasses.dataclass
class Request:
  """One HTTP request."""

  path: str
  content: bytes
  headers: dict[str, str]
  method: str = 'POST'
  kind: str = ''  # of the mutation


def right(rng: random.Random) -> tuple[bool, dict[str, Any]]:
  """Returns (whether it is a chat, the body) of a right request."""
  chat = rng.random() < 0.4
  body: dict[str, Any] = {
    'model': served.NAME,
    'max_tokens': rng.randint(1, 24),
    'return_token_ids': True,
    'seed': rng.randrange(2**31),
    'temperature': rng.choice((0, 0.7, 1.0, 1.5)),
    **rng.choice(({}, {'top_k': 5}, {'top_p': 0.8}, {'min_p': 0.05})),
    **rng.choice(({}, {'n': 3}, {'ignore_eos': True})),
    **rng.choice(({}, {}, {'stop': ['e', 'zz']}, {'stop_token_ids': [7, 9]})),
  }
  if chat:
    turns = [rng.choice(TEXTS) for _ in range(rng.randint(1, 3))]
    roles = [('system', 'user', 'assistant')[i % 3] for i in range(len(turns))]
    body['messages'] = [
      {'role': role, 'content': text}
      for role, text in zip(roles, turns, strict=True)
    ]
    if rng.random() < 0.2:
      body |= {'logprobs': True, 'top_logprobs': rng.choice((0, 3, 20))}
    return chat, body
  ids = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
  body['prompt'] = rng.choice((ids, rng.choice(TEXTS[1:]), [ids, ids[:3]]))
  if rng.random() < 0.3:
    body |= rng.choice(
      (
        {'logprobs': rng.choice((0, 2, 5))},
        {'echo': True, 'logprobs': 0},
        {'prompt_logprobs': rng.choice((0, 1, 20)), 'max_tokens': 2},
      )
    )
  return chat, body


def request(chat: bool, body: dict[str, Any], kind: str = '') -> Request:
  """Returns the HTTP request of a body."""
  content = json.dumps(body).encode('ascii')
  return Request(PATHS[chat], content, dict(JSON), kind=kind)


def value(rng: random.Random, depth: int = 0) -> Any:
  """Returns any JSON value, more often an unpleasant one."""
  pick = rng.randrange(12 if depth < 3 else 8)
  if pick == 0:
    return rng.choice((None, True, False, float('nan'), float('-inf')))
  if pick == 1:
    return rng.choice((0, -1, 1, 2**31, 2**63, -(2**63), 10**30, 10**200))
  if pick == 2:
    return rng.choice((0.0, -0.0, 1e-320, 1e308, 0.5, 2.0))
  if pick == 3:
    return ''.join(rng.choices(string.printable, k=rng.randint(0, 200)))
  if pick == 4:
    return rng.choice(('\ud800', '\x00', '\ufffd', 'a' * 5000, '\u202e' * 90))
  if pick < 8:
    return rng.choice(TEXTS)
  if pick < 10:
    size = rng.choice((0, 1, 2, 5, 300))
    return [value(rng, depth + 2) for _ in range(size)]
  return {
    str(value(rng, 9))[:40]: value(rng, depth + 1)
    for _ in range(rng.randint(0, 4))
  }


def _replace(rng, chat, body):
  name = rng.choice((*body, 'stop', 'n', 'logprobs', 'stream', 'user', 'tools'))
  body[name] = value(rng)


def _remove(rng, chat, body):
  del body[rng.choice(tuple(body))]


def _add(rng, chat, body):
  body[str(value(rng, 9))[:200]] = value(rng)


def _enlarge(rng, chat, body):
  size = rng.choice((100, 3000, 100_000))
  name = rng.choice(('prompt', 'messages', 'stop', 'stop_token_ids', 'user'))
  body[name] = rng.choice(
    (
      'x' * size,
      [1] * size,
      [[1]] * size,
      ['ab'] * size,
      [{'role': 'user', 'content': ''}] * size,
      [{'role': 'user', 'content': 'data:' + 'QUJD' * (size // 4)}],
      [{'role': 'user', 'content': [{'type': 'text', 'text': ''}] * size}],
      [{'role': 'user', 'content': [{'type': 'image_url', 'x': 'A' * size}]}],
    )
  )


def _message(rng, chat, body):
  messages = body.get('messages')
  if isinstance(messages, list) and messages:
    index = rng.randrange(len(messages))
    if isinstance(messages[index], dict):
      name = rng.choice(('role', 'content', 'name', 'tool_calls'))
      # A new one: a long list has the same message in all places.
      messages[index] = {**messages[index], name: value(rng)}


MUTATIONS = (_replace, _replace, _remove, _add, _enlarge, _message)


def _damage(rng: random.Random, wrong: Request) -> None:
  """Damages the bytes, the headers or the route of a request."""
  content = wrong.content
  place = rng.randrange(len(content) + 1)
  pick = rng.randrange(10)
  if pick == 0:
    wrong.content = content[:place]
  elif pick == 1:
    wrong.content = content[:place] + rng.randbytes(3) + content[place:]
  elif pick == 2:
    wrong.content = rng.choice((b'[' * 50_000, b'{"a":' * 2000, b'\xff\xfe'))
  elif pick == 3:
    wrong.content = content[:-1] + b',"n":1,"n":2}'
  elif pick == 4:
    wrong.content = content[:-1] + b',"top_k":' + b'9' * 6000 + b'}'
  elif pick == 5:
    wrong.headers['content-type'] = rng.choice(
      ('text/plain', '', 'application/x-www-form-urlencoded', 'multipart/x')
    )
  elif pick == 6:
    wrong.headers['host'] = rng.choice(('evil.example', 'localhost.evil', '['))
  elif pick == 7:
    wrong.headers['authorization'] = rng.choice(
      ('Bearer x', 'x' * 4000, '\xff')
    )
  elif pick == 8:
    wrong.path = rng.choice(
      (
        '/v1/models',
        '/v1/models/x%00',
        '/health',
        '/%2e%2e/etc',
        '/v1/' + 'a' * 900,
      )
    )
  else:
    wrong.method = rng.choice(
      ('GET', 'PUT', 'DELETE', 'HEAD', 'OPTIONS', 'BREW')
    )


def wrong(rng: random.Random) -> Request:
  """Returns a mutated request; by chance it may still be a right one."""
  chat, body = right(rng)
  body = copy.deepcopy(body)
  kinds = rng.sample(MUTATIONS, rng.choice((1, 1, 2)))
  for mutate in kinds:
    if body:
      mutate(rng, chat, body)
  kind = ' '.join(mutate.__name__ for mutate in kinds)
  mutated = request(chat, body, kind)
  if rng.random() < 0.3:
    _damage(rng, mutated)
    mutated.kind += ' _damage'
  return mutated
