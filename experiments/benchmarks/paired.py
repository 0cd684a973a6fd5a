"""Paired differences of runs, and their bootstrap over seeds and questions.

A run has answered each test question: one value per question, as a grade or a
mean of grades. Two arms have runs with the same starts, seeds and questions:

    d[s, r, q] = first[s, r, q] - second[s, r, q]       f64[starts, seeds, N]

    mean* = mean(d) + sum_s c (mean_r* d[s, r*] - mean_r d[s, r]) / starts
                    + (mean_q* d[q*] - mean_q d[q])

r* are seeds, drawn with replacement within each start; q* are questions, drawn
with replacement, the same for all runs, since these answer the same ones. The
two draws are independent. d[s, r] and d[q] are means over the other axes. The
starts are not drawn: the interval is about them.

    c = sqrt(R / (R - 1)) t / z

for R seeds: a bootstrap of five values has 4/5 of their variance, and normal
tails. t and z are the 97.5 % quantiles of Student's t with starts (R - 1)
degrees of freedom and of the normal law, so that the interval is Student's
where the seeds alone differ. The 95 % interval has the 2.5 % and 97.5 %
quantiles of mean*.

Means of d by both draws at once, d[s, r*, q*], count the noise of a single
answer three times and have no c: of synthetic data without a difference
(`tests/experiments/test_paired.py`), their interval has 0 in 86 to 99 % of the
cases, this one in 96 to 99 %.
"""

import math
import os
from collections.abc import Sequence

import numpy as np
from scipy import stats

from posttrain.metrics import writers

# (environment, measure) -> id of the question -> value
Outcomes = dict[tuple[str, str], dict[str, float]]
# The outcomes of an arm: per start, one per seed.
Runs = Sequence[Sequence[Outcomes]]


def interval(
  differences: np.ndarray, draws: int = 4000, seed: int = 0
) -> tuple[float, float, float]:
  """Returns (mean, low, high) of paired differences, see above.

  With one seed per start, the interval is over questions alone.

  Args:
    differences: f64[starts, seeds, questions].
    draws: number of draws.
    seed: the draws' seed.
  """
  rng = np.random.default_rng(seed)
  starts, seeds, _ = differences.shape
  mean, c = float(differences.mean()), 0.0
  if seeds > 1:
    c = float(stats.t.ppf(0.975, starts * (seeds - 1)) / stats.norm.ppf(0.975))
    c *= math.sqrt(seeds / (seeds - 1))

  def drawn(values: np.ndarray) -> np.ndarray:
    """Returns f64[draws], the means of drawn values, minus their mean."""
    size = len(values)
    counts = rng.multinomial(size, np.full(size, 1 / size), size=draws)
    return counts @ values / size - values.mean()

  changes = drawn(differences.mean((0, 1)))
  for values in differences.mean(2):
    changes += c * drawn(values) / starts
  low, high = np.quantile(changes, (0.025, 0.975))
  return mean, mean + float(low), mean + float(high)


def outcomes(workdir: str, stage: str, step: int) -> Outcomes:
  """Returns the values of an evaluation, by its stored answers."""
  name = f'{stage}_eval_{step:06d}.jsonl'
  values: Outcomes = {}
  for row in writers.read(os.path.join(workdir, 'rollouts', name)):
    for measure, value in {**row['metrics'], **row['measures']}.items():
      values.setdefault((row['env'], measure), {})[row['id']] = float(value)
  return values


def grids(arms: Sequence[Runs], key: tuple[str, str]) -> list[np.ndarray]:
  """Returns f64[starts, seeds, questions] of each arm, the same questions.

  A question without a value in some run is left out of all.

  Args:
    arms: the runs of each arm, with the same starts and seeds.
    key: (environment, measure).
  """
  values = [[[x[key] for x in runs] for runs in own] for own in arms]
  known = [set(x) for own in values for runs in own for x in runs]
  ids = sorted(set.intersection(*known))
  return [
    np.array([[[x[i] for i in ids] for x in runs] for runs in own])
    for own in values
  ]
