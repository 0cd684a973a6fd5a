"""A long proof of the server: fuzzed requests, and clients that leave.

    python -m experiments.trials.fuzz_serve [--requests=20000] [--minutes=3]
        [--clients=64] [--right=200] [--seed=0]

Starts a server process with a tiny model, a file of random weights.

1. The right requests are sent one by one: the answers of a quiet server.
2. Fuzzed requests, 16 at a time, one in five of them right.
3. The soak: clients send right requests, as streams or not, some of them cut
   off at a random moment, and fuzzed ones.

Prints a table: statuses, wrong answers, late ones, resident memory and open
descriptors before and after, the longest delay of /health. Exits with 1 after a
status of 500 or more, or a wrong answer.
"""

import argparse
import asyncio
import collections
import contextlib
import dataclasses
import json
import pathlib
import random
import sys
import tempfile
import time
from typing import Any

import httpx

from experiments.benchmarks import served
from experiments.trials import fuzz_bodies

AT_ONCE = 16  # fuzzed requests
LATE = 4.0  # seconds
ARGV = ('--slots=16', '--max_model_len=512', '--max_queue=512')


@dataclasses.dataclass
class Seen:
  """What a phase has shown."""

  statuses: collections.Counter[str] = dataclasses.field(
    default_factory=collections.Counter
  )
  compared: int = 0
  bad: list[str] = dataclasses.field(default_factory=list)
  late: list[str] = dataclasses.field(default_factory=list)
  longest: float = 0.0  # seconds for an answer
  longest_message: int = 0  # characters

  def answered(self, request: fuzz_bodies.Request, status: int, text: str):
    """Notes an answer, which may be wrong in itself."""
    self.statuses[str(status)] += 1
    if status >= 500:
      self.bad.append(f'{status} for {_short(request)}: {text[:200]}')
    if status >= 400 and request.method != 'HEAD':
      try:
        message = json.loads(text)['error']['message']
        self.longest_message = max(self.longest_message, len(text))
        assert len(message) < 800
      except (ValueError, KeyError, TypeError, AssertionError):
        # What is no HTTP is answered by the library, in plain text.
        if status != 400 or 'Invalid HTTP' not in text:
          self.bad.append(
            f'no error object for {_short(request)}: {text[:200]}'
          )

  def took(self, request: fuzz_bodies.Request, seconds: float):
    """Notes the time of an answer."""
    self.longest = max(self.longest, seconds)
    if seconds > LATE:
      self.late.append(f'{seconds:.1f} s: {_short(request)}')


def _short(request: fuzz_bodies.Request) -> str:
  return (
    f'{request.kind} {request.method} {request.path} '
    f'{len(request.content)} bytes {request.content[:300]!r}'
  )


def essence(answer: dict[str, Any]) -> Any:
  """Returns the part of an answer that only the request decides."""
  choices = []
  for choice in answer['choices']:
    text = choice.get('text', choice.get('message', {}).get('content'))
    logprobs = choice['logprobs'] or {}
    numbers = logprobs.get('token_logprobs') or [
      entry['logprob'] for entry in logprobs.get('content') or ()
    ]
    choices.append(
      (text, choice['token_ids'], choice['finish_reason'], numbers)
    )
  return choices, answer['usage']


def same(a: Any, b: Any) -> bool:
  """Compares essences; logprobs to rounding."""
  if isinstance(a, float) and isinstance(b, float):
    return abs(a - b) < 1e-3
  if isinstance(a, list | tuple) and isinstance(b, list | tuple):
    return len(a) == len(b) and all(map(same, a, b))
  return a == b


