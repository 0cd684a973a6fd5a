"""Sessions with servers that flood, drip, redirect or hang."""

import contextlib
import re
import socket
import threading
import time

import pytest
from websockets import frames, utils
from websockets.http11 import Response
from websockets.sync import server

from posttrain.envs.adapters import session
from posttrain.util import foreign


@contextlib.contextmanager
def running(handler, **options):
  """Yields the URL of a server; `handler` gets each connection."""
  with server.serve(handler, 'localhost', 0, **options) as made:
    thread = threading.Thread(target=made.serve_forever)
    thread.start()
    try:
      yield f'ws://localhost:{made.socket.getsockname()[1]}/ws'
    finally:
      made.shutdown()
      thread.join()


def answers(*messages):
  def handler(connection):
    connection.recv()
    for message in messages:
      connection.send(message)
    with contextlib.suppress(Exception):
      connection.recv(timeout=5)

  return handler


def step(url, message_timeout=5.0):
  opened = session.Session(url, 5.0, message_timeout)
  try:
    return opened.request('step', {})
  finally:
    opened.close()


def test_a_message_over_the_size_is_refused_also_if_it_is_compressed():
  # The server compresses these spaces to 17 KiB.
  with running(answers(' ' * (2**24 + 1))) as url:
    with pytest.raises(ConnectionError, match='at most 16777216 bytes'):
      step(url)


def test_fragments_without_end_are_over_at_the_deadline():
  left = threading.Event()

  def drip(connection):
    connection.recv()
    with contextlib.suppress(Exception):
      connection.send(iter(lambda: left.wait(0.02) or ' ', True))

  begin = time.monotonic()
  with running(drip, close_timeout=0.1) as url:
    opened = session.Session(url, 0.2, 0.2)
    with pytest.raises(TimeoutError, match='step in message_timeout=0.2 s'):
      opened.request('step', {})
    opened.close()
    left.set()
  assert time.monotonic() - begin < 3


def test_a_handshake_without_end_is_over_at_the_deadline():
  with socket.create_server(('localhost', 0)) as listening:
    url = f'ws://localhost:{listening.getsockname()[1]}/ws'
    begin = time.monotonic()
    with pytest.raises(ConnectionError, match='connect_timeout=0.2 s'):
      session.Session(url, 0.2, 1.0)
    assert time.monotonic() - begin < 3


def test_an_action_that_the_server_does_not_read_is_over_at_the_deadline():
  with socket.create_server(('localhost', 0)) as listening:
    accepted = []

    def greet():
      accepted.append(listening.accept()[0])
      request = accepted[0].recv(2**16).decode()
      key = re.search('Sec-WebSocket-Key: (.*)\r\n', request)[1]
      answer = (
        'HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n'
        'Connection: Upgrade\r\n'
        f'Sec-WebSocket-Accept: {utils.accept_key(key)}\r\n\r\n'
      )
      accepted[0].sendall(answer.encode())  # and reads no more

    thread = threading.Thread(target=greet)
    thread.start()
    url = f'ws://localhost:{listening.getsockname()[1]}/ws'
    opened = session.Session(url, 0.2, 0.3)
    begin = time.monotonic()
    with pytest.raises(TimeoutError, match='must answer a step'):
      opened.request('step', {'text': 'x' * 2**23})
    opened.close()
    assert time.monotonic() - begin < 3
    thread.join()
    accepted[0].close()


def test_a_redirect_is_not_followed():
  visits = []
  with running(visits.append) as other:

    def redirect(connection, request):
      del request
      answer = connection.respond(302, '')
      assert isinstance(answer, Response)
      answer.headers['Location'] = other
      return answer

    with running(visits.append, process_request=redirect) as url:
      with pytest.raises(ConnectionError, match='HTTP 302'):
        step(url)
  assert not visits


def test_text_that_is_no_utf8_is_one_line():
  def handler(connection):
    connection.recv()
    with connection.send_context():
      connection.protocol.send_frame(
        frames.Frame(frames.Opcode.TEXT, b'\xff\xfe')
      )
    with contextlib.suppress(Exception):
      connection.recv(timeout=5)

  with running(handler) as url:
    with pytest.raises(ConnectionError, match='must stay connected'):
      step(url)


def test_a_long_refusal_is_cut():
  reason = 'QUJD' * 100_000
  refusal = (
    '{"type": "error", "data": {"code": "VALIDATION_ERROR", "message": '
    f'"{reason}"}}}}'
  )
  with running(answers(refusal)) as url:
    with pytest.raises(session.BadAction) as error:
      step(url)
  assert len(str(error.value)) < 5000
  assert 'more characters' in str(error.value)


def test_secrets_of_the_address_are_not_shown(monkeypatch):
  monkeypatch.setattr(foreign, '_secrets', set())
  with socket.create_server(('localhost', 0)) as closed:
    port = closed.getsockname()[1]
  url = f'ws://me:open%2Fsesame@localhost:{port}/ws?token=tell-nobody'
  with pytest.raises(ConnectionError) as error:
    session.Session(url, 1.0, 1.0)
  assert f'ws://localhost:{port}/ws' in str(error.value)
  assert 'sesame' not in str(error.value) and 'nobody' not in str(error.value)
  shown = foreign.text(f'got {url}; open/sesame')
  assert 'sesame' not in shown and 'nobody' not in shown


def test_messages_that_answer_no_request_are_refused():
  one = '{"type": "observation", "data": {"observation": {}}}'
  with running(answers(*[one] * 40)) as url:
    opened = session.Session(url, 5.0, 5.0)
    opened.request('reset', {})
    time.sleep(0.2)
    with pytest.raises(RuntimeError, match='one message for each request: got'):
      opened.request('step', {})
    opened.close()
