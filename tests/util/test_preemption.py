"""The request to stop a run."""

import os
import signal
import time
from unittest import mock

import pytest

from posttrain.util import preemption


def test_sigterm_requests_a_stop_and_the_handler_is_restored():
  before = signal.getsignal(signal.SIGTERM)
  with preemption.on_sigterm() as stop:
    stop.check('step 1')
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested
    for is_saved, text in ((True, 'which is s'), (False, 'with no step')):
      with pytest.raises(preemption.Preempted, match=f'^step 2, {text}'):
        stop.check('step 2', is_saved)
  assert signal.getsignal(signal.SIGTERM) is before


class Wait:
  """Something that waits, until `end`."""

  ended = False

  def end(self):
    self.ended = True


def test_a_request_calls_the_callbacks_of_objects_that_are_alive():
  stop, kept, dropped = preemption.Signal(), Wait(), Wait()
  stop.on_request(kept.end)
  stop.on_request(dropped.end)
  del dropped
  stop.request()
  assert kept.ended


@pytest.mark.parametrize('text', ['90', '0s', '5m3h'])
def test_durations_have_units(text):
  assert preemption.seconds('1d2h3m4s', '--time_limit') == 93_784
  with pytest.raises(ValueError, match='^--time_limit must be a duration with'):
    preemption.seconds(text, '--time_limit')


@pytest.fixture
def clock(monkeypatch):
  """Returns a list with the present time, which tests set."""
  now = [100.0]
  monkeypatch.setattr(preemption, 'STARTED', 100.0)
  monkeypatch.setattr(preemption, 'time', mock.Mock(monotonic=lambda: now[0]))
  monkeypatch.setattr(preemption, 'threading', mock.Mock())
  return now


def test_the_time_limit_leaves_time_for_a_step_and_its_save(clock):
  stop = preemption.Signal(200.0)  # ends at 300, and must save before 295
  clock[0] = 150.0
  stop.begin_steps()
  for now in (210.0, 230.0, 250.0):  # the first step compiles
    clock[0] = now
    assert not stop.after_step(save_seconds=10)
  clock[0] = 266.0
  assert stop.after_step(save_seconds=10)  # 266 + 20 > 285
  assert stop.requested


def test_a_limit_without_time_for_a_step_is_refused():
  """Instead of exit code 75: the same would happen at each start."""
  stop = preemption.Signal(0.01)
  while not stop.requested:
    time.sleep(0.01)
  with pytest.raises(ValueError, match='--time_limit must leave time for a st'):
    stop.check('the start of stage sft')
  stop.after_step(0.0)
  with pytest.raises(preemption.Preempted, match='step 1'):
    stop.check('step 1')
