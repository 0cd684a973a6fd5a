"""Echo: the CE weight of each token of the environment."""

import numpy as np
import pytest

from posttrain import algorithms, schema, types
from posttrain.algorithms import length
from tests.algorithms import two_turns

CREDITS = 'tests.algorithms.credits'


def weights(rollout=None, **options):
  algorithm = algorithms.make(schema.Echo(**options))
  return [
    w.tolist()
    for w in algorithm.observation_weights(rollout or two_turns.rollout())
  ]


def role(**alphas):
  return {k: schema.EchoRole(alpha=a) for k, a in alphas.items()}


TENTH = float(np.float32(0.1))


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    ({}, [0, 0, 0, 0, 0, TENTH, TENTH, 0, 0]),
    ({'roles': role(tool=0.5)}, [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0]),
    # A new table does not inherit the default's tool role.
    ({'roles': role(user=0.5)}, [0] * 9),
    ({'tools': ('search',)}, [0, 0, 0, 0, 0, TENTH, TENTH, 0, 0]),
    ({'tools': ('other',)}, [0] * 9),
    (
      {'filter': schema.EchoFilter(f'{CREDITS}:all_but', {'ids': [6]})},
      [0, 0, 0, 0, 0, 0, TENTH, 0, 0],
    ),
    # The filter adds no tokens.
    (
      {'filter': schema.EchoFilter(f'{CREDITS}:all_but')},
      [0, 0, 0, 0, 0, TENTH, TENTH, 0, 0],
    ),
  ],
)
def test_observation_weights_by_option(options, expected):
  assert weights(**options) == [expected]


def test_weights_are_those_of_each_role():
  rollout = two_turns.rollout(
    roles=np.array([1, 1, 2, 2, 1, 1, 3, 2, 2], np.int8)
  )
  assert weights(rollout, roles=role(user=0.5, tool=0.25)) == [
    [0, 0, 0, 0, 0, 0.5, 0.25, 0, 0]
  ]


def test_the_prompt_and_repeated_messages_have_no_weight():
  last_turn = np.array([0, 0, 0, 0, 0, 0, 0, 1, 1], bool)
  assert weights(two_turns.rollout(mask=last_turn)) == [[0] * 9]
  # The second sample has the same messages.
  assert weights(two_turns.rollout(samples=2), roles=role(tool=0.5)) == [
    [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0],
    [0] * 9,
  ]


def test_messages_between_samples_have_weight_once():
  """The next sample begins with the whole rewritten history."""
  first = two_turns.sample()
  # Message of each token: prompt, turn, tool, tool, tool | turn | tool, tool |
  # turn.
  second = two_turns.sample(
    mask=np.array([0, 0, 0, 0, 0, 1, 0, 0, 1], bool),
    roles=np.array([1, 2, 3, 2, 3, 2, 3, 3, 2], np.int8),
    is_content=np.ones(9, bool),
    message_ids=np.array([0, 1, 2, 3, 4, -1, 6, 6, -1], np.int32),
  )
  both = types.Rollout(
    0,
    two_turns.TASK,
    two_turns.MESSAGES * 2,
    (first, second),
    types.Score(1.0),
    'eos',
  )
  options = {'roles': role(tool=0.5, assistant=0.25)}
  assert weights(both, **options) == [
    [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0],
    [0, 0, 0, 0, 0.5, 0, 0.5, 0.5, 0],
  ]
  assert length.count(both).tool == 5


def test_assistant_messages_of_the_environment_have_weight():
  rollout = two_turns.rollout(
    roles=np.array([1, 1, 2, 2, 2, 2, 2, 2, 2], np.int8)
  )
  assert weights(rollout, roles=role(assistant=0.5)) == [
    [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0]
  ]


@pytest.mark.parametrize(
  ('function', 'message'),
  [
    ('no_list', 'one keep-mask per sample of task t: got NoneType, expec'),
    ('too_short', r'bool per token .*got \(\(1,\), .* expected \(\(9,\)'),
    ('numbers', 'bool per token .*got .* .int'),
  ],
)
def test_filter_masks_of_another_shape_or_dtype_raise(function, message):
  with pytest.raises(ValueError, match=message):
    weights(filter=schema.EchoFilter(f'{CREDITS}:{function}'))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'roles': {}}, 'roles must'),
    ({'roles': role(robot=0.1)}, "roles must .*'robot'"),
  ],
)
def test_options_that_select_nothing_raise(options, message):
  with pytest.raises(schema.FieldError, match=message):
    schema.Echo(**options)
  with pytest.raises(schema.FieldError, match='alpha must be > 0'):
    schema.EchoRole(alpha=0.0)
