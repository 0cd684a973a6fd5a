"""Estimates from n answers to each of several tasks, and their intervals.

Tasks are the independent units: answers to one task are more alike than
answers to different ones. So an interval is over tasks, for any number of
answers per task. Everything is computed exactly, without random draws.
"""

import collections
import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Z = statistics.NormalDist().inv_cdf(0.975)  # 1.96, for 95 % intervals
BOUNDS = ('_low', '_high')  # suffixes of a metric's name
_ROUNDING = 1e-9  # values that differ by less are equal


def is_bound(key: str, among: Collection[str]) -> bool:
  """Returns whether a metric is a bound of another one among the keys.

  `eval/pass_rate_low/sums` is a bound if `eval/pass_rate/sums` is a key.

  Args:
    key: the metric's name.
    among: all names.
  """
  name, _, env = key.rpartition('/')
  return name.endswith(BOUNDS) and f'{name.rpartition("_")[0]}/{env}' in among


def bound_keys(key: str) -> list[str]:
  """Returns the names of a metric's bounds."""
  name, _, env = key.rpartition('/')
  return [f'{name}{side}/{env}' for side in BOUNDS]


class Value(NamedTuple):
  """A number as a text, and its interval, '' if it has none."""

  text: str = ''
  interval: str = ''


def formatted(row: Mapping[str, Any], key: str, style: str) -> Value:
  """Returns a metric of a row with its interval, empty texts if missing."""
  if row.get(key) is None:
    return Value()
  bounds, text = map(row.get, bound_keys(key)), style.format(row[key])
  known = [style.format(x) for x in bounds if x is not None]
  return Value(text, f'[{", ".join(known)}]' if known[1:] else '')


def change(
  first: Mapping[str, Any], last: Mapping[str, Any], key: str
) -> tuple[float, float, float, str] | None:
  """Returns the change of a metric between two rows, and its 95 % bounds.

      d = b - a,    d - sqrt((b - b_low)^2 + (a_high - a)^2)
                to  d + sqrt((b_high - b)^2 + (a - a_low)^2)

  As if both rows had tasks of their own; or, where the tasks are the same, the
  paired difference, which is narrower.

  Args:
    first, last: the rows; the last may have paired differences,
      'difference/...' with their bounds.
    key: the metric, 'eval/...'.

  Returns:
    (change, low, high, whether 0 is between them in words); None where a value
    or a bound is missing.

  References:
    Newcombe, Interval Estimation for the Difference between Independent
    Proportions, Statistics in Medicine 1998, method 10.
  """
  keys = key, *bound_keys(key)
  known = [last.get(x.replace('eval', 'difference', 1)) for x in keys]
  if None in known:
    known = [row.get(x) for row in (first, last) for x in keys]
    if None in known:
      return None
    a, a_low, a_high, b, b_low, b_high = known
    low = math.hypot(b - b_low, a_high - a)
    known = b - a, b - a - low, b - a + math.hypot(b_high - b, a - a_low)
  gain, low, high = known
  is_worse = (gain > 0) == key.startswith(('eval/nll/', 'eval/teacher_kl/'))
  words = f'for the {"worse" if is_worse else "better"}, and '
  words = f'{"no " if low <= 0 <= high else words}more than chance explains'
  return gain, low, high, words


def pass_at(n: int, correct: int, k: int) -> float:
  """Returns the probability that k of n answers hold a correct one.

      1 - C(n - c, k) / C(n, k)

  An unbiased estimate for k fresh answers. k = n gives 1 if any answer is
  correct, else 0; k = 1 gives c / n. Exactly 1 where fewer than k are wrong.

  Args:
    n: number of answers to the task.
    correct: c, number of correct answers.
    k: in [1, n].

  References:
    Chen et al., Evaluating Large Language Models Trained on Code,
    arXiv 2107.03374.
  """
  assert 0 <= correct <= n and 1 <= k <= n, (n, correct, k)
  return 1 - math.comb(n - correct, k) / math.comb(n, k)


