"""Who may send requests: Host headers, content types, keys."""

import json
import os
import socket

import pytest

from posttrain.serve import __main__ as main
from posttrain.serve import access
from tests.serve import conftest

BODY = {'model': conftest.NAME, 'prompt': 'ab', 'max_tokens': 2}


@pytest.mark.parametrize(
  'host',
  [
    'evil.example',
    'evil.example:80',
    'localhost.evil.example',
    'x@localhost',
    'localhost.',
    '[::1].evil',
    '[::1',
    '0.0.0.0',
  ],
)
def test_foreign_hosts_are_refused_on_every_route(served, host):
  headers = {'Host': host}
  client = served.client
  for response in (
    client.get('/health', headers=headers),
    client.get('/v1/models', headers=headers),
    client.get('/v1/models/tiny', headers=headers),
    client.post('/v1/completions', json=BODY, headers=headers),
    client.post('/v1/chat/completions', json=BODY, headers=headers),
    client.get('/nothing', headers=headers),
    client.get('/v1/models/', headers=headers),
    client.options('/v1/completions', headers=headers),
    client.delete('/health', headers=headers),
  ):
    assert response.status_code == 403, response.text
    assert 'the header Host must be one of' in response.text


@pytest.mark.parametrize('host', ['localhost', 'LocalHost:1', '[::1]:80'])
def test_own_hosts_are_served(served, host):
  response = served.client.get('/v1/models', headers={'Host': host})
  assert response.status_code == 200


def test_hosts_are_checked_on_loopback_addresses_only():
  with socket.create_server(('127.0.0.1', 0)) as own:
    assert access.own_hosts(own, ['Proxy.example']) == {
      'localhost',
      '127.0.0.1',
      '::1',
      'proxy.example',
    }
  with socket.create_server(('0.0.0.0', 0)) as reachable:
    assert access.own_hosts(reachable, ['']) is None
    assert access.own_hosts(reachable, [' Proxy.example', 'fd00::1']) == {
      'localhost',
      '127.0.0.1',
      '::1',
      'proxy.example',
      'fd00::1',
    }


@pytest.mark.parametrize(
  'name',
  ['https://api.example', 'api.example:443', 'a b', '[::1]', 'b\u00fc.de'],
)
def test_names_that_no_header_can_have_are_refused(name):
  with socket.create_server(('127.0.0.1', 0)) as own:
    with pytest.raises(ValueError, match='without ports'):
      access.own_hosts(own, ['ok.example', name])


@pytest.mark.parametrize(
  'kind', ['text/plain', '', 'application/jsonp', 'text/plain;application/json']
)
def test_other_content_types_are_refused(served, kind):
  content = json.dumps(BODY)
  response = served.client.post(
    '/v1/completions', content=content, headers={'Content-Type': kind}
  )
  assert response.status_code == 415
  assert 'Content-Type must be application/json' in response.text


@pytest.mark.parametrize(
  'key', ['secret-key\u00e9', 'key with end ', 'a\tb', ' ', b'k\xff']
)
def test_keys_that_no_header_can_have_are_refused(monkeypatch, key):
  key = key if isinstance(key, bytes) else key.encode()
  monkeypatch.setitem(os.environb, b'SERVER_KEY', key)
  flags = main.Flags('c', api_key_env='SERVER_KEY')
  with pytest.raises(ValueError, match='which has other characters') as error:
    main.api_key(flags)
  assert 'secret' not in str(error.value)
  monkeypatch.setitem(os.environb, b'SERVER_KEY', b'sk-1/~')
  assert main.api_key(flags) == 'sk-1/~'


def test_other_addresses_need_a_key_also_with_names():
  flags = main.Flags('c', allowed_hosts='api.example')
  main.check_open(flags, None, loopback=True)
  main.check_open(flags, 'key', loopback=False)
  with pytest.raises(ValueError, match='--api_key_env must name'):
    main.check_open(flags, None, loopback=False)
