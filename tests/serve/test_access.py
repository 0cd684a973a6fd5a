"""Who may send requests: Host headers, content types, keys, deadlines."""

import json
import socket

import httpx
import pytest

from experiments.trials import base
from posttrain.serve import app
from tests.serve import conftest

BODY = {'model': conftest.NAME, 'prompt': 'ab', 'max_tokens': 2}
HEAD = (
  b'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n'
  b'Content-Type: application/json\r\n'
)


@pytest.mark.parametrize(
  'host', ['localhost.evil.example', 'x@localhost', '[::1].evil', '0.0.0.0']
)
def test_foreign_hosts_are_refused_on_every_route(served, host):
  for path in ('/health', '/v1/models/tiny', '/nothing'):
    response = served.client.get(path, headers={'Host': host})
    assert response.status_code == 403, response.text
    assert response.json()['error']['code'] == 'invalid_host'


@pytest.mark.parametrize('host', ['localhost', 'LocalHost:1', '[::1]:80'])
def test_own_hosts_are_served(served, host):
  response = served.client.get('/v1/models', headers={'Host': host})
  assert response.status_code == 200


def test_hosts_are_checked_on_loopback_addresses_or_if_given():
  names = {'localhost', '127.0.0.1', '::1', 'proxy.example'}
  with socket.create_server(('127.0.0.1', 0)) as own:
    assert app.own_hosts(own, ['Proxy.example']) == names
    with pytest.raises(ValueError, match='--allowed_hosts'):
      app.own_hosts(own, ['ok.example', 'https://api.example'])
  with socket.create_server(('0.0.0.0', 0)) as reachable:
    assert app.own_hosts(reachable, ['']) is None
    assert app.own_hosts(reachable, ['proxy.example']) == names


@pytest.mark.parametrize('kind', ['text/plain', '', 'application/jsonp'])
def test_other_content_types_are_refused(served, kind):
  response = served.client.post(
    '/v1/completions', content=json.dumps(BODY), headers={'Content-Type': kind}
  )
  assert response.status_code == 415


def test_api_key_is_required_if_set(start):
  with start(api_key='secret') as server:
    for headers in ({}, {'Authorization': 'Bearer wrong'}):
      for response in (
        server.client.get('/v1/models', headers=headers),
        server.client.post('/v1/completions', json=BODY, headers=headers),
      ):
        assert response.status_code == 401
        assert response.json()['error']['code'] == 'invalid_api_key'
    good = {'Authorization': 'Bearer secret'}
    assert server.client.get('/v1/models', headers=good).status_code == 200
    assert server.client.get('/health').status_code == 200


def connect(served):
  url = httpx.URL(served.url)
  client = socket.create_connection((url.host, url.port))
  client.settimeout(10)
  return client


@pytest.mark.parametrize(
  'data', [b'', HEAD, HEAD + b'Content-Length: 9\r\n\r\n{']
)
def test_half_sent_requests_are_closed(served, monkeypatch, data):
  monkeypatch.setattr(app, 'OWED', {'head': 0.2, 'body': 0.3, 'read': 0.2})
  with connect(served) as client:
    client.sendall(data)
    with pytest.raises(ConnectionResetError):
      assert client.recv(4096) == b''
      raise ConnectionResetError


def test_responses_that_nobody_reads_are_dropped(served, monkeypatch):
  monkeypatch.setattr(app, 'OWED', {'head': 9.0, 'body': 9.0, 'read': 0.3})
  body = {**BODY, 'prompt': [[1] * 90] * 8, 'n': 4, 'prompt_logprobs': 20}
  content = json.dumps(body).encode()
  with connect(served) as client:
    for _ in range(4):  # more than the kernel holds
      client.sendall(HEAD + b'Content-Length: %d\r\n\r\n' % len(content))
      client.sendall(content)
    base.wait_for(lambda: served.server.server_state.connections)
    base.wait_for(
      lambda: (
        not any(
          x.flow.write_paused for x in served.server.server_state.connections
        )
      )
    )
