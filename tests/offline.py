"""A guard for tests that must need no network."""

import socket
from collections.abc import Iterator

import pytest

_HERE = (None, '', 'localhost', '127.0.0.1', '::1', '0.0.0.0', '::')


def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
  """Refuses the names of other machines; a refusal fails the test.

  It fails at the end, as code may catch the error. Other processes that a test
  starts are not watched.
  """
  refused = []
  find = socket.getaddrinfo

  def guarded(host, *args, **kwargs):
    host = host.decode() if isinstance(host, bytes) else host
    if host not in (*_HERE, socket.gethostname()):
      refused.append(host)
      raise OSError(f'a test must stay on this machine: got {host!r}')
    return find(host, *args, **kwargs)

  monkeypatch.setattr(socket, 'getaddrinfo', guarded)
  yield
  assert refused == []
