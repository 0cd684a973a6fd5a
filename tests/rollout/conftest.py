"""What tests of hanging calls share."""

import threading
import time

import pytest

from posttrain.rollout import calls


@pytest.fixture
def gate(monkeypatch):
  """An event that hanging calls wait for; set at the end."""
  monkeypatch.setattr(calls, '_hung', [])
  event = threading.Event()
  yield event
  event.set()
  end = time.monotonic() + 10
  while calls.hung():
    assert time.monotonic() < end
    time.sleep(0.005)
