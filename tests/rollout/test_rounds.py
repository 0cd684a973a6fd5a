"""Episodes that are held at their boundaries, and go on under new weights."""

import numpy as np
import pytest

from posttrain.rollout import episodes, side_by_side
from tests import fixtures, toys
from tests.rollout import fakes

CAPACITY = 64
MODES = pytest.mark.parametrize('keep_cache', [False, True])


ENV = fakes.Recall(max_turns=3)
SPECS = [
  fakes.spec(uid, ENV, turns, max_tokens=7)
  for uid, turns in enumerate((1, 2, 3, 3))
]


@pytest.fixture(scope='module')
def engine():
  return toys.engine(CAPACITY, width=4)


def play(engine, weights, tokens=None, keep_cache=False):
  """Returns rollouts by uid; each episode makes one request per round.

  Args:
    engine: has no request.
    weights: those of the rounds; further rounds have the last ones.
    tokens, keep_cache: of the round.
  """
  driver = episodes.Driver(engine, fixtures.RENDERER, CAPACITY)
  ended, asked, running = {}, 0, len(SPECS)

  def is_over():
    nonlocal asked
    asked += 1
    return asked > running

  round = episodes.Round(is_over, lambda _: [], tokens, keep_cache)
  for number in range(30):
    version = min(number, len(weights) - 1)
    engine.set_params(weights[version], number)
    begun = driver.play(
      SPECS if not number else [], lambda x: ended.update({x.uid: x}), round
    )
    (result,) = side_by_side.run([begun])
    result.result()
    asked, running = 0, len(driver.held)
    if not running:
      break
  assert len(ended) == len(SPECS)
  return [ended[x.uid] for x in SPECS]


def sample(rollout):
  (only,) = rollout.samples
  return only


@MODES
@pytest.mark.parametrize('tokens', [None, 3])
def test_holding_changes_no_token(engine, tokens, keep_cache):
  weights = toys.params()
  engine.set_params(weights, 0)
  whole = episodes.Driver(engine, fixtures.RENDERER, CAPACITY).run(SPECS)
  for rollout, held in zip(
    whole, play(engine, [weights], tokens, keep_cache), strict=True
  ):
    a, b = sample(rollout), sample(held)
    np.testing.assert_array_equal(a.ids, b.ids)
    np.testing.assert_allclose(
      a.sampler_logprobs, b.sampler_logprobs, atol=2e-4
    )
    # What is fed again after a hold is no hit, though others have its prompt.
    assert rollout.turns == held.turns and rollout.score == held.score
    # Each turn, or each piece of a turn, has the version of its round.
    first, pieces = 0, []
    for turn in held.turns:
      for start in range(0, turn.length, tokens or turn.length):
        pieces += [first] * min(tokens or turn.length, turn.length - start)
        first += 1
    assert b.versions[b.mask].tolist() == pieces
    assert (b.versions[~b.mask] == -1).all()


@MODES
def test_tokens_after_a_hold_are_of_the_new_weights(engine, keep_cache):
  """With a cache of the old weights they are of neither."""
  weights = toys.params(), toys.params(1)
  rollouts = play(engine, weights, 3, keep_cache)
  apart = 0.0
  for own in map(sample, rollouts):
    for version, params in enumerate(weights):
      engine.set_params(params, version)
      (scores,) = engine.score([own.ids])
      here = own.mask & (np.minimum(own.versions, 1) == version)
      error = np.abs(scores - own.sampler_logprobs)[here].max(initial=0)
      if version and keep_cache:
        apart = max(apart, error)
      else:
        assert error < 1e-3
  assert (apart > 0.01) == keep_cache


def test_held_episodes_are_closed(engine):
  driver = episodes.Driver(engine, fixtures.RENDERER, CAPACITY)
  engine.set_params(toys.params(), 0)
  num = 0

  def is_over():
    nonlocal num
    num += 1
    return num > len(SPECS)

  round = episodes.Round(is_over, lambda _: [], None, keep_cache=True)
  (result,) = side_by_side.run([driver.play(SPECS, round=round)])
  assert [x.uid for x in result.result()] == [0]
  assert sorted(driver.held) == [1, 2, 3]
  runs = list(driver.held.values())
  assert all(run.env.is_open for run in runs)
  driver.close()
  engine.sleep()  # asserts that no request is in flight
  assert not driver.held and not any(run.env.is_open for run in runs)
