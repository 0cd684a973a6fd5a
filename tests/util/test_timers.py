"""Timers of the parts of a step."""

import pytest

from posttrain.util import timers


def test_timers_accumulate_until_taken(monkeypatch):
  now = iter([0.0, 1.0, 10.0, 12.0])
  monkeypatch.setattr(timers.time, 'perf_counter', lambda: next(now))
  clock = timers.Timers()
  with clock('data'):
    pass
  with pytest.raises(KeyError), clock('data'):
    raise KeyError
  assert clock.take() == {'data': 3.0}
  assert clock.take() == {}
