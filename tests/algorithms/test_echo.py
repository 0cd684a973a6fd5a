"""Echo: exactly which of the environment's tokens, at which weight."""

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
    # A table that is set has no tool in it unless it says so.
    ({'roles': role(user=0.5)}, [0] * 9),
    ({'tools': ('search',)}, [0, 0, 0, 0, 0, TENTH, TENTH, 0, 0]),
    ({'tools': ('other',)}, [0] * 9),
    (
      {'filter': schema.EchoFilter(f'{CREDITS}:all_but', {'ids': [6]})},
      [0, 0, 0, 0, 0, 0, TENTH, 0, 0],
    ),
    # It narrows, and adds nothing.
    (
      {'filter': schema.EchoFilter(f'{CREDITS}:all_but')},
      [0, 0, 0, 0, 0, TENTH, TENTH, 0, 0],
    ),
  ],
)
def test_what_is_chosen(options, expected):
  assert weights(**options) == [expected]


def test_roles_by_what_they_say():
  said = two_turns.rollout(roles=np.array([1, 1, 2, 2, 1, 1, 3, 2, 2], np.int8))
  assert weights(said, roles=role(user=0.5, tool=0.25)) == [
    [0, 0, 0, 0, 0, 0.5, 0.25, 0, 0]
  ]


def test_the_prompt_is_not_chosen_nor_anything_twice():
  late = np.array([0, 0, 0, 0, 0, 0, 0, 1, 1], bool)
  assert weights(two_turns.rollout(mask=late)) == [[0] * 9]
  # The second sample shows the same messages.
  assert weights(two_turns.rollout(samples=2), roles=role(tool=0.5)) == [
    [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0],
    [0] * 9,
  ]


def test_what_is_said_between_samples_is_learned_once():
  """A history that was rewritten begins the next sample, all of it given."""
  first = two_turns.sample()
  # prompt, own turn, tool's first word, its second one | own turn | tool's
  # third word | own turn
  second = two_turns.sample(
    mask=np.array([0, 0, 0, 0, 0, 1, 0, 0, 1], bool),
    roles=np.array([1, 2, 3, 2, 3, 2, 3, 3, 2], np.int8),
    is_content=np.ones(9, bool),
    message_ids=np.array([0, 1, 2, 3, 4, -1, 6, 6, -1], np.int32),
  )
  says = two_turns.rollout()
  both = types.Rollout(
    0,
    two_turns.TASK,
    two_turns.MESSAGES * 2,
    (first, second),
    says.score,
    'eos',
  )
  options = {'roles': role(tool=0.5, assistant=0.25)}
  assert weights(both, **options) == [
    [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0],
    [0, 0, 0, 0, 0.5, 0, 0.5, 0.5, 0],
  ]
  assert length.count(both).tool == 5


def test_assistant_turns_that_nobody_sampled():
  said = two_turns.rollout(roles=np.array([1, 1, 2, 2, 2, 2, 2, 2, 2], np.int8))
  assert weights(said, roles=role(assistant=0.5)) == [
    [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0]
  ]


@pytest.mark.parametrize(
  ('function', 'message'),
  [
    ('no_list', 'one keep-mask per sample of task t: got NoneType, expec'),
    ('too_short', r'bool per token: got shape \(1,\) .* expected \(9,\)'),
    ('numbers', 'bool per token: got .* of type int'),
  ],
)
def test_masks_are_checked(function, message):
  with pytest.raises(ValueError, match=message):
    weights(filter=schema.EchoFilter(f'{CREDITS}:{function}'))


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'roles': {}}, 'roles must enable one of'),
    ({'roles': role(robot=0.1)}, "must name roles .*'robot'"),
    ({'roles': role(user=0.1), 'tools': ('x',)}, "roles has no 'tool'"),
  ],
)
def test_tables_that_say_nothing(options, message):
  with pytest.raises(schema.FieldError, match=message):
    schema.Echo(**options)
  with pytest.raises(schema.FieldError, match='alpha must be > 0'):
    schema.EchoRole(alpha=0.0)
  with pytest.raises(schema.FieldError, match='nothing reads it without'):
    schema.EchoFilter(kwargs={'a': 1})
