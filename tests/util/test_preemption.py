"""The request to stop a run."""

import os
import signal

import pytest

from posttrain.util import preemption


class Wait:
  """Something that waits, until `end`."""

  def __init__(self):
    self.ended = 0

  def end(self):
    self.ended += 1


def test_sigterm_requests_a_stop_and_the_handler_is_restored():
  before = signal.getsignal(signal.SIGTERM)
  with preemption.on_sigterm() as stop:
    stop.check('step 1')
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.requested
    with pytest.raises(preemption.Preempted, match='^step 2$'):
      stop.check('step 2')
  assert signal.getsignal(signal.SIGTERM) is before


def test_a_request_calls_the_callbacks_of_objects_that_are_alive():
  stop, kept, dropped = preemption.Signal(), Wait(), Wait()
  stop.on_request(kept.end)
  stop.on_request(dropped.end)
  del dropped
  stop.request()
  assert kept.ended == 1
