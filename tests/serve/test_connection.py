"""Connections: bounded parsing, deadlines, and who has to leave."""

import asyncio
import contextlib
import json
import socket
import time

import h11
import httpx
import pytest
from uvicorn.protocols.http import h11_impl

from posttrain.serve import connection, release
from tests.serve import conftest

HEAD = (
  b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
  b'Content-Type: application/json\r\n'
)
CHUNKED = HEAD + b'Transfer-Encoding: chunked\r\n\r\n'


def chunks(content, size):
  parts = (content[i : i + size] for i in range(0, len(content), size))
  return b''.join(b'%x\r\n%s\r\n' % (len(x), x) for x in parts) + b'0\r\n\r\n'


def connect(served):
  url = httpx.URL(served.url)
  client = socket.create_connection((url.host, url.port))
  client.settimeout(10)
  return client


def read_all(client):
  parts = []
  while part := client.recv(4096):
    parts.append(part)
  return b''.join(parts)


def exchange(served, *data):
  """Returns all that the server sends until it closes the connection."""
  with connect(served) as client:
    for part in data:
      client.sendall(part)
    return read_all(client)


def problem(answer, status):
  """Returns the message of the last response, an error object."""
  head, _, body = answer.partition(b'\r\n\r\n')
  assert head.startswith(b'HTTP/1.1 %d ' % status), answer
  assert b'application/json' in head
  return json.loads(body)['error']['message']


def parse(data):
  """Returns the number of events of a read; raises as the parser does."""
  conn, count = connection._Requests(), 0
  conn.receive_data(data)
  while conn.next_event() not in (h11.NEED_DATA, h11.PAUSED):
    count += 1
  return count


@pytest.mark.parametrize('size', [1, 16, 200])
def test_small_chunks_are_parsed_up_to_a_bound(size):
  few = connection.FREE_CHUNKS
  assert parse(CHUNKED + chunks(b' ' * size * few, size)) == few + 2
  with pytest.raises(h11.RemoteProtocolError, match='chunks of less than 256'):
    parse(CHUNKED + chunks(b' ' * size * 100 * few, size))


def test_chunks_of_a_fair_size_have_no_bound():
  count = 20 * connection.FREE_CHUNKS
  body = chunks(b' ' * connection.MIN_CHUNK * count, connection.MIN_CHUNK)
  assert parse(CHUNKED + body) == count + 2


def test_heads_are_bounded_also_in_a_single_read():
  value = b'y' * 120
  fits = HEAD + b'x: %s\r\n' % value * 120 + b'\r\n'
  assert len(fits) < connection.MAX_HEAD and parse(fits) == 2
  with pytest.raises(h11.RemoteProtocolError, match='more than 128 lines'):
    parse(HEAD + b'x: y\r\n' * 200 + b'\r\n')
  large = HEAD + b'x: y\r\n' * 4000 + b'\r\n'
  for data in (large, large[:-2]):
    with pytest.raises(h11.RemoteProtocolError, match='head of more than'):
      parse(data)


def test_small_chunks_are_refused_with_an_error_object(served):
  content = json.dumps({'model': conftest.NAME, 'prompt': 'ab'}).encode()
  padded = content + b' ' * 4000
  answer = exchange(served, CHUNKED + chunks(padded, 1))
  assert 'less than 256 bytes on average' in problem(answer, 400)
  with connect(served) as client:
    client.sendall(CHUNKED + chunks(padded, 50))
    assert b' 200 OK' in client.recv(4096)


@pytest.mark.parametrize(
  ('data', 'status'),
  [
    (CHUNKED.replace(b'completions', b'nowhere'), 404),
    (CHUNKED.replace(b'POST', b'PUT'), 405),
    (CHUNKED.replace(b'localhost', b'evil.example'), 403),
    (CHUNKED.replace(b'application/json', b'text/plain'), 415),
    (HEAD + b'Content-Length: 99999999\r\n\r\n', 413),
  ],
)
def test_nothing_of_a_refused_request_is_parsed(
  served, monkeypatch, data, status
):
  """What follows the response is discarded, and the connection closes."""
  monkeypatch.setattr(connection, 'KEEP_ALIVE', 0.2)
  with connect(served) as client:
    client.sendall(data)
    answer = client.recv(4096)
    monkeypatch.setattr(connection._Requests, 'receive_data', None)
    client.sendall(chunks(b' ' * 5000, 1))
    answer += read_all(client)
  monkeypatch.undo()
  assert problem(answer, status) and b'connection: close' in answer
  assert served.client.get('/health').status_code == 200


def test_a_refused_request_with_its_whole_body_keeps_the_connection(served):
  with connect(served) as client:
    for _ in range(2):
      client.sendall(
        HEAD.replace(b'json', b'x') + b'Content-Length: 2\r\n\r\n{}'
      )
      assert client.recv(4096).startswith(b'HTTP/1.1 415 ')


@pytest.mark.parametrize(
  'data',
  [
    b'\x16\x03\x01\x02\x00',
    b'GET\r\n\r\n',
    b'GET / HTTP/1.1\r\nno colon\r\n\r\n',
    CHUNKED + b'zz\r\n',
    HEAD + b'Content-Length: x\r\n\r\n',
    b'GET / HTTP/1.1\r\nx: \x00\xff\r\n\r\n',
  ],
)
def test_garbage_is_refused_with_an_error_object_and_no_log(
  served, caplog, data
):
  message = problem(exchange(served, data), 400)
  assert message.startswith('the request must be HTTP/1.1: got ')
  assert message.isprintable() and len(message) < 700
  assert not caplog.records


