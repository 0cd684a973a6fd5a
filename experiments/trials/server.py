"""The server under hostile requests: one process with a tiny model for all."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import functools
import json
import pathlib
import random
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx

from experiments import bench_serve, fuzz_serve, served
from experiments.trials import base
from posttrain.serve import connection

COMPLETE, CHAT = '/v1/completions', '/v1/chat/completions'
JSON = {'content-type': 'application/json'}
MEGABYTE = 2**20
ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
TEMPLATE = ROOT / 'tests' / 'chat' / 'templates' / 'qwen3.jinja'
_lock = threading.Lock()


@functools.cache
def _started() -> served.Server:
  folder = tempfile.TemporaryDirectory()
  path = pathlib.Path(folder.name)
  bench_serve.publish('tiny', path / served.NAME)
  # Reads thoughts and tool calls in contents: the costly kind of template.
  shutil.copy(TEMPLATE, path / served.NAME / 'chat_template.jinja')
  server = served.Server(path, '--max_queue=512')
  atexit.register(folder.cleanup)
  atexit.register(server.stop)
  ask(server, COMPLETE, prompt='ab', max_tokens=2)
  return server


def running() -> served.Server:
  """Returns the server of all trials, started once."""
  with _lock:
    return _started()


def ask(
  server: served.Server, path: str, timeout: float = 60, **fields: Any
) -> httpx.Response:
  with server.client(timeout) as client:
    return client.post(path, json=served.body(**fields))


def _seconds(function: Callable[[], object]) -> float:
  begin = time.monotonic()
  function()
  return time.monotonic() - begin


def refused(response: httpx.Response, status: int, *words: str) -> str:
  """Checks an error object of one short line; returns its message."""
  text = response.text
  assert response.status_code == status, f'{response.status_code}: {text[:300]}'
  assert len(text) < 1200, f'a refusal of {len(text)} bytes: {text[:300]}'
  message = response.json()['error']['message']
  for word in words:
    assert word in message, f'{word!r} is not in {message!r}'
  return message


def _leave(server: served.Server, path: str, body: dict, after: float) -> None:
  """Sends a request, and closes the connection without reading."""
  content = json.dumps(body).encode()
  with socket.create_connection(server.address) as client:
    client.sendall(
      f'POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-length: '
      f'{len(content)}\r\ncontent-type: application/json\r\n\r\n'.encode()
    )
    with contextlib.suppress(ConnectionError):
      client.sendall(content)
    time.sleep(after)


@base.trial(
  'server',
  'stop strings cost a token the same, whatever their length',
  alone=True,
)
def stop_strings(scratch: base.Scratch) -> str:
  server = running()
  body = {
    'prompt': 'ab',
    'max_tokens': 400,
    'temperature': 0,
    'ignore_eos': True,
  }
  text = ask(server, COMPLETE, **body).json()['choices'][0]['text']
  # Each begins as the answer does, and never comes.
  long = [text[:1000] + 'z' * (1023 - len(text[:1000])) + x for x in 'abcd']
  seconds = {}
  for name, stop in (('none', None), ('4 x 1024', long)):
    send = functools.partial(ask, server, COMPLETE, **body, stop=stop)
    seconds[name] = min(_seconds(send) for _ in range(3))
  assert seconds['4 x 1024'] < 2 * seconds['none'] + 0.5, seconds
  for stop in (['a' * 400_000], ['ab' * 2049], 'é' * 5000, ['x'] * 100_000):
    response = ask(server, COMPLETE, **{**body, 'stop': stop})
    refused(response, 400, 'stop must')
  with served.watch(server) as watch:
    for stream in (True, False):
      _leave(
        server, COMPLETE, served.body(**body, stop=long, stream=stream), 0.1
      )
  base.wait_for(lambda: server.counts()['under_way'] == 0, 5)
  return (
    f'400 tokens in {seconds["none"]:.2f} s without stop strings, in '
    f'{seconds["4 x 1024"]:.2f} s with 4096 characters of them; longer ones '
    f'are refused; no job is left; /health within {watch.longest:.2f} s'
  )


# A template renders turns by what is in these, and strips their space.
MIXED = tuple(
  f' \n {content}\n '
  for content in ('', '<tool_response>', '</think>', '[', 'x ')
)


def _talk(count: int, contents: tuple[str, ...]) -> list[dict[str, str]]:
  draw = random.Random(0)
  return [
    {'role': ('user', 'assistant')[i % 2], 'content': draw.choice(contents)}
    for i in range(count)
  ]


@base.trial(
  'server', 'chats of many messages delay no honest request', alone=True
)
def many_messages(scratch: base.Scratch) -> str:
  server = running()
  well_formed = functools.partial(
    ask, server, CHAT, messages=[{'role': 'user', 'content': 'x'}], max_tokens=2
  )
  alone, seen = min(_seconds(well_formed) for _ in range(3)), []
  for name, count in (('empty', 1000), ('empty', 30_000), ('mixed', 1000)):
    messages = _talk(count, ('',) if name == 'empty' else MIXED)
    # max_tokens does not fit: rendered, and refused before the model.
    attack = functools.partial(
      ask, server, CHAT, messages=messages, max_tokens=2000
    )
    with concurrent.futures.ThreadPoolExecutor(12) as pool:
      attacks = [pool.submit(attack) for _ in range(12)]
      time.sleep(0.2)
      delay = max(_seconds(well_formed) for _ in range(3))
      for future in attacks:
        refused(future.result(), 400, 'messages must')
    seen.append(f'{delay:.2f} s beside twelve of {count} {name} messages')
    assert delay < 2, f'well-formed: {delay:.1f} s, alone {alone:.2f} s: {seen}'
  body = served.body(messages=_talk(2000, MIXED))
  threads = [
    threading.Thread(target=_leave, args=(server, CHAT, body, 0.01))
    for _ in range(12)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  after = _seconds(well_formed)
  assert after < 2, f'{after:.1f} s after clients have left'
  base.wait_for(lambda: server.counts()['under_way'] == 0, 5)
  return (
    f'an honest chat takes {alone:.2f} s alone, {base.words(seen)}; '
    f'{after:.2f} s after twelve clients have left'
  )


@base.trial('server', 'half-sent and idle connections are closed in time')
def half_sent(scratch: base.Scratch) -> str:
  server = running()
  before, clients = server.descriptors(), []
  for number in range(300):
    client = socket.create_connection(server.address)
    data = b'POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nx-a: '
    client.sendall(data[: number % len(data)])
    clients.append(client)
  base.wait_for(lambda: server.descriptors() >= before + 250, 5)
  most = server.descriptors()
  begin = time.monotonic()
  drip = clients[299]
  with contextlib.suppress(OSError):
    while time.monotonic() - begin < 12:  # one byte at a time does not help
      drip.sendall(b'a')
      time.sleep(0.3)
  base.wait_for(lambda: server.descriptors() <= before + 3, 8)
  seconds = time.monotonic() - begin
  assert ask(server, COMPLETE, prompt='a', max_tokens=1).status_code == 200
  for client in clients:
    client.close()
  return (
    f'{most} descriptors with 300 half-sent heads, {server.descriptors()} '
    f'within {seconds:.0f} s'
  )


def _begin(server: served.Server, *headers: str) -> socket.socket:
  """Sends the head of a completion; returns the open connection."""
  client = socket.create_connection(server.address)
  client.settimeout(60)
  head = ['POST /v1/completions HTTP/1.1', 'host: localhost', *headers]
  head += ['content-type: application/json', '', '']
  client.sendall('\r\n'.join(head).encode())
  return client


@base.trial('server', 'chunks of one byte stop no other request', alone=True)
def small_chunks(scratch: base.Scratch) -> str:
  server, data = running(), b'1\r\n \r\n' * 170_000
  seen = []
  for name, header in (
    ('in the body', 'x: y'),
    ('after a refusal', 'host: evil.example'),
  ):
    with served.watch(server) as watch, contextlib.ExitStack() as stack:
      for _ in range(8):
        client = stack.enter_context(
          _begin(server, header, 'transfer-encoding: chunked')
        )
        with contextlib.suppress(OSError):  # the server closes it
          client.sendall(data)
      time.sleep(2)
    assert watch.longest < 0.5, f'/health: {watch.longest} s, {name}'
    seen.append(f'{watch.longest:.2f} s {name}')
  return f'8 clients of 1 MB each, /health within {base.words(seen)}'


@base.trial(
  'server', 'responses that nobody reads are bounded in memory', alone=True
)
def unread_responses(scratch: base.Scratch) -> str:
  server, prompt = running(), [5] * 2046
  fields = {'prompt': [prompt] * 2, 'n': 128, 'max_tokens': 0}
  fields |= {'echo': True, 'return_token_ids': True}
  content = json.dumps(served.body(**fields)).encode()
  before = server.megabytes()
  with served.watch(server) as watch, contextlib.ExitStack() as stack:
    for _ in range(100):
      client = _begin(server, f'content-length: {len(content)}')
      stack.enter_context(client)
      client.sendall(content)
    last = ask(server, COMPLETE, **fields)  # after them all
    assert last.status_code == 200, last.text[:300]
    size, most = len(last.content) // MEGABYTE, server.megabytes() - before
  base.wait_for(lambda: server.megabytes() < before + 150, 10)
  growth = server.megabytes() - before
  assert most < 300, f'{most} MB'
  assert watch.longest < 1, f'/health: {watch.longest} s'
  return (
    f'100 clients that do not read {size} MB each: {most:+d} MB, then '
    f'{growth:+d} MB; /health within {watch.longest:.2f} s'
  )


@base.trial('server', 'half-sent bodies keep nobody out', alone=True)
def half_sent_bodies(scratch: base.Scratch) -> str:
  server, count = running(), connection.max_connections()
  honest = functools.partial(
    ask, server, COMPLETE, prompt='a', max_tokens=1, user='x' * 100_000
  )
  with contextlib.ExitStack() as stack:
    for _ in range(9):
      slow = stack.enter_context(_begin(server, 'content-length: 8000000'))
      slow.sendall(b' ' * 140_000)
    beside = _seconds(honest)
    for _ in range(count):
      stack.enter_context(_begin(server, 'content-length: 10'))
    seconds = max(_seconds(honest) for _ in range(6))
  for name, delay in (('slow bodies', beside), ('connections', seconds)):
    assert delay < 2, f'{delay:.1f} s beside {name}'
  return (
    f'a body of 100 KB is answered in {beside:.2f} s beside nine slow large '
    f'ones, in {seconds:.2f} s beside {count} connections with half a body'
  )


@base.trial('server', 'large bodies do not add up in memory', alone=True)
def large_bodies(scratch: base.Scratch) -> str:
  server, size = running(), 8 * MEGABYTE - 300
  bodies = {
    'a text': json.dumps(served.body(prompt='x' * size)),
    'numbers': '{"model":"bench","prompt":[' + '1,' * (size // 2) + '1]}',
    'keys': json.dumps(
      served.body(prompt='a', user={str(i): {} for i in range(200_000)})
    ),
    'no JSON': '[' * size,
    'brackets': '{"a":[' + '[[[{}]]],' * (size // 9) + '1]}',
  }
  before, seen = server.megabytes(), []
  with served.watch(server) as watch, server.client() as client:
    for name, content in bodies.items():

      def send(content: str = content) -> httpx.Response:
        return client.post(COMPLETE, content=content, headers=JSON)

      with concurrent.futures.ThreadPoolExecutor(8) as pool:
        futures = [pool.submit(send) for _ in range(8)]
      for future in futures:
        response = future.result()
        assert response.status_code in (200, 400, 413), response.text[:300]
        assert len(response.text) < 1200
      seen.append(f'{name} {server.megabytes() - before:+d} MB')
  base.wait_for(lambda: server.megabytes() < before + 300, 5)
  peak, growth = server.peak() - before, server.megabytes() - before
  assert peak < 600, f'{peak} MB: {seen}'
  assert watch.longest < 3, f'/health: {watch.longest} s'
  return (
    f'{before} MB before, after 8 x 8 MB of each kind: {base.words(seen)}; '
    f'at most {peak:+d} MB, then {growth:+d} MB; '
    f'/health within {watch.longest:.2f} s'
  )


@base.trial('server', 'nothing of a request outlives its client', alone=True)
def left_behind(scratch: base.Scratch) -> str:
  server = running()
  before, threads = server.descriptors(), []
  chat = [{'role': 'user', 'content': 'x' * 900}]
  for number in range(60):
    path, fields = (
      (COMPLETE, {'prompt': [1] * 900, 'max_tokens': 1000}),
      (COMPLETE, {'prompt': 'a', 'max_tokens': 1900, 'n': 8, 'stream': True}),
      (COMPLETE, {'prompt': [[1] * 99] * 8, 'prompt_logprobs': 20}),
      (CHAT, {'messages': chat, 'max_tokens': 900, 'stream': True}),
      (CHAT, {'messages': [{'role': 'user', 'content': ''}] * 900}),
      (COMPLETE, {'prompt': 'x' * 7 * MEGABYTE}),
    )[number % 6]
    body = {**served.body(**fields), 'ignore_eos': True}
    thread = threading.Thread(
      target=_leave, args=(server, path, body, 0.02 * (number % 9))
    )
    thread.start()
    threads.append(thread)
  for thread in threads:
    thread.join()
  begin = time.monotonic()
  base.wait_for(lambda: server.counts()['under_way'] == 0, 20)
  base.wait_for(lambda: server.counts()['drawing'] == 0, 20)
  seconds = time.monotonic() - begin
  base.wait_for(lambda: server.descriptors() <= before + 2, 8)
  assert ask(server, COMPLETE, prompt='a', max_tokens=1).status_code == 200
  return f'60 clients left: no job {seconds:.1f} s later, no descriptor more'


@base.trial('server', 'fuzzed requests: no 5xx, no wrong answer', alone=True)
def fuzzed(scratch: base.Scratch) -> str:
  fuzz = fuzz_serve.Fuzz(running(), 40, seed=7)
  asyncio.run(fuzz.ask_quietly())
  with served.watch(fuzz.server) as watch:
    seen = asyncio.run(fuzz.fuzz(0, 500))
  assert not seen.bad, seen.bad[:3]
  return (
    f'{seen.statuses.total()} requests, {seen.compared} answers equal to '
    f'those of the quiet server, longest {seen.longest:.1f} s; /health within '
    f'{watch.longest:.2f} s'
  )
