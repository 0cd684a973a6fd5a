"""Credit from a user's function: shape checks, placement on the tokens."""

import numpy as np
import pytest

from posttrain import algorithms, schema
from posttrain.rollout import episodes
from tests.algorithms import two_turns
from tests.rollout import fakes


def make(name, **kwargs):
  return algorithms.make(
    schema.Custom(import_path=f'tests.algorithms.credits:{name}', kwargs=kwargs)
  )


def test_credit_is_aligned_with_the_sampled_tokens():
  (sample,) = two_turns.finalize(make('ramp'), [two_turns.group(1.0)])
  assert sample.advantages.tolist() == [0, 0, 0, 1, 0, 0, 0, 2, 3]
  # Over several samples, in order.
  first, second = two_turns.finalize(
    make('ramp'), [two_turns.group(1.0, samples=2)]
  )
  assert first.advantages.tolist() == [0, 0, 0, 1, 0, 0, 0, 2, 3]
  assert second.advantages.tolist() == [0, 0, 4, 5, 0, 0, 0, 6, 7]


def test_broadcast_of_centered_rewards_equals_grpo():
  ours = two_turns.finalize(make('centered'), [two_turns.group(1.0, 0.0, 0.5)])
  grpo = two_turns.finalize(
    algorithms.make(schema.Grpo()), [two_turns.group(1.0, 0.0, 0.5)]
  )
  for a, b in zip(ours, grpo, strict=True):
    np.testing.assert_array_equal(a.advantages, b.advantages)
    np.testing.assert_array_equal(a.rl_weights, b.rl_weights)


def test_broadcast_turns_credits_each_turn_with_its_reward_to_go():
  (sample,) = two_turns.finalize(make('reward_to_go'), [two_turns.group(1.0)])
  assert sample.advantages.tolist() == [0, 0, 0.75, 0.75, 0, 0, 0, 0.5, 0.5]
  # Also over several samples of an episode.
  first, second = two_turns.finalize(
    make('reward_to_go'), [two_turns.group(1.0, samples=2)]
  )
  assert first.advantages[first.mask].tolist() == [1.5, 1.5, 1.25, 1.25]
  assert second.advantages[second.mask].tolist() == [0.75, 0.75, 0.5, 0.5]


def test_turns_of_an_episode_with_several_samples_get_their_own_credit():
  engine = fakes.Restarting({7: ['a', 'bcd', 'e']})
  rollouts = episodes.Driver(engine, fakes.RENDERER, 64).run(
    [fakes.spec(7, fakes.Recall(3), 3, keep_exchanges=1)]
  )
  first, second = two_turns.finalize(make('reward_to_go'), [rollouts])
  assert first.advantages[first.mask].tolist() == [3.0] * 2 + [2.5] * 4
  assert second.advantages[second.mask].tolist() == [1.5] * 2


@pytest.mark.parametrize(
  ('name', 'message'),
  [
    ('short', r'number per sampled token of rollout 0, .*: got \(3,\)'),
    ('flat', r'as inputs\.broadcast\(\[\.\.\.\]\) .*: got one, expected \(4,'),
    ('number', 'one list per rollout: got float, expected 2'),
    ('one', 'broadcast must get one value per rollout: got 1, expected 2'),
    ('last_turn', r'turn: got \[1, 1\], expected \[2, 2\]'),
    ('infinite', 'Custom must return finite credit: got '),
  ],
)
def test_credit_of_another_shape_raises(name, message):
  with pytest.raises(ValueError, match=message):
    two_turns.finalize(make(name), [two_turns.group(1.0, 0.0)])


def test_a_missing_function_raises():
  with pytest.raises(schema.FieldError, match='import path'):
    schema.Custom()
  with pytest.raises(ValueError, match='algorithm.import_path must'):
    make('nothing')
  for name in ('NoAlgorithm', 'NoCredit'):
    with pytest.raises(ValueError, match=f'with assign where that .*{name}'):
      make(name)
