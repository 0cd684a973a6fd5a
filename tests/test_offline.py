"""The guard of tests without a network."""

import socket

import pytest

from tests import offline


def test_other_machines_are_refused_even_if_the_error_is_caught():
  with pytest.MonkeyPatch.context() as patch:
    guarded = offline.guard(patch)
    next(guarded)
    with socket.create_server(('127.0.0.1', 0)) as server:
      socket.create_connection(server.getsockname()).close()
    for host in ('192.0.2.1', 'example.invalid'):  # reserved for tests
      with pytest.raises(OSError, match='must stay on this machine'):
        socket.create_connection((host, 80), timeout=1)
    with socket.socket() as client:
      with pytest.raises(OSError, match='must stay on this machine'):
        client.connect(('192.0.2.1', 80))
    with pytest.raises(AssertionError):
      next(guarded)