class Fuzz:
  """The requests of all phases, and their answers."""

  def __init__(self, server: served.Server, count: int, seed: int):
    """Makes `count` right requests."""
    rng = random.Random(f'right {seed}')
    self.server, self.seed = server, seed
    self.right = [fuzz_bodies.right(rng) for _ in range(count)]
    self.quiet: list[Any] = []

  async def ask_quietly(self) -> float:
    """Sends the right requests one by one; returns the longest seconds."""
    longest = 0.0
    async with self._client() as client:
      for chat, body in self.right:
        begin = time.monotonic()
        response = await client.post(fuzz_bodies.PATHS[chat], json=body)
        longest = max(longest, time.monotonic() - begin)
        assert response.status_code == 200, response.text
        self.quiet.append(essence(response.json()))
    return longest

  async def fuzz(self, first: int, last: int) -> Seen:
    """Sends the fuzzed requests first to last - 1, `AT_ONCE` at a time."""
    seen, numbers = Seen(), iter(range(first, last))

    async def work(client: httpx.AsyncClient) -> None:
      for number in numbers:
        rng = random.Random(f'{self.seed} {number}')
        if rng.random() < 0.2:
          await self._ask_right(client, rng, seen)
        else:
          await self._ask_wrong(client, rng, seen)
        if number % 2000 == 1999:
          print(f'{number + 1} requests', file=sys.stderr, flush=True)

    async with self._client() as client:
      await asyncio.gather(*(work(client) for _ in range(AT_ONCE)))
    return seen

  async def soak(self, clients: int, seconds: float) -> Seen:
    """Lets clients send requests for a while, and leave some of them."""
    seen, end = Seen(), time.monotonic() + seconds

    async def work(number: int) -> None:
      rng = random.Random(f'{self.seed} client {number}')
      async with self._client() as client:
        while time.monotonic() < end:
          pick = rng.random()
          if pick < 0.3:
            await self._leave(rng, seen)
          elif pick < 0.4:
            await self._ask_wrong(client, rng, seen)
          else:
            await self._ask_right(client, rng, seen)

    await asyncio.gather(*map(work, range(clients)))
    return seen

  def _client(self) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=self.server.url, timeout=120)

  async def _ask_right(self, client, rng: random.Random, seen: Seen) -> None:
    """Sends a right request, perhaps as a stream; compares the answer."""
    index = rng.randrange(len(self.right))
    chat, body = self.right[index]
    request = fuzz_bodies.request(chat, body, 'right')
    scored = body.get('logprobs') or body.get('prompt_logprobs') is not None
    streams = rng.random() < 0.4 and not scored and not body.get('echo')
    begin = time.monotonic()
    if streams:
      answer = await _read_stream(client, chat, body)
      seen.statuses['200'] += 1
      expected = [x[:3] for x in self.quiet[index][0]], self.quiet[index][1]
    else:
      response = await client.post(fuzz_bodies.PATHS[chat], json=body)
      seen.answered(request, response.status_code, response.text)
      if response.status_code == 429:
        return
      answer = essence(response.json())
      expected = self.quiet[index]
    seen.took(request, time.monotonic() - begin)
    seen.compared += 1
    if not same(answer, expected):
      seen.bad.append(f'{_short(request)}: {answer}, alone {expected}'[:2000])

  async def _ask_wrong(self, client, rng: random.Random, seen: Seen) -> None:
    request = fuzz_bodies.wrong(rng)
    if rng.random() < 0.03:
      return await self._leave(rng, seen)
    begin = time.monotonic()
    headers = {k: v.encode('latin1') for k, v in request.headers.items()}
    try:
      response = await client.request(
        request.method, request.path, content=request.content, headers=headers
      )
    except httpx.RemoteProtocolError as error:
      seen.statuses[type(error).__name__] += 1
      return
    seen.answered(request, response.status_code, response.text)
    seen.took(request, time.monotonic() - begin)

  async def _leave(self, rng: random.Random, seen: Seen) -> None:
    """Sends a part of a request, or all of it, and leaves at any moment."""
    chat, body = rng.choice(self.right)
    body = {**body, 'max_tokens': 200, 'stream': rng.random() < 0.5}
    for name in ('logprobs', 'top_logprobs', 'echo', 'prompt_logprobs'):
      body.pop(name, None)
    request = fuzz_bodies.request(chat, body)
    data = (
      f'POST {request.path} HTTP/1.1\r\nhost: localhost\r\n'
      f'content-type: application/json\r\n'
      f'content-length: {len(request.content)}\r\n\r\n'
    ).encode() + request.content
    if rng.random() < 0.3:
      data = data[: rng.randrange(len(data))]
    _, writer = await asyncio.open_connection(*self.server.address)
    with contextlib.suppress(ConnectionError):
      writer.write(data)
      await writer.drain()
      await asyncio.sleep(rng.random() ** 3)
    writer.transport.abort()
    seen.statuses['left'] += 1


