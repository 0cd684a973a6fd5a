"""Draws that differ between runs, on laws and draws by hand."""

import numpy as np
import pytest

from experiments.trials import flips


def _row(ids, drawn):
  return {'ids': ids, 'mask': [i >= len(ids) - drawn for i in range(len(ids))]}


def test_equal_sequences_are_no_pair():
  rows = [_row([1, 2, 3], 1), _row([1, 2, 4], 1)]
  assert list(flips.pairs(rows, rows[::-1])) == []


def test_sequences_are_matched_by_their_prefix():
  """One of two completions of a prompt differs, whatever their order."""
  first = [_row([1, 2, 5, 5, 6], 3), _row([1, 2, 7, 7, 7], 3)]
  second = [_row([1, 2, 7, 7, 8], 3), _row([1, 2, 5, 5, 6], 3)]
  assert list(flips.pairs(first, second)) == [(first[1], second[0])]


def test_two_that_differ_take_the_nearest():
  first = [_row([1, 5, 5, 5], 3), _row([1, 6, 6, 6], 3)]
  second = [_row([1, 6, 6, 9], 3), _row([1, 5, 9, 9], 3)]
  found = list(flips.pairs(first, second))
  assert found == [(first[0], second[1]), (first[1], second[0])]


@pytest.mark.parametrize(
  ('token', 'number', 'distance'),
  [(0, 0.1, 0.0), (0, 0.25, 0.05), (1, 0.19, 0.01), (2, 0.5, 0.2), (3, 1, 0)],
)
def test_the_distance_of_a_number_from_an_interval(token, number, distance):
  """The law 0.2, 0.5, 0.2, 0.1."""
  ends = np.array([[0.2, 0.7, 0.9, 1.0]])
  got = flips._distance(ends, np.array([token]), np.array([[number]]))
  np.testing.assert_allclose(got, [[distance]], atol=1e-12)
