"""Echo: exactly which of the environment's tokens, at which weight."""

import numpy as np
import pytest

from posttrain import algorithms, schema
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
        ({'filter': schema.EchoFilter(f'{CREDITS}:all_but', {'ids': [6]})},
         [0, 0, 0, 0, 0, 0, TENTH, 0, 0]),
        # It narrows, and adds nothing.
        ({'filter': schema.EchoFilter(f'{CREDITS}:all_but')},
         [0, 0, 0, 0, 0, TENTH, TENTH, 0, 0]),
    ],
)  # fmt: skip
def test_what_is_chosen(options, expected):
  assert weights(**options) == [expected]


def test_roles_by_what_they_say():
  said = two_turns.rollout(
      roles=np.array([1, 1, 2, 2, 1, 1, 3, 2, 2], np.int8)
  )
  assert weights(said, roles=role(user=0.5, tool=0.25)) == [
      [0, 0, 0, 0, 0, 0.5, 0.25, 0, 0]
  ]


def test_the_prompt_is_not_chosen_and_each_sample_begins_anew():
  late = np.array([0, 0, 0, 0, 0, 0, 0, 1, 1], bool)
  assert weights(two_turns.rollout(mask=late)) == [[0] * 9]
  assert weights(two_turns.rollout(samples=2), roles=role(tool=0.5)) == [
      [0, 0, 0, 0, 0, 0.5, 0.5, 0, 0]
  ] * 2


def test_assistant_turns_that_nobody_sampled():
  said = two_turns.rollout(
      roles=np.array([1, 1, 2, 2, 2, 2, 2, 2, 2], np.int8)
  )
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
