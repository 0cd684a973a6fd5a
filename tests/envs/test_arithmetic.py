"""Arithmetic: the checker, the demonstrations, and disjoint splits."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain import schema
from posttrain.envs import arithmetic, registry


def make(**options):
  return registry.make('sums', schema.Arithmetic(**options))


@pytest.mark.parametrize(
  'text, answer',
  [
    (r'\boxed{132}', 132),
    (r'\boxed{1} then \boxed{2}', 2),
    (r'\boxed{1,234}', None),
    (r'\boxed{1', None),
    ('132', None),
    # What comes last is what is meant, also where it is cut off.
    (r'\boxed{1} \boxed{13', None),
    (r'\boxed{' + '9' * 5000 + '}', None),
    (r'\boxed{5} \boxed{x} \boxed', None),
  ],
)
def test_parse_answer(text, answer):
  assert arithmetic.parse_answer(text) == answer


@pytest.mark.parametrize(
  'a, op, b, text',
  [
    (47, '+', 85, r'40+80=120, 7+5=12, 120+12=\boxed{132}'),
    (35, '-', 85, r'30-80=-50, 5-5=0, -50-0=\boxed{-50}'),
    (
      123,
      '+',
      8,
      '100+0=100, 20+0=20, 3+8=11, 100+20=120, '
      r'120+11=\boxed{131}',
    ),
    (7, 'x', 8, r'7x8=\boxed{56}'),
  ],
)
def test_the_worked_form_is_literal(a, op, b, text):
  assert arithmetic.demonstrate(a, op, b, worked=True) == text


@pytest.mark.parametrize(
  'key, mistake, text',
  [
    ((47, '+', 85), 1, r'40+80=130, 7+5=12, 130+12=\boxed{142}'),
    ((3, '-', 3), -1, r'0-0=-1, 3-3=0, -1-0=\boxed{-1}'),
  ],
)
def test_a_demonstration_with_a_wrong_step_is_literal(key, mistake, text):
  assert arithmetic.demonstrate(*key, worked=True, mistake=mistake) == text


def holds(equation):
  """Checks `left=right` by Python's own arithmetic."""
  left, right = equation.split('=')
  right = right.removeprefix('\\boxed{').removesuffix('}')
  return eval(left.replace('x', '*')) == int(right)  # digits and + - * only


keys = st.one_of(
  st.tuples(st.integers(0, 999), st.sampled_from('+-'), st.integers(0, 999)),
  st.tuples(st.integers(0, 99), st.just('x'), st.integers(0, 99)),
)


@given(keys, st.booleans(), st.sampled_from([0, 1, -1, 99]))
@settings(max_examples=400, deadline=None)
def test_every_step_but_a_mistake_is_correct(key, worked, mistake):
  a, op, b = key
  text = arithmetic.demonstrate(a, op, b, worked=worked, mistake=mistake)
  answer = {'+': a + b, '-': a - b, 'x': a * b}[op]
  assert arithmetic.parse_answer(text) is not None
  assert arithmetic.grade(text, answer).correct == (not mistake)
  if worked:
    steps = text.split(', ')
    assert [holds(step) for step in steps].count(False) == bool(mistake)
    assert all('boxed' not in step for step in steps[:-1])
  assert len(text) <= (38 if max(a, b) < 100 and op != 'x' else 92)


def test_mistakes_is_the_share_of_wrong_demonstrations():
  """A fixed share of the demonstrations is wrong; grading is not."""
  tasks = make(mistakes=0.3).source('train', 0).take(8000)
  wrong = sum(
    not arithmetic.grade(t.demonstration[0]['content'], t.answer).correct
    for t in tasks
  )
  assert 0.28 < wrong / 8000 < 0.32
  # What a run was trained on is not for a library's next version to change.
  assert make(mistakes=0.3)._mistake(77, '-', 74) == 600