def test_upgrades_are_ignored_without_a_line_in_the_log(served, caplog):
  upgrade = {'Connection': 'Upgrade', 'Upgrade': 'websocket'}
  response = served.client.get('/health', headers=upgrade)
  assert response.status_code == 200 and not caplog.records


@pytest.mark.parametrize(
  'sent', [b'', HEAD, HEAD + b'Content-Length: 9\r\n\r\n']
)
def test_too_many_connections_close_the_one_that_keeps_waiting_longest(
  served, monkeypatch, sent
):
  monkeypatch.setattr(connection, 'max_connections', lambda: 3)
  clients = []
  for _ in range(6):
    clients.append(connect(served))
    clients[-1].sendall(sent)
    time.sleep(0.02)
  for _ in range(3):
    response = httpx.get(f'{served.url}/health', timeout=5)
    assert response.status_code == 200
  with contextlib.suppress(ConnectionResetError):
    assert clients[0].recv(1) == b''
  for client in clients:
    client.close()


class Transport:
  """A transport with a peer, which is told what happens to it."""

  def __init__(self, address='a', unsent=0):
    self.address, self.unsent, self.aborted = address, unsent, False

  def get_extra_info(self, name):
    return {'peername': (self.address, 1)}.get(name)

  def get_write_buffer_size(self):
    return self.unsent

  def is_closing(self):
    return self.aborted

  def abort(self):
    self.aborted = True

  def pause_reading(self):
    pass

  resume_reading = pause_reading


@pytest.fixture
def make(monkeypatch):
  """Returns a function that makes a connection of a server."""
  from uvicorn import config, server

  async def app(scope, receive, send):
    raise AssertionError('no request is sent')

  loop = asyncio.new_event_loop()
  settings, state = config.Config(app), server.ServerState()

  def make(*args):
    made = connection.Connection(settings, state, {}, loop)
    made.connection_made(Transport(*args))
    return made

  monkeypatch.setattr(release, 'soon', lambda: None)
  yield make
  loop.close()


def test_an_address_that_has_all_places_loses_its_own(make, monkeypatch):
  monkeypatch.setattr(connection, 'max_connections', lambda: 3)
  honest = make('b')
  hostile = [make('a') for _ in range(9)]
  aborted = [x.transport.aborted for x in hostile]
  assert aborted == [True] * 7 + [False] * 2
  assert not honest.transport.aborted


def test_clients_that_do_not_read_have_to_leave_too(make, monkeypatch):
  monkeypatch.setattr(connection, 'max_connections', lambda: 2)
  unread, busy = make('a'), make('a')
  for x in (unread, busy):  # their requests are handled
    x._awaited = ''
  unread.pause_writing()
  new = make('a')
  assert [x.transport.aborted for x in (unread, busy, new)] == [
    True,
    False,
    False,
  ]


def test_responses_that_nobody_reads_are_bounded_in_all(make, monkeypatch):
  monkeypatch.setattr(connection, 'MAX_UNSENT', 100)
  unread = [make('a', 40) for _ in range(2)]
  other = make('b', 20)
  for x in (*unread, other):
    x.pause_writing()
  assert not any(x.transport.aborted for x in (*unread, other))
  new = make('a', 1)
  new.conn.largest = 40  # of which 10 are sent
  new.pause_writing()
  aborted = [x.transport.aborted for x in (*unread, other, new)]
  assert aborted == [True, False, False, False]


def test_pipelined_requests_wait_until_the_response_is_read(make, monkeypatch):
  parsed = []
  monkeypatch.setattr(
    h11_impl.H11Protocol, 'handle_events', lambda self: parsed.append(self)
  )
  client = make()
  client.data_received(b'')
  client.pause_writing()
  client.data_received(b'')
  assert len(parsed) == 1
  client.resume_writing()
  assert len(parsed) == 2


def test_memory_of_unread_responses_is_returned(make, monkeypatch):
  released = []
  client = make()
  monkeypatch.setattr(release, 'soon', lambda: released.append(1))
  client.resume_writing()
  assert not released
  client.pause_writing()
  client.resume_writing()
  client.pause_writing()
  client.connection_lost(OSError())
  assert released == [1, 1]


def test_half_sent_heads_and_bodies_are_closed(served, monkeypatch):
  monkeypatch.setattr(connection, 'HEAD', 0.2)
  monkeypatch.setattr(connection, 'BODY', 0.3)
  url = httpx.URL(served.url)
  head = b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
  rest = b'Content-Type: application/json\r\nContent-Length: 9\r\n\r\n{'
  for data, expected in (
    (b'', b''),
    (head, b"the request's head must arrive in 0.2 s"),
    (head + rest, b"the request's body must arrive in 0.3 s"),
  ):
    with socket.create_connection((url.host, url.port)) as client:
      client.sendall(data)
      client.settimeout(5)
      answer = read_all(client)
    assert expected in answer and (b' 408 ' in answer) == bool(expected)


def test_connections_are_half_of_the_descriptors(monkeypatch):
  for limit, expected in ((64, 32), (10**6, 1000), (-1, 1000)):
    monkeypatch.setattr(
      connection.resource, 'getrlimit', lambda _, limit=limit: (limit, limit)
    )
    connection.max_connections.cache_clear()
    assert connection.max_connections() == expected
  monkeypatch.undo()
  connection.max_connections.cache_clear()
