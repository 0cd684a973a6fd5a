"""Who may send requests: Host headers, content types, keys, deadlines."""

import contextlib
import json
import socket

import httpx
import pytest

from posttrain.serve import app
from tests.serve import conftest

BODY = {'model': conftest.NAME, 'prompt': 'ab', 'max_tokens': 2}
HEAD = (
  b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
  b'Content-Type: application/json\r\n'
)


@pytest.mark.parametrize(
  ('host', 'status'),
  [
    ('localhost.evil.example', 403),
    ('[::1].evil', 403),
    ('LocalHost:1', 200),
    ('[::1]:80', 200),
  ],
)
def test_foreign_hosts_are_refused_on_every_route(served, host, status):
  for path in ('/health', '/v1/models/tiny'):
    response = served.client.get(path, headers={'Host': host})
    assert response.status_code == status, response.text


def test_hosts_are_checked_on_loopback_addresses_or_if_given():
  names = {'localhost', '127.0.0.1', '::1', 'proxy.example'}
  with socket.create_server(('127.0.0.1', 0)) as own:
    assert app.own_hosts(own, ['Proxy.example']) == names
    with pytest.raises(ValueError, match='--allowed_hosts'):
      app.own_hosts(own, ['ok.example', 'https://api.example'])
  with socket.create_server(('0.0.0.0', 0)) as reachable:
    assert app.own_hosts(reachable, ['']) is None
    assert app.own_hosts(reachable, ['proxy.example']) == names


@pytest.mark.parametrize('kind', ['text/plain', ''])
def test_other_content_types_are_refused(served, kind):
  response = served.client.post(
    '/v1/completions', content=json.dumps(BODY), headers={'Content-Type': kind}
  )
  assert response.status_code == 415


def test_api_key_is_required_if_set(start):
  with start(api_key='secret') as server:
    for words, status in (
      ('', 401),
      ('Bearer no', 401),
      ('Bearer secret', 200),
    ):
      headers = {'Authorization': words}
      response = server.client.get('/v1/models', headers=headers)
      assert response.status_code == status
    for key, status in (('no', 401), ('secret', 200)):  # as Tinker's SDK
      headers = {'X-API-Key': key}
      response = server.client.get('/v1/models', headers=headers)
      assert response.status_code == status
    assert server.client.get('/health').status_code == 200


def connect(served):
  url = httpx.URL(served.url)
  return socket.create_connection((url.host, url.port), timeout=10)


@pytest.mark.parametrize(
  'data', [b'', HEAD, HEAD + b'Content-Length: 9\r\n\r\n{']
)
def test_half_sent_requests_are_closed(served, monkeypatch, data):
  monkeypatch.setattr(app, 'OWED', {'head': 0.2, 'body': 0.3, 'read': 0.2})
  with connect(served) as client:
    client.sendall(data)
    with contextlib.suppress(ConnectionResetError):
      assert client.recv(4096) == b''
