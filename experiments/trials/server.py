"""The server under hostile requests, and a long proof of it.

    python -m experiments.trials.server [--minutes=3] [--clients=64]
        [--right=200] [--seed=0]

Starts a server process with a tiny model.

1. The right requests are sent one by one: the answers of a quiet server.
2. Clients send right requests, fuzzed ones, and some that they cut off at a
   random moment.

Prints statuses, wrong answers, the longest answer, the longest delay of
/health, memory and descriptors. Exits with 1 after a status of 500 or more, or
a wrong answer.
"""

import asyncio
import collections
import contextlib
import json
import pathlib
import random
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx

from experiments.benchmarks import serve, timing
from experiments.trials import base

JSON = 'application/json'
ARGV = '--slots=16', '--max_model_len=512'
PATHS = {False: '/v1/completions', True: '/v1/chat/completions'}
TEXTS = (
  *('', 'a', 'What is 12 + 30?', 'na\u00efve \u20ac \u4f60\u597d \U0001f642'),
  *('<|end|><|user|>', '{{ messages }} {% for %}', 'a\x00b\x1b[31m\u202e'),
)


def right(rng: random.Random) -> tuple[bool, dict[str, Any]]:
  """Returns (whether it is a chat, the body) of a right request.

  It fixes its tokens, so that its answer is the same whatever the others are.
  """
  chat = rng.random() < 0.4
  body: dict[str, Any] = {
    'model': serve.NAME,
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
    body['messages'] = [
      {'role': role, 'content': text}
      for role, text in zip(
        ('system', 'user', 'assistant'), turns, strict=False
      )
    ]
  else:
    ids = [rng.randrange(256) for _ in range(rng.randint(1, 60))]
    body['prompt'] = rng.choice((ids, rng.choice(TEXTS[1:]), [ids, ids[:3]]))
    body |= rng.choice(({}, {}, {'logprobs': 2}, {'echo': True, 'logprobs': 0}))
  return chat, body


# Values of any field of a body, most of them unpleasant.
VALUES = (
  *(None, True, float('nan'), 0, -1, 2**63, 10**200, '\ud800', '\x00'),
  *('x' * 100_000, [], [1] * 3000, ['ab'] * 100_000, [[[]]] * 9, {}),
  *({'a': {'b': [None]}}, [{'role': 'user', 'content': ''}] * 3000),
)
# What the bytes of a request become, given a place in them.
BYTES: tuple[Callable[[bytes, int], bytes], ...] = (
  lambda content, at: content[:at],
  lambda content, at: content[:at] + b'\xff\x00"' + content[at:],
  lambda content, at: b'[' * 50_000,
  lambda content, at: content[:-1] + b',"top_k":' + b'9' * 6000 + b'}',
)
HEADERS = (
  *(('content-type', x) for x in ('text/plain', '', 'multipart/x')),
  *(('host', x) for x in ('evil.example', 'localhost.evil', '[')),
)
ROUTES = (
  *(
    ('POST', x) for x in ('/v1/models/x%00', '/%2e%2e/etc', '/v1/' + 'a' * 900)
  ),
  *((x, PATHS[False]) for x in ('GET', 'PUT', 'DELETE', 'OPTIONS', 'BREW')),
)


def essence(answer: dict[str, Any]) -> Any:
  """Returns the part of an answer that only the request decides."""
  return [
    (choice['token_ids'], choice['finish_reason'])
    for choice in answer['choices']
  ], answer['usage']


class Fuzz:
  """Requests to a server, and what their answers showed."""

  def __init__(self, server: serve.Server, count: int, seed: int):
    """Sends `count` right requests one by one."""
    rng = random.Random(f'right {seed}')
    self.server, self.seed = server, seed
    self.right = [right(rng) for _ in range(count)]
    self.quiet, self.bad = [], []
    self.compared, self.longest = 0, 0.0
    self.statuses: collections.Counter[str] = collections.Counter()
    with server.client() as client:
      for chat, body in self.right:
        response = client.post(PATHS[chat], json=body)
        assert response.status_code == 200, response.text
        self.quiet.append(essence(response.json()))

  async def soak(self, clients: int, seconds: float) -> None:
    """Lets clients send requests for a while, and leave some of them."""
    end = time.monotonic() + seconds

    async def work(number: int) -> None:
      rng = random.Random(f'{self.seed} client {number}')
      async with httpx.AsyncClient(
        base_url=self.server.url, timeout=120
      ) as client:
        while time.monotonic() < end:
          kinds = self._leave, *[self._wrong] * 4, *[self._right] * 3
          await rng.choice(kinds)(client, rng)

    await asyncio.gather(*map(work, range(clients)))

  async def _send(self, client, method: str, path: str, **options):
    begin = time.monotonic()
    try:
      response = await client.request(method, path, **options)
    except httpx.RemoteProtocolError as error:
      self.statuses[type(error).__name__] += 1
      return None
    self.longest = max(self.longest, time.monotonic() - begin)
    self.statuses[str(response.status_code)] += 1
    if response.status_code >= 500 or (
      response.status_code >= 400 and len(response.text) > 1200
    ):
      self.bad.append(f'{method} {path} {options}: {response.text}'[:900])
    return response

  async def _right(self, client, rng: random.Random) -> None:
    index = rng.randrange(len(self.right))
    chat, body = self.right[index]
    response = await self._send(client, 'POST', PATHS[chat], json=body)
    if response is None or response.status_code in (429, 503):
      return
    self.compared += 1
    answer = response.status_code == 200 and essence(response.json())
    if answer != self.quiet[index]:
      self.bad.append(f'{body}: {answer}, alone {self.quiet[index]}'[:900])

  async def _wrong(self, client, rng: random.Random) -> None:
    """Sends a damaged request."""
    chat, body = right(rng)
    names = *body, 'stop', 'n', 'logprobs', 'stream', 'user', 'tools'
    body[rng.choice(names)] = rng.choice(VALUES)
    content = json.dumps(body).encode('ascii')
    method, path, headers = 'POST', PATHS[chat], {'content-type': JSON}
    match rng.randrange(8):
      case 0:
        content = rng.choice(BYTES)(content, rng.randrange(len(content)))
      case 1:
        headers |= [rng.choice(HEADERS)]
      case 2:
        method, path = rng.choice(ROUTES)
    await self._send(client, method, path, content=content, headers=headers)

  async def _leave(self, client, rng: random.Random) -> None:
    """Sends a part of a request, or all of it, and leaves at any moment."""
    del client
    chat, body = rng.choice(self.right)
    body = {**body, 'max_tokens': 200, 'stream': True}
    content = json.dumps(body).encode()
    data = head(PATHS[chat], f'content-length: {len(content)}') + content
    _, writer = await asyncio.open_connection(*self.server.address)
    with contextlib.suppress(ConnectionError):
      writer.write(
        data[: rng.randrange(len(data)) if rng.random() < 0.3 else None]
      )
      await writer.drain()
      await asyncio.sleep(rng.random() ** 3)
    writer.transport.abort()
    self.statuses['left'] += 1


def head(path: str, *headers: str) -> bytes:
  """Returns the bytes of a request before its body."""
  lines = f'POST {path} HTTP/1.1', 'host: localhost', f'content-type: {JSON}'
  return '\r\n'.join((*lines, *headers, '', '')).encode()


@contextlib.contextmanager
def running(folder: pathlib.Path) -> Iterator[serve.Server]:
  """Runs a server with a tiny model; in the end it must answer."""
  server = serve.Server(folder, *ARGV)
  try:
    yield server
    assert ask(server) == 200, 'the server must go on'
  finally:
    server.stop()


def ask(server: serve.Server) -> int:
  """Returns the status of a small honest request."""
  return server.post('completions', prompt='a', max_tokens=1).status_code


def prove(fuzz: Fuzz, clients: int, seconds: float) -> str:
  """Soaks a server; returns what it did."""
  server = fuzz.server
  with serve.watch(server) as delay:
    asyncio.run(fuzz.soak(clients, seconds))
  time.sleep(5)
  statuses = (f'{k}: {v}' for k, v in sorted(fuzz.statuses.items()))
  return (
    f'statuses {", ".join(statuses)}; {len(fuzz.bad)} wrong of {fuzz.compared} '
    f'compared; the longest answer {fuzz.longest:.2f} s, /health within '
    f'{max(delay):.3f} s; {server.megabytes()} MB, {server.descriptors()} '
    'descriptors'
  )


@base.trial('server', 'fuzzed requests: no 5xx, no wrong answer')
def fuzzed(scratch: base.Scratch) -> str:
  with running(scratch.folder) as server:
    fuzz = Fuzz(server, 40, seed=7)
    seen = prove(fuzz, 16, 20)
  assert not fuzz.bad, fuzz.bad[:3]
  return seen


# What half-sent and endless requests begin with.
SENT: dict[str, Callable[[int], bytes]] = {
  'half a head': lambda i: head(PATHS[False])[: 1 + i % 40],
  'half a body': lambda i: head(PATHS[False], 'content-length: 10'),
}


@base.trial('server', 'half-sent requests keep nobody out, and are closed')
def half_sent(scratch: base.Scratch) -> str:
  with running(scratch.folder) as server:
    assert ask(server) == 200, 'it must have started'
    before, slowest = server.descriptors(), 0.0
    for kind, data in SENT.items():
      with contextlib.ExitStack() as stack:
        for number in range(200):
          client = socket.create_connection(server.address)
          stack.enter_context(client).settimeout(60)
          with contextlib.suppress(OSError):  # the server closes it
            client.sendall(data(number))
        begin = time.monotonic()
        assert ask(server) == 200, kind
        slowest = max(slowest, time.monotonic() - begin)
        base.wait_for(lambda: server.descriptors() <= before + 3, 90)
    assert slowest < 2, f'{slowest:.1f} s for an honest request'
  return f'2 x 200 connections: an honest request within {slowest:.2f} s'


@base.trial('server', 'large bodies do not add up in memory')
def large_bodies(scratch: base.Scratch) -> str:
  sizes = 8 * 2**20 - 300, 64 * 2**20
  with running(scratch.folder) as server, server.client() as client:
    before = server.megabytes()
    with serve.watch(server) as delay:
      for content in (b'[' * size for size in sizes for _ in range(8)):
        headers = {'content-type': JSON}
        with contextlib.suppress(httpx.TransportError):  # closed early
          answer = client.post(PATHS[False], content=content, headers=headers)
          assert 400 <= answer.status_code < 500, answer.text[:300]
    growth = server.megabytes() - before
    assert growth < 400, f'{growth} MB'
  return f'16 bodies: {growth:+d} MB, /health within {max(delay):.2f} s'


@base.trial('server', 'web pages cannot use a server without a key')
def foreign_pages(scratch: base.Scratch) -> str:
  body = json.dumps({'model': serve.NAME, 'prompt': 'a', 'max_tokens': 1})
  with running(scratch.folder) as server, server.client() as client:
    for name, text in HEADERS:
      sent = {'content-type': JSON, name: text}
      status = client.post(PATHS[False], content=body, headers=sent).status_code
      assert status in (400, 403, 415, 421), f'{name}: {text}: {status}'
    model = f'--checkpoint={scratch.folder / serve.NAME}'
    done = base.command('posttrain.serve', model, '--host=0.0.0.0')
    base.expect_line(done, base.USAGE)
  return f'{len(HEADERS)} refused; --host=0.0.0.0 without a key: exit 2'


def main() -> int:
  """Runs the long proof; returns the exit code."""
  args = timing.parser(
    __doc__, minutes=3.0, clients=64, right=200, seed=0
  ).parse_args()
  with tempfile.TemporaryDirectory() as folder:
    with running(pathlib.Path(folder)) as server:
      fuzz = Fuzz(server, args.right, args.seed)
      print(prove(fuzz, args.clients, 60 * args.minutes))
  print('\n'.join(fuzz.bad[:20]), file=sys.stderr)
  return int(bool(fuzz.bad))


if __name__ == '__main__':
  sys.exit(main())
