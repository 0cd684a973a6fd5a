"""pass@k, maj@k and intervals: enumerated, by hand, at their limits."""

import fractions
import itertools
import math
import random

import numpy as np
import pytest

from posttrain.metrics import estimates

Z2 = 1.959963984540054**2


def enumerated_pass(correct, k):
  """Looks at every subset."""
  subsets = list(itertools.combinations(correct, k))
  return fractions.Fraction(sum(map(any, subsets)), len(subsets))


def enumerated_majority(answers, correct, k):
  """Lets every subset vote, and every tied answer win as often."""
  total, count = fractions.Fraction(0), 0
  right = {}
  for said, grade in zip(answers, correct, strict=True):
    right.setdefault(said, []).append(grade)
  for subset in itertools.combinations(answers, k):
    count += 1
    votes = [said for said in subset if said is not None]
    most = max(map(votes.count, votes), default=0)
    tied = {said for said in votes if votes.count(said) == most}
    for said in tied:
      mean = fractions.Fraction(sum(right[said]), len(right[said]))
      total += mean / len(tied)
  return total / count


@pytest.mark.parametrize('n', [1, 2, 5, 8])
def test_pass_at_k_counts_the_subsets_with_a_right_one(n):
  for c in range(n + 1):
    for k in range(1, n + 1):
      expected = enumerated_pass([True] * c + [False] * (n - c), k)
      assert estimates.pass_at(n, c, k) == pytest.approx(float(expected))


def test_pass_at_k_by_hand():
  # 1 - C(7, 5) / C(10, 5) = 1 - 21 / 252
  assert estimates.pass_at(10, 3, 5) == pytest.approx(11 / 12)
  assert estimates.pass_at(10, 6, 5) == 1.0  # four are wrong, five are asked
  assert [estimates.pass_at(4, c, 4) for c in (0, 1, 4)] == [0.0, 1.0, 1.0]
  assert estimates.pass_at(8, 3, 1) == pytest.approx(3 / 8)
  # C(1000, 500) has 300 digits.
  assert estimates.pass_at(1000, 1, 500) == pytest.approx(0.5)
  assert estimates.pass_at(1000, 0, 500) == 0.0


@pytest.mark.parametrize('seed', range(6))
def test_majority_is_that_of_every_subset(seed):
  rng = random.Random(seed)
  for _ in range(12):
    n = rng.randint(1, 8)
    answers = rng.choices(['1', '2', '3', '4', None], k=n)
    right = {'1': rng.random() < 0.8, '2': rng.random() < 0.3}
    correct = [right.get(said, False) for said in answers]
    if rng.random() < 0.3:  # graded by more than what is said
      correct = [rng.random() < 0.5 for _ in answers]
    for k in range(1, n + 1):
      expected = enumerated_majority(answers, correct, k)
      assert estimates.majority_at(answers, correct, k) == pytest.approx(
        float(expected), abs=1e-12
      ), (answers, correct, k)


@pytest.mark.parametrize('sizes', [(4, 4, 4, 4), (3, 6, 6, 3), (9, 2, 1, 8)])
def test_majority_among_several_that_may_tie(sizes):
  """The first is right; by how many of each, as there are many subsets."""
  silent, n = 5, sum(sizes) + 5
  said = [*np.repeat(list('abcd'), sizes), *[None] * silent]
  ways = dict.fromkeys(range(1, n + 1), fractions.Fraction(0))
  for *votes, rest in itertools.product(*map(range, np.add((*sizes, 5), 1))):
    if any(votes) and votes[0] == max(votes):
      count = math.prod(map(math.comb, (*sizes, silent), (*votes, rest)))
      tied = votes.count(votes[0])
      ways[sum(votes) + rest] += fractions.Fraction(count, tied)
  for k, found in ways.items():
    assert estimates.majority_at(
      said, [x == 'a' for x in said], k
    ) == pytest.approx(float(found / math.comb(n, k)))


@pytest.mark.parametrize(
  'answers, right, k, expected',
  [
    ('aab', 'a', 3, 1.0),
    ('abb', 'a', 3, 0.0),
    ('ab', 'a', 2, 1 / 2),  # a tie of two
    ('abc', 'a', 3, 1 / 3),
    ('aabbc', 'a', 5, 1 / 2),
    ('aabb', 'ab', 4, 1.0),  # both are right
    ('a--', 'a', 3, 1.0),  # who cannot be read does not vote
    ('a-', 'a', 1, 1 / 2),  # but one who is alone loses
    ('---', '', 2, 0.0),
    ('bbb', 'a', 2, 0.0),
    ('aaa', 'a', 2, 1.0),
    # aa, ab, ab: 1, 1/2, 1/2
    ('aab', 'a', 2, 2 / 3),
    # Of 10 triples 1 is aaa, 6 have two a, 3 have two b.
    ('aaabb', 'a', 3, 0.7),
    # Of 10 triples 3 have two a; 6 have one, with two others: a third each.
    ('aabcd', 'a', 3, 0.5),
  ],
)
def test_majority_by_hand(answers, right, k, expected):
  said = [None if x == '-' else x for x in answers]
  correct = [x in right for x in answers]
  assert estimates.majority_at(said, correct, k) == pytest.approx(expected)


def test_majority_of_one_and_of_two_is_the_mean():
  rng = random.Random(0)
  said = [str(rng.randint(0, 9)) for _ in range(64)]
  correct = [x in '01' for x in said]
  for k in (1, 2):  # two that differ are a tie
    assert estimates.majority_at(said, correct, k) == pytest.approx(
      np.mean(correct)
    )
  # What is right but cannot be read casts no vote.
  assert estimates.majority_at([None, 'a'], [True, False], 1) == 0.0