def majority_at(
  answers: Sequence[str | None], correct: Sequence[bool], k: int
) -> float:
  """Returns the probability that the majority of k of n answers is correct.

      E_S[ mean of w_a over the a that have the most votes in S ]

  where S is any of the C(n, k) subsets of k answers, equally likely, each
  answer is a vote for its value a, and w_a is the share of the answers with
  value a that are correct (0 or 1, unless the grade depends on more than the
  value). So ties are broken uniformly among the tied values. An answer that
  could not be parsed is no vote, and a subset without a vote is wrong.

  k = n is the vote of all answers; k = 1 is the share of answers that are
  correct and parsed; k = 2 is equal to it where all are parsed.

  For each correct a, and each number v of its votes, the other answers are
  counted by a polynomial product, whose terms x^d y^t are the ways to draw d
  of them so that t other values have v votes as well, and none has more.

  Args:
    answers: value of each answer in a canonical form; None = not parsed.
    correct: grade of each answer.
    k: in [1, n].

  References:
    Wang et al., Self-Consistency Improves Chain of Thought Reasoning in
    Language Models, arXiv 2203.11171 (the vote; the mean over all subsets,
    the tie rule and the missing votes are ours).
  """
  n = len(answers)
  assert n == len(correct) and 1 <= k <= n, (n, len(correct), k)
  grades: dict[str, list[bool]] = {}
  for value, right in zip(answers, correct, strict=True):
    if value is not None:
      grades.setdefault(value, []).append(bool(right))
  unparsed = n - sum(map(len, grades.values()))
  ways = 0.0
  for value, own in grades.items():
    if not any(own):
      continue
    rivals = [len(x) for other, x in grades.items() if other != value]
    # A subset leaves out n - k answers, so that some votes for this value stay.
    for votes in range(max(1, len(own) - (n - k)), min(len(own), k) + 1):
      drawn = math.comb(len(own), votes) * _wins(
        rivals, unparsed, votes, k - votes
      )
      ways += np.mean(own) * drawn
  return min(1.0, float(ways / math.comb(n, k)))


def _wins(rivals: Sequence[int], unparsed: int, votes: int, left: int) -> float:
  """Returns the ways to draw `left` other answers so that `votes` is the most.

  Each way counts 1 / (1 + t), t = number of rivals with as many votes.

  Args:
    rivals: number of answers with each other value.
    unparsed: number of answers without a value.
    votes: votes for the value, at least 1.
    left: number of rivals and unparsed answers to draw.
  """
  # A rival that cannot reach `votes` counts like unparsed answers.
  free = unparsed + sum(count for count in rivals if count < votes)
  ways = {(0, 0): 1}  # (t, d) -> coefficient of x^d y^t
  for count in rivals:
    if count >= votes:
      product = collections.Counter()
      for (ties, drawn), number in ways.items():
        for own in range(min(votes, left - drawn) + 1):
          place = ties + (own == votes), drawn + own
          product[place] += number * math.comb(count, own)
      ways = product
  return sum(
    number * math.comb(free, left - drawn) / (1 + ties)
    for (ties, drawn), number in ways.items()
  )


def is_rate(name: str, values: Iterable[float | None]) -> bool:
  """Returns whether a metric is a rate: by its name, or all values are 0 or 1.

  Args:
    name: the metric's name, without prefix and environment.
    values: those of all answers; None = unknown.
  """
  named = name.endswith(('rate', 'accuracy')) or '@' in name
  return named or {*values} <= {None, 0, 1}


