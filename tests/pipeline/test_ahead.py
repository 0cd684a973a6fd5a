"""Batches made ahead: versions by step alone, in turns and in a thread."""

import random
import threading
import time

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.pipeline import ahead, batches
from posttrain.util import watchdog
from tests import fixtures

STEPS = 9


class Batches(batches.Pipeline):
  """Counts its batches, each of which is the version that it is made under."""

  learns_by_trial, repeats = (), True

  def __init__(self):
    self.count, self.version, self.events = 0, None, []
    self.error_at = self.stopped = None

  def use(self, weights, version):
    assert weights == {'policy': version}
    self.version = version

  def stop(self):
    self.stopped = True

  def __next__(self):
    time.sleep(random.random() / 300)
    assert self.version is not None
    self.count += 1
    if self.count == self.error_at:
      raise ValueError('batch')
    self.events.append(self.count)
    state = self.get_state()
    return batches.Item(self.version, {'x': 1.0}, state)

  def get_state(self):
    return {'count': self.count, 'tally': {'steps': self.count}}

  def set_state(self, state):
    self.count = state['count']


def _ahead(inner, max_lag, in_thread, start=1, clock=None):
  return ahead.Ahead(
    inner,
    inner.use,
    inner.stop,
    lambda *_: [],
    cfg=schema.Rollout(max_lag=max_lag),
    steps=range(start, STEPS + 1),
    in_thread=in_thread,
    clock=clock,
  )


@pytest.mark.parametrize('in_thread', [False, True])
@pytest.mark.parametrize('max_lag', [0, 1, 2, 4, 20])
def test_a_batch_has_the_version_of_its_step(max_lag, in_thread):
  if in_thread and not max_lag:
    pytest.skip('takes turns')
  inner = Batches()
  pipeline = _ahead(inner, max_lag, in_thread)
  for step in range(1, STEPS + 1):
    pipeline.publish(step - 1, {'policy': step - 1})
    item = next(pipeline)
    assert item.batch == max(0, step - 1 - max_lag)
    assert pipeline.get_state() == item.state
    assert item.state['count'] == step == pipeline.tally.get_state()['steps']
    time.sleep(random.random() / 300)
  assert inner.count == STEPS  # none is made for steps after the last
  pipeline.close()


def test_the_thread_runs_as_far_ahead_as_versions_are_known():
  inner = Batches()
  pipeline = _ahead(inner, 2, True)
  pipeline.publish(0, {'policy': 0})
  _until(lambda: inner.count == 3)
  time.sleep(0.02)
  assert inner.count == 3  # batch 4 needs version 1
  next(pipeline)
  pipeline.publish(1, {'policy': 1})
  _until(lambda: inner.count == 4)
  assert pipeline.get_state()['count'] == 1  # of the returned one
  pipeline.close()
  assert inner.stopped and not pipeline._thread.is_alive()


def test_nothing_is_made_while_it_is_paused():
  inner = Batches()
  pipeline = _ahead(inner, 8, True)
  pipeline.publish(0, {'policy': 0})
  with pipeline.paused():
    count = inner.count
    time.sleep(0.03)
    assert inner.count == count
  assert [next(pipeline).state['count'] for _ in range(STEPS)] == [
    *range(1, STEPS + 1)
  ]
  pipeline.close()


@pytest.mark.parametrize('in_thread', [False, True])
def test_an_error_is_raised_at_its_step(in_thread):
  inner = Batches()
  inner.error_at = 3
  pipeline = _ahead(inner, 4, in_thread)
  pipeline.publish(0, {'policy': 0})
  assert [next(pipeline).state['count'] for _ in range(2)] == [1, 2]
  with pytest.raises(ValueError, match='batch'):
    next(pipeline)
  assert pipeline.get_state()['count'] == 2
  pipeline.close()


@pytest.mark.parametrize('max_lag', [1, 3])
def test_a_restored_one_goes_on_with_the_same_versions(max_lag):
  for stop in range(STEPS):
    inner = Batches()
    pipeline = _ahead(inner, max_lag, False)
    for step in range(1, stop + 1):
      pipeline.publish(step - 1, {'policy': step - 1})
      next(pipeline)
    if not stop:  # the start is saved
      pipeline.publish(0, {'policy': 0})
    past = pipeline.past(stop)
    assert len(past) == max_lag
    inner.set_state(pipeline.get_state())
    again = _ahead(inner, max_lag, True, stop + 1)
    again.restore(past, pipeline.stored())
    for step in range(stop + 1, STEPS + 1):
      again.publish(step - 1, {'policy': step - 1})
      assert next(again).batch == max(0, step - 1 - max_lag)
    again.close()


def test_batches_that_cannot_be_made_again_are_stored():
  (batch,) = fixtures.batches(1)
  inner = Batches()
  inner.repeats = False
  pipeline = _ahead(inner, 2, True)
  pipeline.publish(0, {'policy': 0})
  _until(lambda: len(pipeline._items) == 3)
  next(pipeline)
  for item in pipeline._items.values():
    vars(item)['batch'] = batch
  stored = pipeline.stored()
  past = pipeline.past(1)
  pipeline.close()
  again = Batches()
  again.set_state(pipeline.get_state())
  resumed = _ahead(again, 2, False, 2)
  resumed.restore(past, stored)
  resumed.publish(1, {'policy': 1})
  for step in (2, 3):
    item = next(resumed)
    assert item.state['count'] == step and again.events == []
    for name, array in vars(batch).items():
      np.testing.assert_array_equal(getattr(item.batch, name), array)
  assert next(resumed).state['count'] == 4 and again.events == [4]


def test_staleness_counts_sampled_tokens_alone():
  versions = np.array([-1, -1, 3, 3, 5], np.int32)
  sample = types.Sample.__new__(types.Sample)
  vars(sample)['versions'] = versions
  played = {
    'a': batches.Played((), (), [sample], None),
    'b': batches.Played((), (), [], None),
  }
  assert batches.staleness(played, 5) == {
    'staleness/mean/a': pytest.approx(4 / 3),
    'staleness/max/a': 2.0,
  }


def _until(ready):
  for _ in range(2000):
    if ready():
      return
    time.sleep(0.005)
  raise AssertionError(threading.enumerate())


def test_seconds_of_the_thread_are_named_apart():
  clock = watchdog.Timers()
  inner = Batches()
  pipeline = _ahead(inner, 2, True, clock=clock)
  pipeline.publish(0, {'policy': 0})
  next(pipeline)
  pipeline.close()
  assert {'idle/learner', 'idle/sampler', 'beside/rollout'} < {*clock.take()}
