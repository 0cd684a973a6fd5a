"""MaxRL: the order of each estimator, by exact enumeration."""

import itertools

import numpy as np
import pytest

from posttrain import algorithms, schema
from tests.algorithms import two_turns


def assign(cfg, *rewards):
  return algorithms.make(cfg).assign(two_turns.group(*rewards))


@pytest.mark.parametrize(
  ('rewards', 'expected'),
  [
    ([1, 0, 0, 0], [3, -1, -1, -1]),
    ([0, 0], [0, 0]),
    ([1, 1], [0, 0]),
    ([0.5, 1.0], [-1 / 3, 1 / 3]),
    ([1], [0]),
    ([0.1, 0.1, 0.1], [0, 0, 0]),
  ],
)
def test_literal_numbers(rewards, expected):
  np.testing.assert_allclose(
    assign(schema.MaxRl(), *rewards), expected, atol=1e-6
  )


def test_literal_numbers_without_the_baseline():
  cfg = schema.MaxRl(baseline=False)
  assert assign(cfg, 1, 0, 0, 0) == [4, 0, 0, 0]
  assert assign(cfg, 0, 0) == [0, 0]
  assert assign(cfg, 1) == [1]


def expected_gradient(cfg, count, p):
  """E[mean_i A_i d log P(y_i)] of a Bernoulli policy with P(y = 1) = p.

  In its logit: d log P(y) = y - p, and d p = p (1 - p).
  """
  total = 0.0
  for outcome in itertools.product((0, 1), repeat=count):
    chance = np.prod([p if y else 1 - p for y in outcome])
    advantages = assign(cfg, *outcome)
    score = [y - p for y in outcome]
    total += chance * np.mean(np.multiply(advantages, score))
  return total


@pytest.mark.parametrize('p', [0.1, 0.5, 0.9])
@pytest.mark.parametrize('count', [1, 2, 4, 6])
def test_expected_gradient_is_the_truncated_series(count, p):
  """(1 - (1 - p)^K) / p d p: K = N - 1 with the baseline, N without."""
  slope = p * (1 - p)

  def truncated(order):
    return (1 - (1 - p) ** order) / p * slope

  np.testing.assert_allclose(
    expected_gradient(schema.MaxRl(), count, p),
    truncated(count - 1),
    rtol=1e-5,
    atol=1e-7,
  )
  np.testing.assert_allclose(
    expected_gradient(schema.MaxRl(baseline=False), count, p),
    truncated(count),
    rtol=1e-5,
  )
  np.testing.assert_allclose(
    expected_gradient(schema.Grpo(), count, p),
    (count - 1) / count * slope,
    rtol=1e-5,
    atol=1e-7,
  )
  if count > 1:
    np.testing.assert_allclose(
      expected_gradient(schema.Rloo(), count, p), slope, rtol=1e-5
    )
  np.testing.assert_allclose(
    expected_gradient(schema.Reward(), count, p), slope, rtol=1e-5
  )


def test_expected_gradients_equal_literal_numbers():
  """p = 0.1, d p = 0.09; numbers of an independent derivation."""
  for cfg, count, value in (
    (schema.MaxRl(), 2, 0.09),
    (schema.MaxRl(baseline=False), 2, 0.171),
    (schema.MaxRl(), 4, 0.2439),
    (schema.MaxRl(baseline=False), 4, 0.30951),
    (schema.Grpo(), 4, 0.0675),
  ):
    gradient = expected_gradient(cfg, count, 0.1)
    np.testing.assert_allclose(gradient, value, rtol=1e-4)


def test_negative_rewards_raise():
  with pytest.raises(ValueError, match='max_rl: got -0.5 for task t of env'):
    assign(schema.MaxRl(), 1.0, -0.5)
