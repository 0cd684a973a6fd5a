"""pass@k, maj@k and intervals: enumerated, against literals, at limits."""

import fractions
import itertools
import math
import random

import numpy as np
import pytest

from posttrain.metrics import estimates

Z2 = 1.959963984540054**2


def enumerated_majority(answers, correct, k):
  """Enumerates the votes of all subsets; tied values are equally likely."""
  total, count = fractions.Fraction(0), 0
  right = {}
  for value, grade in zip(answers, correct, strict=True):
    right.setdefault(value, []).append(grade)
  for subset in itertools.combinations(answers, k):
    count += 1
    votes = [value for value in subset if value is not None]
    most = max(map(votes.count, votes), default=0)
    tied = {value for value in votes if votes.count(value) == most}
    for value in tied:
      mean = fractions.Fraction(sum(right[value]), len(right[value]))
      total += mean / len(tied)
  return total / count


def test_pass_at_k_against_literals():
  # 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252
  assert estimates.pass_at(10, 3, 5) == pytest.approx(11 / 12)
  assert estimates.pass_at(10, 6, 5) == 1.0  # four are wrong, k is five
  assert estimates.pass_at(4, 0, 4) == 0.0
  # C(1000, 500) has 300 digits.
  assert estimates.pass_at(1000, 1, 500) == pytest.approx(0.5)


def test_majority_equals_the_enumeration_of_subsets():
  rng = random.Random(0)
  for _ in range(72):
    n = rng.randint(1, 8)
    answers = rng.choices(['1', '2', '3', '4', None], k=n)
    # The grade does not depend on the value alone.
    correct = [rng.random() < 0.5 for _ in answers]
    for k in range(1, n + 1):
      expected = float(enumerated_majority(answers, correct, k))
      found = estimates.majority_at(answers, correct, k)
      assert found == pytest.approx(expected, abs=1e-12), (answers, correct, k)


def wilson(right, n):
  """Wilson's interval in its usual form, other than the docstring's."""
  root = math.sqrt(Z2 * (Z2 + 4 * right * (n - right) / n))
  return tuple((2 * right + Z2 + s * root) / (2 * (n + Z2)) for s in (-1, 1))


def test_the_interval_against_literals():
  assert estimates.interval([False] * 5) == pytest.approx(wilson(0, 5))
  # 81 of 263 (Newcombe 1998, table I, method 3)
  interval = estimates.interval([1.0] * 81 + [0.0] * 182)
  assert interval == pytest.approx((0.2553, 0.3662), abs=5e-5)
  # Of 1/4 and 3/4 the variance is 1/16, a quarter of that of 0 and 1.
  interval = estimates.interval([0.25, 0.75] * 10)
  assert interval == pytest.approx(wilson(40, 80))


@pytest.mark.parametrize('value', [1.0, 1 / 3])
def test_equal_values_count_as_one_task_each(value):
  """Also those that differ by a rounding."""
  for values in ([value] * 7, [value] * 6 + [value - 1e-13]):
    expected = wilson(value * 7, 7)
    assert estimates.interval(values) == pytest.approx(expected)


def test_the_interval_contains_the_mean_and_is_within_0_and_1():
  rng = np.random.default_rng(0)
  for _ in range(200):
    n = rng.integers(1, 9)
    values, weights = rng.random(n).round(1), rng.integers(1, 5, n)
    low, high = estimates.interval(values, weights)
    mean = np.average(values, weights=weights)
    assert 0 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1


def test_95_percent_of_intervals_contain_the_mean():
  """Rates from a beta distribution, four answers each, 2000 intervals."""
  rng = np.random.default_rng(0)
  rates = rng.beta(2, 1, (2000, 40))
  shares = rng.binomial(4, rates) / 4
  low, high = np.transpose([*map(estimates.interval, shares)])
  assert 0.93 < np.mean((low <= 2 / 3) & (high >= 2 / 3)) < 0.97


def test_paired_differences_against_literals():
  # 1, 0, 1, -1: mean 1/4, variance 11/12
  difference = estimates.paired([1, 1, 1, 0, None, 1], [0, 1, 0, 1, 0, None])
  half = math.sqrt(Z2 * 11 / 12 / 4)
  assert difference == pytest.approx((0.25, 0.25 - half, 0.25 + half))
  assert estimates.paired([1.0, None], [0.0, 1.0]) is None  # one task


def test_a_bound_needs_the_metric_that_it_bounds():
  keys = {'eval/pass@8/a', 'eval/pass@8_low/a', 'eval/water_low/a'}
  bounds = [key for key in keys if estimates.is_bound(key, keys)]
  assert bounds == ['eval/pass@8_low/a']