def test_majority_of_a_thousand_answers_is_finite():
  """Among the products is C(1000, 500), of 300 digits."""
  said = ['a'] * 500 + ['b'] * 500
  half = estimates.majority_at(said, [x == 'a' for x in said], 500)
  assert half == pytest.approx(0.5)
  assert estimates.majority_at(said, [True] * 1000, 3) == pytest.approx(1.0)


def test_majority_at_the_size_of_an_evaluation():
  """1000 tasks of 64 answers; it would be hours by subsets."""
  rng = np.random.default_rng(0)
  rates = {8: [], 64: []}
  for _ in range(1000):
    law = rng.dirichlet(np.full(12, 0.5))
    said = [str(x) for x in rng.choice(12, size=64, p=law)]
    for k, found in rates.items():
      found.append(estimates.majority_at(said, [x == '0' for x in said], k))
  # A fixed law of twelve answers: the majority is the one that is likeliest.
  assert abs(np.mean(rates[64]) - 1 / 12) < 0.03
  assert 0 <= min(rates[8]) and max(rates[8]) <= 1


def wilson(right, n):
  """As tables have it, in another form than the one of the docstring."""
  root = math.sqrt(Z2 * (Z2 + 4 * right * (n - right) / n))
  return tuple((2 * right + Z2 + s * root) / (2 * (n + Z2)) for s in (-1, 1))


@pytest.mark.parametrize('right, n', [(0, 5), (5, 5), (3, 8), (1, 1), (70, 90)])
def test_of_right_and_wrong_the_interval_is_wilsons(right, n):
  values = [True] * right + [False] * (n - right)
  assert estimates.interval(values) == pytest.approx(wilson(right, n))


def test_the_interval_by_hand():
  # 81 of 263 (Newcombe 1998, table I, method 3)
  found = estimates.interval([1.0] * 81 + [0.0] * 182)
  assert found == pytest.approx((0.2553, 0.3662), abs=5e-5)
  # Of 1/4 and 3/4 the variance is 1/16, a quarter of that of 0 and 1.
  found = estimates.interval([0.25, 0.75] * 10)
  assert found == pytest.approx(wilson(40, 80))


@pytest.mark.parametrize('value, n', [(0.0, 4), (1.0, 4), (0.5, 1), (1 / 3, 7)])
def test_where_all_are_equal_each_counts_as_one_task(value, n):
  expected = wilson(value * n, n)
  assert estimates.interval([value] * n) == pytest.approx(expected)
  off = 1e-13 if value < 1 else -1e-13  # by a rounding
  assert estimates.interval([value] * n + [value + off]) == pytest.approx(
    wilson(value * (n + 1), n + 1)
  )
  if value == 1:
    assert estimates.interval([1.0] * n)[1] == 1.0
    assert expected[0] == pytest.approx(n / (n + Z2))


def test_the_interval_holds_its_mean_and_stays_in_the_unit():
  rng = np.random.default_rng(0)
  for _ in range(200):
    n = rng.integers(1, 9)
    values, weights = rng.random(n).round(1), rng.integers(1, 5, n)
    low, high = estimates.interval(values, weights)
    mean = np.average(values, weights=weights)
    assert 0 <= low <= mean + 1e-12 and mean - 1e-12 <= high <= 1


def test_weights_are_those_of_answers():
  values = [0.0, 0.5, 1.0, 0.25]
  alone = estimates.interval(values)
  assert estimates.interval(values, [3, 3, 3, 3]) == pytest.approx(alone)
  # p = 3/4, and (1/2 3/4)^2 = (3/2 1/4)^2 = 9/64, so that N = 2 3/16 64/9.
  assert estimates.interval([0, 1], [1, 3]) == pytest.approx(wilson(2, 8 / 3))
  low, high = estimates.interval(values, [1, 1, 8, 1])
  assert low > alone[0] and high > alone[1]


def test_more_answers_to_a_task_never_hide_that_tasks_differ():
  """Whoever counts answers has a far narrower interval."""
  easy, hard = [1.0] * 10, [0.0] * 10
  assert estimates.interval(easy + hard, [64] * 20) == pytest.approx(
    wilson(10, 20)
  )


def test_the_interval_covers():
  """Tasks of a beta law, four answers each: 95 % of 2000 intervals."""
  rng = np.random.default_rng(0)
  rates = rng.beta(2, 1, (2000, 40))
  shares = rng.binomial(4, rates) / 4
  inside = [
    low <= 2 / 3 <= high for low, high in map(estimates.interval, shares)
  ]
  assert 0.93 < np.mean(inside) < 0.97


def test_paired_differences():
  # 1, 0, 1, -1: mean 1/4, variance 11/12
  found = estimates.paired([1, 1, 1, 0, None, 1], [0, 1, 0, 1, 0, None])
  half = math.sqrt(Z2 * 11 / 12 / 4)
  assert found == pytest.approx((0.25, 0.25 - half, 0.25 + half))
  assert estimates.paired([0.5, 1.0], [0.25, 0.75]) == (0.25, 0.25, 0.25)
  assert estimates.paired([1.0, None], [0.0, 1.0]) is None  # one task
  assert estimates.paired([], []) is None


def test_a_bound_is_that_of_another_metric():
  keys = {'eval/pass@8/a', 'eval/pass@8_low/a', 'eval/water_low/a'}
  assert [key for key in sorted(keys) if estimates.is_bound(key, keys)] == [
    'eval/pass@8_low/a'
  ]
  assert not estimates.is_bound('eval/pass@8_low/b', keys)
