"""Batches whose groups may have begun under earlier weights."""

import dataclasses
import json

import numpy as np
import pytest

from posttrain import schema
from posttrain.decode import requests
from tests import toys
from tests.pipeline.test_tokens import _equal

PROMPTS, GROUP, STEPS, MAX_HOLD = 3, 4, 8, 2
MODES = pytest.mark.parametrize('keep_cache', [False, True])


@pytest.fixture(autouse=True)
def letters(monkeypatch):
  toys.install(monkeypatch)


def make(keep_cache=False, max_hold=MAX_HOLD, prompts=PROMPTS):
  """Returns a function from a step to its item, and the pipeline."""
  cfg = toys.stage(
    prompts,
    {'short': toys.entry(GROUP, 2), 'long': toys.entry(GROUP, 12)},
    rollout=schema.Rollout(
      slots=8,
      in_flight=True,
      hold_tokens=2,
      max_hold=max_hold,
      keep_cache=keep_cache,
    ),
  )
  pipeline, driver = toys.pipeline_and_driver(cfg)

  def step(number):
    driver._engine.set_params(WEIGHTS[number % 2], number)
    return next(pipeline)

  return step, pipeline


WEIGHTS = toys.params(), toys.params(1)


def uids(item):
  """Returns the uids of each group of a batch."""
  return [tuple(r.uid for r in group) for group in groups(item)]


def groups(item):
  return [group for x in item.played.values() for group in x.groups]


def samples(item):
  return [sample for x in item.played.values() for sample in x.samples]


def held(item):
  return sum(item.metrics[f'rollout/held/{x}'] for x in ('short', 'long'))


@MODES
def test_groups_are_trained_once_soon_and_by_several_versions(keep_cache):
  step, pipeline = make(keep_cache)
  again, _ = make(keep_cache)
  seen, num_held, mixed = [], 0, 0
  for number in range(STEPS):
    item, other = step(number), again(number)
    _equal(item.batch, other.batch)
    assert item.metrics == other.metrics and item.state == other.state
    assert len(uids(item)) == PROMPTS
    seen += uids(item)
    num_held += held(item)
    for sample in samples(item):
      versions = sample.versions[sample.mask]
      assert (np.diff(versions) >= 0).all()
      assert number - MAX_HOLD <= versions[0] <= versions[-1] <= number
      mixed += versions[0] < versions[-1]
  assert num_held and mixed
  # Whole groups of neighbours, each once; those that are missing are in flight.
  first = [group[0] for group in seen]
  assert len(set(first)) == len(first) == STEPS * PROMPTS
  assert all(x == tuple(range(x[0], x[0] + GROUP)) for x in seen)
  missing = set(range(min(first), max(first), GROUP)) - set(first)
  assert missing <= {group.uids[0] for group in pipeline._flight.groups}


def test_a_batch_waits_for_groups_that_were_held_long_enough():
  """A group of `long` needs six rounds of one group of `short` each."""
  oldest = set()
  for max_hold in (1, 2):
    step, _ = make(max_hold=max_hold, prompts=1)
    versions = [
      (number, sample.versions[sample.mask].min())
      for number in range(2 * STEPS)
      for sample in samples(step(number))
    ]
    oldest.add(max(number - version for number, version in versions))
  assert oldest == {1, 2}


def test_a_resumed_run_trains_the_same_groups():
  step, _ = make()
  items = [step(number) for number in range(STEPS)]
  for last in range(STEPS - 1):
    if not held(items[last]):
      continue
    again, pipeline = make()
    pipeline.set_state(json.loads(json.dumps(items[last].state)))
    more = [again(number) for number in range(last + 1, STEPS + 2)]
    done = [x for item in [*items[: last + 1], *more] for x in uids(item)]
    assert len(set(done)) == len(done)
    first = {group[0] for group in done}
    missing = set(range(min(first), max(first), GROUP)) - first
    assert missing <= {group.uids[0] for group in pipeline._flight.groups}
    tasks = {r.uid: r.task for i in items for g in groups(i) for r in g}
    for rollout in (r for i in more for g in groups(i) for r in g):
      assert tasks.get(rollout.uid, rollout.task) == rollout.task
    return
  raise AssertionError('nothing was held')


@MODES
def test_others_use_the_engine_between_two_batches(keep_cache):
  step, pipeline = make(keep_cache)
  alone, _ = make(keep_cache)
  engine = pipeline._players['policy']._engine
  num_held = 0
  for number in range(4):
    item, other = step(number), alone(number)
    _equal(item.batch, other.batch)
    num_held += held(item)
    with pipeline.paused():
      engine.generate([requests.Request(2**40, np.arange(5), 4)])
  assert num_held
  pipeline.close()
  assert not pipeline._players['policy'].held


def test_what_does_not_fit_is_refused():
  cfg = toys.stage(PROMPTS, rollout=schema.Rollout(in_flight=True))
  frozen = dataclasses.replace(
    toys.entry(), sampler=schema.Frozen(model='stage:a'), algorithm=schema.Sft()
  )
  for change in (
    {'batch': dataclasses.replace(cfg.batch, max_draws=PROMPTS)},
    {'envs': {'toy': frozen}},
  ):
    with pytest.raises(schema.FieldError) as error:
      dataclasses.replace(cfg, **change)
    assert error.value.field == 'rollout.in_flight'
  with pytest.raises(schema.FieldError):
    schema.Rollout(keep_cache=True, sleep=True)
