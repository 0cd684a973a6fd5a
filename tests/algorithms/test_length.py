"""Length penalties: numbers by hand."""

import numpy as np
import pytest

from posttrain import algorithms, schema
from posttrain.algorithms import base, length
from tests.algorithms import two_turns


def test_count_of_tokens_and_turns():
  assert length.count(two_turns.rollout()) == (4, 5, 2, 2)
  assert length.count(two_turns.rollout(samples=2)) == (8, 10, 2, 4)
  first = np.array([1, 1, 0, 0, 0, 0, 0, 0, 1], bool)  # from the first token
  assert length.count(two_turns.rollout(mask=first)).turns == 2


def centered(values):
  return base.centered(np.float32(values))


@pytest.mark.parametrize(
  ('rewards', 'cost', 'expected'),
  [
    ([1, 1, 0, 1], [10, 30, 20, 20], [0.625, 0.125, -0.875, 0.125]),
    ([1, 1, 1], [10, 20, 40], [1 / 3, -2 / 21, -5 / 21]),
    ([0, 0, 0], [1, 2, 3], [0, 0, 0]),
    ([1, 0, 0, 0], [100, 50, 200, 150], [0.75, -0.25, -0.25, -0.25]),
    (
      [1, 1, 1, 0, 0],
      [50, 100, 200, 80, 120],
      [0.828571, 0.4, 0.257143, -0.742857, -0.742857],
    ),
    ([1, 1, 0], [0, 0, 0], [1 / 3, 1 / 3, -2 / 3]),
    ([-1, -1], [1, 2], [0, 0]),
  ],
)
def test_efficiency(rewards, cost, expected):
  rewards_after = length.efficiency(np.float32(rewards), np.float32(cost))
  np.testing.assert_allclose(centered(rewards_after), expected, atol=1e-6)


def test_the_efficiency_bonus_is_at_most_the_reward():
  rewards_after = length.efficiency(
    np.float32([1, 1, 0]), np.float32([1, 10000, 5000])
  )
  assert centered(rewards_after)[0] < 1.001 and rewards_after.max() <= 2


@pytest.mark.parametrize(
  ('rewards', 'counts', 'weights', 'expected'),
  [
    ([1, 1, 1], [[10], [20], [30]], [0.25], [1 / 12, 0, -1 / 12]),
    ([1, 1], [[11], [111]], [0.25 * 110 / 111], None),
    ([1, 1], [[1], [4]], [0.25], [0.09375, -0.09375]),
    (
      [1, 0, 1, 0],
      [[10, 10, 1], [20, 20, 2], [30, 20, 2], [40, 20, 4]],
      [0.25, 0.1, 0.1],
      [0.58125, -0.4875, 0.48125, -0.575],
    ),
    ([0, 0], [[1], [9]], [0.25], [0, 0]),
    ([-1, -1, -1], [[10], [20], [40]], [0.25], [0, 0, 0]),
    ([-3, 0], [[1], [9]], [0.25], [-1.5, 1.5]),
  ],
)
def test_linear(rewards, counts, weights, expected):
  rewards_after = length.linear(
    np.float32(rewards), np.float32(counts), weights
  )
  advantages = centered(rewards_after)
  if expected is None:
    assert advantages[0] > 0 > advantages[1]
  else:
    np.testing.assert_allclose(advantages, expected, atol=1e-6)


def test_overlong():
  """Whole at 20 tokens, none up to 15; DAPO's formula by hand."""
  cfg = schema.Overlong(max_tokens=20, buffer=5, weight=0.5)
  rewards, tokens = np.ones(6, np.float32), np.float32([1, 15, 16, 18, 20, 99])
  np.testing.assert_allclose(
    length.overlong(rewards, tokens, cfg), [1, 1, 0.9, 0.7, 0.5, 0.5]
  )
  counts = np.array([length.Count(int(n), 3, 0, 1) for n in tokens])
  np.testing.assert_array_equal(
    length.TYPES['overlong'](rewards, counts, cfg),
    length.overlong(rewards, tokens, cfg),
  )
  with pytest.raises(schema.FieldError, match='buffer must be <= max_tokens'):
    schema.Overlong(max_tokens=4, buffer=5)


def test_algorithms_apply_the_length_penalty():
  short, long = two_turns.rollout(), two_turns.rollout(uid=1, samples=2)
  for cfg in (schema.Grpo, schema.Rloo, schema.Echo):
    plain = algorithms.make(cfg()).assign([short, long])
    assert plain == [0, 0]
    for penalty in (schema.Efficiency(), schema.Linear()):
      algorithm = algorithms.make(cfg(length_penalty=penalty))
      a, b = algorithm.assign([short, long])
      assert a > 0 > b
  turns = schema.Efficiency(completion_weight=0, tool_weight=0, turn_weight=1)
  # 2 and 4 turns, 3 on average: rewards 4/3 and 1.
  advantages = algorithms.make(schema.Grpo(length_penalty=turns)).assign(
    [short, long]
  )
  np.testing.assert_allclose(advantages, [1 / 6, -1 / 6], atol=1e-6)


def test_the_group_scale_is_that_of_the_penalized_rewards():
  cfg = schema.Grpo(scale_rewards='group', length_penalty=schema.Linear())
  advantages = algorithms.make(cfg).assign(
    [two_turns.rollout(), two_turns.rollout(uid=1, samples=2)]
  )
  np.testing.assert_allclose(advantages, [0.5**0.5, -(0.5**0.5)], rtol=1e-2)


@pytest.mark.parametrize(
  ('kind', 'options'),
  [
    (schema.Efficiency, {'completion_weight': -1.0}),
    (schema.Efficiency, {'turn_weight': float('inf')}),
    (schema.Linear, {'input_weight': float('nan')}),
    (
      schema.Linear,
      dict.fromkeys(('output_weight', 'input_weight', 'turn_weight'), 0.0),
    ),
  ],
)
def test_invalid_weights_raise(kind, options):
  with pytest.raises(schema.FieldError, match=r'weight must be (>|fin)'):
    kind(**options)