def interval(
  values: Sequence[float],
  weights: float | Sequence[float] = 1.0,
  is_rate: bool = True,
) -> tuple[float, float] | None:
  """Returns the 95 % interval of a mean over tasks; of rates, within [0, 1].

      p = sum w_i x_i / sum w_i,    N = p (1 - p) / (s^2 / n)
      (p + z^2 / 2N +- z sqrt(p (1 - p) / N + z^2 / 4N^2)) / (1 + z^2 / N)

  s^2 is the mean of (w_i / mean(w) (x_i - p))^2, the variance of the x_i where
  all weights are equal. So N is the number of tasks graded 0 or 1 that would
  give the same information about p. For such tasks N = n, and the interval is
  Wilson's.

  Where all values are equal, to 1e-9, their spread is no evidence, and N = n:
  n values of 1 give [n / (n + z^2), 1], a single 0.5 gives [0.05, 0.95]. Like
  any interval from an observed spread, this one is too narrow where few tasks
  differ and the values that would differ are rare.

  The bounds of other values are not known. They have the normal interval

      p +- z s / sqrt(n)

  with the same s^2, but n - 1; none where all of them are equal: without a
  spread, and without bounds, nothing limits the values that were not seen.

  Args:
    values: f64[n], one per task, at least one.
    weights: f64[n] > 0, number of answers that each value is the mean of; or
      one number for all.
    is_rate: whether values are in [0, 1] by their meaning, see `is_rate`.

  Returns:
    (low, high), or None.

  References:
    Wilson, Probable Inference, the Law of Succession, and Statistical
    Inference, JASA 1927; N by linearizing the ratio, as Cochran, Sampling
    Techniques, 1977, does for clusters.
  """
  x = np.asarray(values, np.float64)
  w = np.broadcast_to(weights, x.shape)
  w = w / w.mean()
  p, size, varies = float(np.mean(w * x)), float(len(x)), np.ptp(x) > _ROUNDING
  squares = float(np.sum((w * (x - p)) ** 2))
  if not is_rate:
    if not varies:
      return None
    half = Z * math.sqrt(squares / (size - 1) / size)
    return p - half, p + half
  if varies:
    size *= p * (1 - p) / (squares / size)
  p = min(1.0, max(0.0, p))
  center = p + Z**2 / (2 * size)
  half = Z * math.sqrt(p * (1 - p) / size + Z**2 / (4 * size**2))
  low, high = ((center + side) / (1 + Z**2 / size) for side in (-half, half))
  return max(0.0, min(low, p)), min(1.0, max(high, p))


def paired(
  first: Sequence[float | None],
  second: Sequence[float | None],
  is_rate: bool = True,
) -> tuple[float, ...] | None:
  """Returns the mean difference of two policies on the same tasks, and bounds.

      d_i = first_i - second_i,    b = mean max(d_i, 0),  c = mean max(-d_i, 0)
      N / n = (b + c - mean(d)^2) / s^2

  s^2 is the variance of the d_i. For grades of 0 and 1 N = n, and the 95 %
  interval is Tango's, by the score of the shares b of the tasks that only the
  first policy solves and c that only the second does. For other rates N is the
  number of graded tasks that would give the same information. Where all d_i are
  equal, to 1e-9, N = n, so that n equal pairs give 0 +- z^2 / (n + z^2). Values
  that are no rates have the normal interval, see `interval`.

  It can be much narrower than the intervals of the two rates, because tasks
  that are hard for one policy are hard for the other.

  Args:
    first, second: one value per task; None = unknown. Tasks with an unknown
      value are left out.
    is_rate: as in `interval`.

  Returns:
    (mean, low, high); (mean,) where such values have no interval; None where
    fewer than two tasks count.

  References:
    Tango, Equivalence Test and Confidence Interval for the Difference in
    Proportions for the Paired-Sample Design, Statistics in Medicine 1998; N is
    ours, by the analogy of `interval`.
  """
  pairs = [x for x in zip(first, second, strict=True) if None not in x]
  if len(pairs) < 2:
    return None
  d = np.subtract(*np.array(pairs, np.float64).T)
  mean = float(d.mean())
  if not is_rate:
    return mean, *(interval(d, is_rate=False) or ())
  n = float(len(d))
  wins, losses = (float(np.maximum(x, 0).mean()) for x in (d, -d))
  if np.ptp(d) > _ROUNDING:
    n *= float((wins + losses - d.mean() ** 2) / d.var())
  low, high = (_score_limit(wins, losses, n, end) for end in (-1, 1))
  return mean, low, high


def _score_limit(wins: float, losses: float, n: float, end: int) -> float:
  """Returns the difference of rates between b - c and `end` that solves

      n (b - c - x)^2 = z^2 (2 q + x - x^2)

  by bisection; q is the most likely rate of losses where the difference is x,
  the positive root of 2 q^2 - (b + c - (2 - b + c) x) q - c x (1 - x) = 0.
  """
  inside, outside = wins - losses, end
  for _ in range(60):
    x = (inside + outside) / 2
    half = wins + losses - (2 - wins + losses) * x
    root = math.sqrt(max(half**2 + 8 * losses * x * (1 - x), 0.0))
    variance = (half + root) / 2 + x - x**2
    if n * (wins - losses - x) ** 2 <= Z**2 * variance:
      inside = x
    else:
      outside = x
  return inside
