"""The longest common subsequence against its textbook dynamic program."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rewards import similarity


@pytest.mark.parametrize(
  'one, other, length',
  [
    ('', '', 0),
    ('', 'a', 0),
    ('abc', 'abc', 3),
    ('abc', 'cba', 1),
    ('abcde', 'xaye', 2),
    ('aab', 'ab', 2),
    ('ab' * 40, 'ba' * 40, 79),
    (['Ada', 'Ben', 'Cio'], ('Ada', 'Cio'), 2),
  ],
)
def test_lcs(one, other, length):
  assert similarity.lcs(one, other) == similarity.lcs(other, one) == length


@pytest.mark.parametrize(
  'one, other, ratio',
  [
    ('abcd', 'abcd', 1.0),
    ('abcd', 'dcba', 0.25),
    ('abcd', 'ab', 2 / 3),
    ('abcd', 'xyz', 0.0),
    ('', 'abc', 0.0),
    ('', '', 1.0),
  ],
)
def test_ratio(one, other, ratio):
  assert similarity.ratio(one, other) == ratio


def table(one, other):
  """Returns the length by Wagner and Fischer's dynamic program."""
  best = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
  for i, a in enumerate(one):
    for j, b in enumerate(other):
      best[i + 1][j + 1] = (
        best[i][j] + 1 if a == b else max(best[i][j + 1], best[i + 1][j])
      )
  return best[-1][-1]


@given(st.text('abc', max_size=30), st.text('abcd', max_size=30))
@settings(max_examples=200, deadline=None)
def test_lcs_equals_the_dynamic_program(one, other):
  assert similarity.lcs(one, other) == table(one, other)
