"""Sources that observe, and replayed groups: exact with a lag and a resume."""

import dataclasses
import json

import numpy as np
import pytest

from posttrain import schema
from posttrain.config import checks
from posttrain.pipeline import ahead, replay
from tests import toys
from tests.data import test_packing
from tests.pipeline.test_tokens import _equal

STEPS = 6
NAMES = 'toy', 'other'
ENTRY = dataclasses.replace(
  toys.entry(group_size=2),
  curriculum=schema.Curriculum(rare=0.3, memory=2),
  replay=schema.Replay(share=0.5, max_age=2),
)


@pytest.fixture(autouse=True)
def letters(monkeypatch):
  toys.install(monkeypatch)


def pipeline(names=('toy',)):
  envs = dict.fromkeys(names, ENTRY)
  return toys.pipeline_and_driver(toys.stage(4, envs))[0]


def make_ahead(max_lag, steps, in_thread):
  """Returns a pipeline that knows all the versions of its steps."""
  made = ahead.Ahead(
    pipeline(NAMES),
    lambda *_: None,
    lambda: None,
    lambda *_: [],
    cfg=schema.Rollout(max_lag=max_lag, rounding_share=0.0),
    steps=steps,
    in_thread=in_thread,
  )
  for version in range(STEPS):
    if version >= max(0, steps.start - 1 - max_lag):
      made._versions[version] = {}
  return made


@pytest.mark.parametrize('max_lag', [0, 2])
def test_a_lag_and_a_resume_change_no_draw(max_lag):
  whole = pipeline(NAMES)
  items = [next(whole) for _ in range(STEPS)]
  for name in NAMES:
    assert sum(x.metrics[f'replay/groups/{name}'] for x in items) > 1
  cut = make_ahead(max_lag, range(1, STEPS + 1), in_thread=max_lag > 0)
  if max_lag:
    cut.publish(0, {})
  for _ in range(3):
    next(cut)
  state = json.loads(json.dumps(cut.get_state()))
  cut.close()
  again = pipeline(NAMES)
  again.set_state(state)
  for item in items[3:]:
    other = next(again)
    _equal(item.batch, other.batch)
    assert item.metrics == other.metrics
    assert item.state == other.state


def test_a_group_counts_by_its_correct_rollouts():
  source = pipeline()
  item = next(source)
  (step,) = item.played.values()
  seen = {}
  for group in step.groups:
    rates = seen.setdefault(group[0].task.id, [])
    rates.append(np.mean([x.score.correct for x in group]))
  state = item.state['envs']['toy']['source']
  prompts = toys.Letters.prompts
  # All of a step are at most `memory` = 2 groups per task, or the latest weigh
  # one half.
  for index, (count, rate) in state['tasks'].items():
    first, *others = seen[prompts[int(index)]]
    for x in others:
      first += (x - first) / 2
    assert (count, rate) == (min(2, 1 + len(others)), first)
  assert len(state['tasks']) == len(seen)


def test_groups_are_trained_once_more_while_they_are_young():
  store = replay.Replay(schema.Replay(share=0.5, max_age=2), 0, 4)
  groups = []
  for row, weight in enumerate((0.0, 1, 1, 1)):
    made = test_packing.make(8, env='toy', row=str(row))
    weights = np.full(8, weight, np.float32)
    groups.append([dataclasses.replace(made, rl_weights=weights)] * 2)
  uids = iter(range(1000))

  def picks(count):
    """Returns how many of the next choices take a group."""
    return sum(store.pick(next(uids)) for _ in range(count))

  assert not picks(9)  # there is none yet
  store.finish(groups)  # step 1
  assert picks(9) == 2  # none without rl, and no more than the share
  samples, metrics = store.finish([])  # step 2
  assert metrics == {'groups': 2, 'stored': 0} and not picks(9)
  assert sorted(x.row for x in samples) == ['1', '1', '2', '2']
  for x in samples:
    truth = groups[int(x.row)][0]
    for field in set(vars(truth)) - {'task', 'message_ids'}:
      a, b = getattr(truth, field), getattr(x, field)
      np.testing.assert_array_equal(a, b)
      assert getattr(a, 'dtype', None) == getattr(b, 'dtype', None)
  store.finish(groups)  # step 3
  store.finish([])
  assert store.get_state()['groups']  # may be in step 5
  store.finish([])
  assert not store.get_state()['groups']  # but not in step 6


def test_with_a_critic_failures_train_once_more_as_well():
  """A reward of 0 is credit there: else successes alone would be replayed."""
  store = replay.Replay(schema.Replay(share=0.5), 0, 4)
  made = test_packing.make(8, env='toy')
  zeros, ones = np.zeros(8, np.float32), np.ones(8, np.float32)
  made = dataclasses.replace(made, advantages=zeros, rl_weights=ones)
  valued = dataclasses.replace(made, value_weights=ones)
  store.finish([[made], [valued]])
  assert len(store.get_state()['groups']) == 1


@pytest.mark.parametrize(
  'key, entry, rollout',
  [
    ('curriculum', ENTRY, {'in_flight': True}),
    ('replay', ENTRY, {'in_flight': True}),
    ('curriculum', schema.EnvEntry(curriculum=schema.Curriculum()), {}),
    ('replay', schema.EnvEntry(replay=schema.Replay()), {}),
    (
      'replay',
      dataclasses.replace(ENTRY, algorithm=schema.Opd(reference='init')),
      {},
    ),
  ],
)
def test_unfit_options_are_one_line(key, entry, rollout):
  stage = toys.stage(4, {'toy': entry}, rollout=schema.Rollout(**rollout))
  run = toys.run({'main': stage})
  assert f'main.envs.toy.{key}' in [x for x, *_ in checks.problems(run)]
