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


# Wilson's: 20 of 20 give [20 / (20 + z^2), 1].
ALL = 20 / (20 + Z2)


@pytest.mark.parametrize(
  ('rewards', 'low', 'high'),
  [
    ([1.0] * 20, ALL, 1),
    ([0.0] * 20, 0, 1 - ALL),
    # Mean 1, variance 20 / 19 x 4.
    ([3.0, -1.0] * 10, 1 - math.sqrt(Z2 * 4 / 19), 1 + math.sqrt(Z2 * 4 / 19)),
  ],
)
def test_intervals_of_rewards_of_0_and_1_stay_within_them(rewards, low, high):
  is_rate = estimates.is_rate('reward/x', rewards)
  interval = estimates.interval(rewards, is_rate=is_rate)
  assert interval == pytest.approx((low, high))


def test_equal_values_without_bounds_have_no_interval():
  assert estimates.interval([7.5] * 20, is_rate=False) is None
  assert estimates.paired([7.5] * 20, [6.0] * 20, False) == (1.5,)


@pytest.mark.parametrize(
  ('name', 'values', 'expected'),
  [
    ('reward/x', (0.0, 1.0, None), True),
    ('reward/x', (0.0, 0.5), False),
    ('margin', (-0.8, -0.8), False),
    ('sampled_pass_rate', (0.25, 0.5), True),
    ('pass@8', (0.25,), True),
    ('token_accuracy', (0.25,), True),
    ('nll', (0.25,), False),
  ],
)
def test_a_rate_has_its_name_or_values_of_0_and_1(name, values, expected):
  assert estimates.is_rate(name, values) == expected


def pairs(wins, losses, n):
  """Grades of n tasks, of which so many differ."""
  ties = n - wins - losses
  return [1] * wins + [0] * losses + [1] * ties, [0] * wins + [1] * (
    losses + ties
  )


EQUAL = Z2 / (20 + Z2)  # of q = 0: n x^2 = z^2 x (1 - x)


@pytest.mark.parametrize(
  ('first', 'second', 'expected'),
  [
    # Fagerland, Lydersen, Laake, Recommended tests and confidence intervals
    # for paired binomial proportions, Statistics in Medicine 2014.
    (*pairs(1, 7, 21), (-0.286, -0.517, -0.026)),
    (*pairs(7, 1, 21), (0.286, 0.026, 0.517)),
    (*pairs(0, 0, 20), (0, -EQUAL, EQUAL)),
    # q = (1 - x) / 2: n (1 - x)^2 = z^2 (1 - x^2)
    (*pairs(20, 0, 20), (1, (20 - Z2) / (20 + Z2), 1)),
    # All that two shares of 1/2 tell.
    ([0.5] * 20, [0.5] * 20, (0, -EQUAL, EQUAL)),
    # 3, 1, 2, 2: mean 2, variance 2/3
    (
      [4, 1, 1, 2],
      [1, 0, -1, 0],
      (2, 2 - math.sqrt(Z2 / 6), 2 + math.sqrt(Z2 / 6)),
    ),
  ],
)
def test_paired_differences_against_literals(first, second, expected):
  is_rate = 4 not in first
  difference = estimates.paired([*first, None], [*second, 1], is_rate)
  assert difference == pytest.approx(expected, abs=6e-4)
  assert estimates.paired(first[:1], second[:1]) is None


@pytest.mark.parametrize('scale', [1, 0.5])
def test_paired_bounds_solve_the_score_equation(scale):
  """The likelihood is maximized on a grid; halved differences are 4 n / 2."""
  wins, losses, n = 9, 3, 40
  first, second = (scale * np.array(x) for x in pairs(wins, losses, n))
  delta = scale * (wins - losses) / n
  if scale != 1:
    variance = scale**2 * 12 / n - delta**2
    ratio = (scale * 12 / n - delta**2) / variance
    wins, losses, n = (ratio * x for x in (scale * 9, scale * 3, n))
  for bound in estimates.paired(first, second)[1:]:
    q = np.linspace(max(0, -bound), (1 - bound) / 2, 400_002)[1:-1]
    ties = (n - wins - losses) * np.log1p(-2 * q - bound)
    q = q[np.argmax(wins * np.log(q + bound) + losses * np.log(q) + ties)]
    square = (wins - losses - n * bound) ** 2
    expected = Z2 * n * (2 * q + bound - bound**2)
    assert square == pytest.approx(expected, rel=1e-4)


def test_95_percent_of_paired_intervals_contain_the_difference():
  """Shares of four answers, difficulty shared by both policies."""
  rng = np.random.default_rng(0)
  rates = rng.beta(2, 1, (1000, 40))
  shares = rng.binomial(4, [rates, rates**2]) / 4
  truth = 2 / 3 - 1 / 2  # E[p] - E[p^2] of a beta distribution
  low, high = np.transpose(
    [estimates.paired(*both)[1:] for both in np.swapaxes(shares, 0, 1)]
  )
  assert 0.93 < np.mean((low <= truth) & (high >= truth)) < 0.97


def test_a_bound_needs_the_metric_that_it_bounds():
  keys = {'eval/pass@8/a', 'eval/pass@8_low/a', 'eval/water_low/a'}
  bounds = [key for key in keys if estimates.is_bound(key, keys)]
  assert bounds == ['eval/pass@8_low/a']
