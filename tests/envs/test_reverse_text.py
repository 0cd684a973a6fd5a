"""Reversing texts: parsing, grades, and disjoint splits."""

import collections

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


def test_lengths_are_balanced_as_far_as_there_are_texts():
  source = make(min_length=1, max_length=6, train_tasks=3000).source('train', 0)
  texts = [task.id for task in source.take(3000)]
  counts = collections.Counter(map(len, texts))
  few = counts[1] + counts[2]  # of 26 + 676 texts, a fifth of them held out
  assert few == 538 and 15 < counts[1] < 26
  assert all(abs(counts[n] - (3000 - few) / 4) <= 1 for n in (3, 4, 5, 6))
  letters = collections.Counter(''.join(texts))
  assert len(letters) == 26 and min(letters.values()) > 300
