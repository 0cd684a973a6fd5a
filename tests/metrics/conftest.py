"""Tests of metrics need no network."""

import pytest

from tests import offline


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
  yield from offline.guard(monkeypatch)
