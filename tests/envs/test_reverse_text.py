"""Reversing texts: parsing, grades, and disjoint splits."""

import pytest

from posttrain import schema
from posttrain.envs import registry, reverse_text


def make(**options):
  return registry.make('back', schema.ReverseText(**options))


@pytest.mark.parametrize(
  'text, answer',
  [
    ('dcba', 'dcba'),
    (' dcba\n', 'dcba'),
    ('', None),
    ('Dcba', None),
    ('dcba.', None),
    ('dcbä', None),
    ('Answer: dcba', None),
  ],
)
def test_parse_answer(text, answer):
  assert reverse_text.parse_answer(text) == answer
  assert reverse_text.parse_answer(text, truncated=True) is None


@pytest.mark.parametrize(
  'text, reward, correct',
  [
    ('edcba', 1.0, True),
    ('edcb', 8 / 9, False),  # one letter is missing
    ('edcbaa', 10 / 11, False),  # one too many
    ('abcde', 0.2, False),  # not reversed at all
    ('xyz', 0.0, False),
  ],
)
def test_grade(text, reward, correct):
  score = reverse_text.grade(text, 'edcba')
  assert score.reward == pytest.approx(reward)
  assert (score.correct, score.formatted) == (correct, True)
  assert score.answer == text.strip() and make().votes
  truncated = reverse_text.grade(text, 'edcba', truncated=True)
  assert (truncated.reward, truncated.formatted) == (0.0, False)
