"""A guard for tests that must need no network."""

import socket
from collections.abc import Iterator

import pytest

_HERE = (None, '', 'localhost', '127.0.0.1', '::1', '0.0.0.0', '::')


def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Refuses names and addresses of other machines; a refusal fails the test.

  It fails at the end, as code may catch the error. Other processes that a test
  starts are not watched.
  """
  refused = []
  connect, find = socket.socket.connect, socket.getaddrinfo

  def check(host):
    host = host.decode() if isinstance(host, bytes) else host
    if host not in (*_HERE, socket.gethostname()):
      refused.append(host)
      raise OSError(f'a test must stay on this machine: got {host!r}')

  def guarded_connect(self, address):
    if self.family in (socket.AF_INET, socket.AF_INET6):
      check(address[0])
    return connect(self, address)

  def guarded_find(host, *args, **kwargs):
    check(host)
    return find(host, *args, **kwargs)

  monkeypatch.setattr(socket.socket, 'connect', guarded_connect)
  monkeypatch.setattr(socket, 'getaddrinfo', guarded_find)
  yield
  assert refused == []
