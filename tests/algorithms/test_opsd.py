"""Self-distillation: the hint, and the sources of its demonstration."""

import dataclasses

import numpy as np
import pytest

from posttrain import algorithms, schema
from tests.algorithms import two_turns


def hints(task=two_turns.TASK, **options):
  scorer = two_turns.Scorer()
  two_turns.finalize(
    algorithms.make(schema.Opsd(template='See: {demonstration}.', **options)),
    [[two_turns.rollout(task=task)]],
    scorer,
  )
  ((reference, (hint,)),) = scorer.calls
  (message,) = hint
  assert reference == options.get('reference', 'init')
  return message


def system(text):
  return {'role': 'system', 'content': f'See: {text}.'}


@pytest.mark.parametrize(
  ('options', 'text'),
  [
    ({}, '3 + 4 is 7'),
    ({'demonstration': 'answer'}, '7'),
    ({'demonstration': 'info.hint'}, 'add'),
    (
      {'demonstration': 'tests.algorithms.credits:hidden_answer'},
      'the answer to t is hidden',
    ),
    ({'reference': 'ema:0.9'}, '3 + 4 is 7'),
  ],
)
def test_the_hint_has_the_demonstration_of_each_source(options, text):
  assert hints(**options) == system(text)


def test_a_demonstration_of_several_turns_has_their_roles():
  task = dataclasses.replace(
    two_turns.TASK, demonstration=two_turns.MESSAGES[1:]
  )
  assert hints(task) == system('assistant: a\ntool: o\nassistant: b')
  assert hints(role='user')['role'] == 'user'


def test_braces_in_a_template_or_a_demonstration_are_text():
  scorer = two_turns.Scorer()
  task = dataclasses.replace(two_turns.TASK, answer='{x} \\boxed{7}')
  algorithm = algorithms.make(
    schema.Opsd(template='{a} {demonstration} {b', demonstration='answer')
  )
  two_turns.finalize(algorithm, [[two_turns.rollout(task=task)]], scorer)
  ((_, ((message,),)),) = scorer.calls
  assert message['content'] == '{a} {x} \\boxed{7} {b'


@pytest.mark.parametrize('key', ['nothing', 'blank', 'number'])
def test_a_missing_demonstration_raises_with_the_row(key):
  algorithm = algorithms.make(schema.Opsd(demonstration=f'info.{key}'))
  with pytest.raises(ValueError, match='row t of environment e .* opsd: got'):
    algorithm.check(two_turns.TASK)


def test_a_bare_answer_as_demonstration_warns_once():
  with pytest.warns(UserWarning, match="of task t is its bare answer, '7'"):
    algorithm = algorithms.make(schema.Opsd(demonstration='answer'))
    algorithm.check(two_turns.TASK)
  algorithm.check(two_turns.TASK)  # once, not for every task
  algorithms.make(schema.Opsd()).check(two_turns.TASK)


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'demonstration': 'info.'}, 'demonstration must be'),
    ({'demonstration': 'key'}, 'demonstration must be'),
    ({'template': 'none'}, 'must hold {demonstration} once'),
    ({'role': 'tool'}, 'role must be one of'),
    ({'reference': ''}, 'reference must be'),
    ({'reference': 'ema:1.5'}, 'reference must be'),
    ({'reference': 'snapshot:0'}, 'reference must be'),
  ],
)
def test_invalid_options_raise(options, message):
  with pytest.raises(schema.FieldError, match=message):
    schema.Opsd(**options)


def test_the_teacher_of_opd_must_be_another_model():
  with pytest.raises(schema.FieldError, match='reference must'):
    schema.Opd()
  with pytest.raises(schema.FieldError, match="reference must .*'policy'"):
    schema.Opd(reference='policy')
  with pytest.raises(schema.FieldError, match='base_url must'):
    schema.Opd(reference=schema.Endpoint(name='x'))
  np.testing.assert_equal(schema.ema_or_snapshot('ema:0.99'), ('ema', 0.99))
  np.testing.assert_equal(
    schema.ema_or_snapshot('snapshot:50'), ('snapshot', 50)
  )
  assert schema.ema_or_snapshot('stage:ema') is None
