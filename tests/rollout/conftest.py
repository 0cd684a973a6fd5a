"""What tests of hanging calls share."""

import threading

import pytest

from posttrain.rollout import calls
from tests.rollout import fakes


@pytest.fixture
def gate(monkeypatch):
  """An event that hanging calls wait for; set at the end."""
  monkeypatch.setattr(calls, '_hung', [])
  event = threading.Event()
  yield event
  event.set()
  fakes.wait_for(lambda: not calls.hung())
