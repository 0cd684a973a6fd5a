"""Deadlines, sizes and secrets of HTTP exchanges, over real sockets."""

import contextlib
import gzip
import logging
import socket
import threading
import time
import traceback
import zlib

import pytest

from posttrain import schema
from posttrain.rollout.endpoint import client
from posttrain.util import foreign

HEAD = b'HTTP/1.1 200 OK\r\n'
KEY = 'Key/with+signs="1234'


@contextlib.contextmanager
def serving(write):
  """Yields the URL of a server; `write` gets each connection's request."""
  with socket.create_server(('127.0.0.1', 0)) as listening:

    def serve():
      while True:
        try:
          connection, _ = listening.accept()
        except OSError:
          return
        with connection, contextlib.suppress(OSError):
          write(connection, connection.recv(2**16))

    threading.Thread(target=serve, daemon=True).start()
    yield f'http://127.0.0.1:{listening.getsockname()[1]}/v1'
    listening.shutdown(socket.SHUT_RDWR)


def chat(url, **options):
  cfg = schema.Endpoint(name='teacher', base_url=url, tries=1, **options)
  with contextlib.closing(
    client.Endpoint(cfg, 'a test', sleep=lambda _: None)
  ) as endpoint:
    return endpoint.chat([({'role': 'user', 'content': 'x'},)])


def body(data, *headers):
  lines = b''.join(b'%s\r\n' % line for line in headers)
  return HEAD + lines + b'Content-Length: %d\r\n\r\n' % len(data) + data


@pytest.mark.parametrize(
  'start',
  [
    b'',
    HEAD,
    HEAD + b'X: ',
    HEAD + b'Content-Length: 999\r\n\r\n{',
    HEAD + b'Transfer-Encoding: chunked\r\n\r\n1;',
  ],
)
def test_a_drip_ends_at_the_deadline(start):
  def drip(connection, request):
    del request
    connection.sendall(start)
    for _ in range(60):
      time.sleep(0.05)
      connection.sendall(b'H')

  begin = time.monotonic()
  with serving(drip) as url:
    with pytest.raises(client.EndpointError, match=r'no answer within 0.2 s'):
      chat(url, timeout=0.2)
  assert time.monotonic() - begin < 2


@pytest.mark.parametrize(
  'answer',
  [
    HEAD + b'\r\n' + b' ' * 2**23,
    HEAD + b'Content-Length: 99999999999\r\n\r\n' + b' ' * 2**23,
    body(gzip.compress(bytes(2**23)), b'Content-Encoding: gzip'),
  ],
)
def test_an_answer_over_the_size_is_refused(answer):
  with serving(lambda connection, _: connection.sendall(answer)) as url:
    with pytest.raises(client.EndpointError, match=r'at most \d+ bytes'):
      chat(url)


def test_an_answer_in_gzip_is_read():
  data = gzip.compress(b'{"choices": [{"message": {"content": "yes"}}]}')
  answer = body(data, b'Content-Encoding: gzip')
  with serving(lambda connection, _: connection.sendall(answer)) as url:
    assert chat(url) == ['yes']


@pytest.mark.parametrize(
  'coding', [b'deflate', b'br', b'gzip, gzip', b'A' * 99]
)
def test_other_encodings_are_refused(coding):
  answer = body(zlib.compress(b'{}'), b'Content-Encoding: ' + coding)
  with serving(lambda connection, _: connection.sendall(answer)) as url:
    with pytest.raises(client.EndpointError, match='got Content-Encoding'):
      chat(url)


def test_a_long_refusal_is_read_in_part():
  answer = b'HTTP/1.1 500 Oh\r\n\r\n' + b'QUJD' * 2**20
  with serving(lambda connection, _: connection.sendall(answer)) as url:
    with pytest.raises(client.EndpointError, match='status 500: QUJD') as error:
      chat(url)
  assert len(str(error.value)) < 600


@pytest.mark.parametrize(
  'answer',
  [
    lambda key: body(b'{"error": "%s"}' % key).replace(b'200', b'403'),
    lambda key: body(b'{"error": "%s"}' % key).replace(b'200', b'503'),
    lambda key: body(b'"%s"' % key),
    lambda key: body(b'{"choices": "%s"}' % key),
    lambda key: HEAD + b'Bad \x01 ' + key + b'\r\n\r\n',
    lambda key: b'HTTP/1.1 403 ' + key + b'\r\nContent-Length: 0\r\n\r\n',
  ],
)
@pytest.mark.parametrize('form', [KEY, KEY.replace('"', '\\"')])
def test_an_echoed_key_is_masked(monkeypatch, caplog, answer, form):
  monkeypatch.setenv('TEACHER_KEY', KEY)
  monkeypatch.setattr(foreign, '_secrets', set())
  data = answer(f'Bearer {form}'.encode())
  with serving(lambda connection, _: connection.sendall(data)) as url:
    with (
      caplog.at_level(logging.DEBUG, 'absl'),
      pytest.raises(client.EndpointError) as error,
    ):
      chat(url, api_key_env='TEACHER_KEY')
  shown = ''.join(traceback.format_exception(error.value)) + caplog.text
  assert 'signs' not in shown


def test_user_and_password_of_the_address_are_sent_and_not_shown(monkeypatch):
  monkeypatch.setattr(foreign, '_secrets', set())
  requests = []

  def echo(connection, request):
    requests.append(request)
    connection.sendall(body(request).replace(b'200', b'400'))

  with serving(echo) as url:
    with pytest.raises(client.EndpointError, match='status 400') as error:
      chat(url.replace('://', '://me:open%2Fsesame@'))
  assert b'Authorization: Basic bWU6b3Blbi9zZXNhbWU=' in requests[0]
  assert 'sesame' not in str(error.value)
  assert 'bWU6b3' not in str(error.value)
  assert str(error.value).startswith(f'teacher at {url} must')


def test_an_invalid_password_is_not_shown():
  cfg = schema.Endpoint(name='x', base_url='http://me:open/sesame@host:x/v1')
  with pytest.raises(ValueError, match='base_url must be an address') as error:
    client.Endpoint(cfg, 'a test')
  assert 'sesame' not in ''.join(traceback.format_exception(error.value))


def test_close_ends_an_exchange():
  begun, errors = threading.Event(), []

  def hang(connection, request):
    begun.set()
    time.sleep(2)

  with serving(hang) as url:
    cfg = schema.Endpoint(name='teacher', base_url=url)
    endpoint = client.Endpoint(cfg, 'a test')

    def call():
      try:
        endpoint.chat([({'role': 'user', 'content': 'x'},)])
      except client.EndpointError as error:
        errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    assert begun.wait(10)
    endpoint.close()
    thread.join(1.5)
    assert not thread.is_alive() and 'closed' in errors[0]


def test_cookies_are_not_sent_back():
  requests = []

  def write(connection, request):
    requests.append(request)
    connection.sendall(
      body(b'{"choices": [{"message": {"content": "x"}}]}', b'Set-Cookie: a=b')
    )

  with serving(write) as url:
    cfg = schema.Endpoint(name='teacher', base_url=url, tries=1)
    with contextlib.closing(client.Endpoint(cfg, 'a test')) as endpoint:
      for _ in range(2):
        endpoint.chat([({'role': 'user', 'content': 'x'},)])
  assert len(requests) == 2 and b'cookie' not in requests[1].lower()
