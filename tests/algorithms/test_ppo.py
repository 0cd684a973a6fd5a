"""ppo: rewards per token, by turn and at the end."""

import dataclasses

import numpy as np
import pytest

from posttrain import algorithms, schema
from tests.algorithms import two_turns


def _streams(rollout, **options):
  algorithm = algorithms.make(schema.Ppo(**options))
  samples = two_turns.finalize(algorithm, [[rollout]])
  names = 'rewards', 'value_weights', 'bootstraps'
  return [[getattr(x, name) for x in samples] for name in names]


def test_rewards_of_turns_and_of_the_episode_add_up():
  """1 = 0.25 + 0.5 of two turns, and 0.25 at the end."""
  (rewards,), (weights,), (bootstraps,) = _streams(two_turns.rollout(1.0))
  np.testing.assert_array_equal(rewards, [0, 0, 0, 0.25, 0, 0, 0, 0, 0.75])
  np.testing.assert_array_equal(weights, two_turns.MASK)
  assert not bootstraps.any()


def test_a_rewritten_history_goes_on_in_the_next_sample():
  rewards, _, bootstraps = _streams(two_turns.rollout(2.0, samples=2))
  assert rewards[0].sum() == 0.75 and np.sum(rewards) == 2
  last = np.arange(9) == 8
  np.testing.assert_array_equal(bootstraps, [last, 0 * last])


@pytest.mark.parametrize('bootstrap', [False, True])
def test_a_rollout_that_a_budget_cut_off(bootstrap):
  cut = dataclasses.replace(two_turns.rollout(), stop_reason='max_tokens')
  _, _, (bootstraps,) = _streams(cut, bootstrap=bootstrap)
  expected = bootstrap * (np.arange(9) == 8)
  np.testing.assert_array_equal(bootstraps, expected)
  _, (weights,), _ = _streams(cut, mask_truncated=True)
  assert not weights.any()
