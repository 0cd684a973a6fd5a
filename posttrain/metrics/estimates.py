"""Estimates from n answers to each of several tasks, and their intervals.

Tasks are the independent units: answers to one task are more alike than
answers to others, so that an interval is over tasks, however many answers
each of them has. Everything is computed exactly, and nothing is drawn.
"""

import math
import statistics
from collections.abc import Collection, Sequence

import numpy as np

Z = statistics.NormalDist().inv_cdf(0.975)  # of 95 % intervals: 1.96
BOUNDS = ('_low', '_high')  # behind the name of what they are bounds of
_ROUNDING = 1e-9  # values that differ by less are equal


def is_bound(key: str, among: Collection[str]) -> bool:
  """Returns whether a metric is the bound of another, which is there as well.

  Args:
    key: `eval/pass_rate_low/sums`, say, of `eval/pass_rate/sums`.
    among: all keys.
  """
  of, _, env = key.rpartition('/')
  return of.endswith(BOUNDS) and f'{of.rpartition("_")[0]}/{env}' in among


def pass_at(n: int, correct: int, k: int) -> float:
  """Returns the probability that k of n answers hold a correct one.

      1 - C(n - c, k) / C(n, k)

  the unbiased estimate of what k fresh answers would do. k = n asks whether
  any is correct; k = 1 is c / n. Exactly 1 where fewer than k are wrong.

  Args:
    n: answers to the task.
    correct: c, how many of them are.
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
  """Returns how often the majority of k of n answers is right.

      E_S[ mean of w_a over the a that have the most votes in S ]

  where S is any of the C(n, k) subsets of k answers, equally likely, each
  answer a votes for what it says, and w_a is the share of the answers saying
  a that are correct (0 or 1, unless the grader looks at more than `answers`
  tell). So ties are broken uniformly among the tied. An answer that could not
  be parsed casts no vote, and a subset without any vote is wrong.

  k = n is the vote of all answers; k = 1 is the share that are correct and
  could be parsed; k = 2 is that as well where all could be parsed.

  For each right a, and each number v of its votes, the other answers are
  counted by a polynomial product, whose terms x^d y^t are the ways to draw d
  of them with t rivals at v votes as well, and none at more.

  Args:
    answers: what each said, in a canonical form; None = could not be parsed.
    correct: the grade of each.
    k: in [1, n].

  References:
    Wang et al., Self-Consistency Improves Chain of Thought Reasoning in
    Language Models, arXiv 2203.11171 (the vote; the mean over all subsets,
    the tie rule and the missing votes are ours).
  """
  n = len(answers)
  assert n == len(correct) and 1 <= k <= n, (n, len(correct), k)
  grades: dict[str, list[bool]] = {}
  for said, right in zip(answers, correct, strict=True):
    if said is not None:
      grades.setdefault(said, []).append(bool(right))
  silent = n - sum(map(len, grades.values()))
  ways = 0.0
  for said, mine in grades.items():
    if not any(mine):
      continue
    rivals = [len(theirs) for other, theirs in grades.items() if other != said]
    # A subset leaves out n - k answers, so that this one keeps some.
    for votes in range(max(1, len(mine) - (n - k)), min(len(mine), k) + 1):
      ways += (
        np.mean(mine)
        * math.comb(len(mine), votes)
        * _wins(rivals, silent, votes, k - votes)
      )
  return min(1.0, float(ways / math.comb(n, k)))


def _wins(rivals: Sequence[int], silent: int, votes: int, left: int) -> float:
  """Returns the ways to draw `left` of others so that `votes` are the most.

  Each way counts 1 / (1 + t), t = rivals that have as many.

  Args:
    rivals: answers that say each other thing.
    silent: answers that say nothing.
    votes: at least 1.
    left: to draw of rivals and silent ones.
  """
  # Those who cannot reach `votes` take part as if they were silent.
  free = silent + sum(count for count in rivals if count < votes)
  strong = [count for count in rivals if count >= votes]
  # ways[t, d]; each row is followed by the room that products spill into.
  ways = np.zeros((1 + min(len(strong), left // votes), 2 * left + 1))
  ways[0, : left + 1] = _binomials(free, left)
  for count in strong:
    below = np.convolve(ways.ravel(), _binomials(count, min(votes - 1, left)))[
      : ways.size
    ].reshape(ways.shape)
    if votes <= left:
      tied = ways[:-1, : left + 1 - votes] * math.comb(count, votes)
      below[1:, votes : left + 1] += tied
    ways = below
    ways[:, left + 1 :] = 0
  return float((ways[:, left] / np.arange(1, len(ways) + 1)).sum())


def _binomials(n: int, largest: int) -> np.ndarray:
  """f64[largest + 1]: C(n, 0), C(n, 1), ..."""
  return np.array([math.comb(n, d) for d in range(largest + 1)], np.float64)


def interval(
  values: Sequence[float], weights: Sequence[float] | None = None
) -> tuple[float, float]:
  """Returns the 95 % interval of a mean over tasks, by Wilson's score.

      p = sum w_i x_i / sum w_i,    N = p (1 - p) / (s^2 / n)
      (p + z^2 / 2N +- z sqrt(p (1 - p) / N + z^2 / 4N^2)) / (1 + z^2 / N)

  s^2 is the mean of (w_i / mean(w) (x_i - p))^2, the variance of the x_i where
  all weights are equal, so that N is the number of tasks graded 0 or 1 that
  would say as much about p. Of such tasks it is n, and the interval Wilson's.

  Where all values are equal, to 1e-9, their spread is no evidence, and N = n:
  all 1 of n gives [n / (n + z^2), 1], a single task of 0.5 [0.05, 0.95]. As
  any interval by an observed spread this one is too narrow where few tasks
  differ and those that would are rare.

  Args:
    values: f64[n] in [0, 1], one per task, at least one.
    weights: f64[n] > 0, answers that each is the mean of; None = all equal.

  References:
    Wilson, Probable Inference, the Law of Succession, and Statistical
    Inference, JASA 1927; N by linearizing the ratio, as Cochran, Sampling
    Techniques, 1977, does for clusters.
  """
  x = np.asarray(values, np.float64)
  w = np.ones_like(x) if weights is None else np.asarray(weights, np.float64)
  assert len(x) and len(x) == len(w), (len(x), len(w))
  w = w / w.mean()
  p, size = float(np.mean(w * x)), float(len(x))
  if np.ptp(x) > _ROUNDING:
    size *= p * (1 - p) / float(np.mean((w * (x - p)) ** 2))
  p = min(1.0, max(0.0, p))
  center = p + Z**2 / (2 * size)
  half = Z * math.sqrt(p * (1 - p) / size + Z**2 / (4 * size**2))
  low, high = ((center + side) / (1 + Z**2 / size) for side in (-half, half))
  return max(0.0, min(low, p)), min(1.0, max(high, p))


def paired(
  mine: Sequence[float | None], theirs: Sequence[float | None]
) -> tuple[float, float, float] | None:
  """Returns the mean difference of two policies on the same tasks, and bounds.

      d_i = mine_i - theirs_i,    mean(d) +- z s / sqrt(n)

  The normal 95 % interval of the mean, s^2 with n - 1. It may be narrower than
  those of the two by far, for what is hard for one is hard for the other.
  Where all differences are equal it has no width.

  Args:
    mine, theirs: one value per task; None = unknown. A task counts where both
      are known.

  Returns:
    (mean, low, high); None where fewer than two tasks count.
  """
  d = np.array(
    [
      a - b
      for a, b in zip(mine, theirs, strict=True)
      if a is not None and b is not None
    ],
    np.float64,
  )
  if len(d) < 2:
    return None
  mean, half = float(d.mean()), Z * float(d.std(ddof=1)) / math.sqrt(len(d))
  return mean, mean - half, mean + half