async def _read_stream(client, chat: bool, body: dict[str, Any]) -> Any:
  """Returns the essence of a streamed answer, without logprobs."""
  body = {**body, 'stream': True, 'stream_options': {'include_usage': True}}
  texts: dict[int, list] = {}
  usage = None
  path = fuzz_bodies.PATHS[chat]
  async with client.stream('POST', path, json=body) as response:
    if response.status_code != 200:
      raise AssertionError(await response.aread())
    async for line in response.aiter_lines():
      if not line or line == 'data: [DONE]':
        continue
      chunk = json.loads(line.removeprefix('data: '))
      usage = chunk['usage'] or usage
      for part in chunk['choices']:
        text = part.get('text', part.get('delta', {}).get('content')) or ''
        entry = texts.setdefault(part['index'], ['', [], None])
        entry[0] += text
        entry[1] += part.get('token_ids') or []
        entry[2] = part['finish_reason'] or entry[2]
  return [tuple(texts[i]) for i in sorted(texts)], usage


def prove(args: argparse.Namespace, folder: pathlib.Path) -> int:
  """Runs the phases on a new server; prints the table; returns exit code."""
  server = served.Server(folder, *ARGV)
  rows = [('start', f'{server.seconds:.1f} s')]
  try:
    bad = _phases(args, server, rows)
    left = server.counts()['under_way']
    rows.append(('jobs left', str(left)))
  finally:
    code = server.stop()
  rows.append(('exit code', str(code)))
  print('| | |\n|---|---|')
  print('\n'.join(f'| {a} | {b} |' for a, b in rows))
  print('\n'.join(bad[:20]), file=sys.stderr)
  return 1 if bad or left or code else 0


def _phases(
  args: argparse.Namespace, server: served.Server, rows: list[tuple[str, str]]
) -> list[str]:
  """Runs the phases; appends to `rows`; returns the wrong answers."""

  def note(name: str, wait: float = 2) -> None:
    time.sleep(wait)
    value = f'{server.megabytes()} MB, {server.descriptors()} descriptors'
    rows.append((name, value))

  note('server started')
  fuzz = Fuzz(server, args.right, args.seed)
  longest = asyncio.run(fuzz.ask_quietly())
  rows.append(('quiet answers', f'{args.right}, longest {longest:.2f} s'))
  note('before')
  bad, half = [], args.requests // 2
  for name, work in (
    (f'{half} fuzzed requests', fuzz.fuzz(0, half)),
    (f'{args.requests - half} more', fuzz.fuzz(half, args.requests)),
    (
      f'soak of {args.minutes:g} min with {args.clients} clients',
      fuzz.soak(args.clients, 60 * args.minutes),
    ),
  ):
    with served.watch(server) as watch:
      seen = asyncio.run(work)
    bad += seen.bad
    rows += _rows(name, seen, watch)
    note(f'after: {name}')
  note('10 s later', 8)
  return bad


def _rows(name: str, seen: Seen, watch: served.Watch) -> list[tuple[str, str]]:
  statuses = ', '.join(f'{k}: {v}' for k, v in sorted(seen.statuses.items()))
  for line in seen.late[:20]:
    print(line, file=sys.stderr)
  wrong = f'{len(seen.bad)} wrong of {seen.compared} compared'
  return [
    (f'{name}: statuses', statuses),
    (f'{name}: answers', wrong),
    (f'{name}: later than {LATE:g} s', str(len(seen.late))),
    (f'{name}: longest answer', f'{seen.longest:.2f} s'),
    (f'{name}: longest refusal', f'{seen.longest_message} bytes'),
    (
      f'{name}: longest delay of /health',
      f'{watch.longest:.3f} s of {watch.count} requests',
    ),
  ]


def main(argv: list[str]) -> int:
  """Runs the command; returns its exit code."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments.trials.fuzz_serve'
  )
  for name, default in (
    ('requests', 20_000),
    ('clients', 64),
    ('right', 200),
    ('seed', 0),
  ):
    parser.add_argument(f'--{name}', type=int, default=default)
  parser.add_argument('--minutes', type=float, default=3.0)
  args = parser.parse_args(argv)
  with tempfile.TemporaryDirectory() as folder:
    return prove(args, pathlib.Path(folder))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
