"""Countdown: expressions are read and graded exactly."""

import fractions
import itertools

import pytest

from posttrain import schema
from posttrain.envs import countdown


@pytest.mark.parametrize(
  ('text', 'value', 'numbers'),
  [
    ('44+19+35', 98, [19, 35, 44]),
    ('(2 - 5) * 3', -9, [2, 3, 5]),
    ('8/(3-8/3)', 24, [3, 3, 8, 8]),
    ('1/3', fractions.Fraction(1, 3), [1, 3]),
    ('2-3-4', -5, [2, 3, 4]),
    ('2-(3-4)', 3, [2, 3, 4]),
    ('12/3/2', 2, [2, 3, 12]),
  ],
)
def test_expressions_are_evaluated_exactly(text, value, numbers):
  assert countdown.evaluate(text) == (value, numbers)


@pytest.mark.parametrize(
  'text',
  [
    *('', '1+', '1/0', '1/(2-2)', '2**3', '7//2', '-1+2', '+1', '1 2', '01+2'),
    *('(1+2', '1,2', '1+x', 'len(1)', '1.5+2', '1_0+2', '(1)(2)', '1+2=3'),
    *('1\n+2', '9' * 101, '(' * 99, '1+' * 60 + '1', '٣+1'),
  ],
)
def test_what_is_no_expression_has_no_value(text):
  assert countdown.evaluate(text) is None


@pytest.mark.parametrize(
  ('text', 'correct', 'formatted'),
  [
    (r'\boxed{(44-19)*35}', False, True),
    ('so <answer> 44 + 19 + 35 </answer>.', True, True),
    (r'\boxed{44 + 19 + 35}', True, True),
    (r'<answer> $\boxed{44 + 19 + 35}$ </answer>', True, True),
    (r'\boxed{35 \times 44 / 19}', False, True),
    # Each number once.
    (r'\boxed{98}', False, True),
    (r'\boxed{44+19+35+19-19}', False, True),
    (r'\boxed{44+19}', False, True),
    # The last answer counts, outside of thoughts.
    (r'\boxed{1} \boxed{44+19+35}', True, True),
    (r'\boxed{44+19+35} \boxed{1}', False, True),
    (r'<think>\boxed{1}</think>\boxed{44+19+35}', True, True),
    (r'<think>\boxed{44+19+35}</think>', False, False),
    ('44+19+35', False, False),
    (r'\boxed{44+19+35=98}', False, False),
  ],
)
def test_an_answer_has_each_number_once(text, correct, formatted):
  score = countdown.grade(text, [19, 44, 35], 98)
  assert (score.correct, score.formatted) == (correct, formatted)
  assert score.reward == float(correct)


def test_signs_of_latex_are_read():
  score = countdown.grade(r'\boxed{2 \times 6 \div 3}', [2, 3, 6], 4)
  assert score.correct


def test_texts_of_drawn_expressions_have_their_values():
  """With no parenthesis that could be left out."""
  drawn = 0
  for picks in itertools.product(range(3), range(2), range(4), *[range(4)] * 3):
    stream = iter(picks)
    found = countdown.draw([6, 3, 2], lambda n, it=stream: next(it) % n)
    if found is None:
      continue
    value, text, steps = found
    drawn += 1
    assert countdown.evaluate(text) == (value, [2, 3, 6])
    assert steps[-1].endswith(f'={value}') and len(steps) == 2
    if '(' in text:
      bare = countdown.evaluate(text.replace('(', '').replace(')', ''))
      assert bare != (value, [2, 3, 6])
  assert drawn > 50


def test_a_task_has_the_numbers_of_its_multiset():
  env = countdown.Countdown(
    'e', schema.Countdown(sizes=(3, 4, 6), worked=False)
  )
  sizes = set()
  for task in env.source('eval', 0).take(60):
    numbers = sorted(task.info['numbers'])
    sizes.add(len(numbers))
    assert task.id == ','.join(map(str, numbers))
    assert 1 <= numbers[0] and numbers[-1] <= 99 and 1 <= task.answer <= 100
    assert f'equals {task.answer}.' in task.prompt[0]['content']
    assert task.demonstration[0]['content'].startswith('\\boxed')
  assert sizes == {3, 4, 6}
