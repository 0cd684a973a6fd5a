"""Intervals of paired differences, on synthetic data with literal seeds."""

import json

import numpy as np
import pytest

from experiments.benchmarks import paired


def _differences(seed, seeds, questions, answers, mean=0.0):
  """f64[2, 5, 100], with these standard deviations."""
  rng = np.random.default_rng(seed)
  return (
    mean
    + seeds * rng.standard_normal((2, 5, 1))
    + questions * rng.standard_normal((1, 1, 100))
    + answers * rng.standard_normal((2, 5, 100))
  )


# Of 120: 114 in the mean if the interval were exact, +- 2.4 by chance. Seeds
# that differ; questions that differ; answers alone, whose noise counts twice.
@pytest.mark.parametrize(
  ('spread', 'most'),
  [((0.1, 0, 0.4), 119), ((0.003, 0.3, 0.3), 119), ((0, 0, 0.4), 120)],
)
def test_without_a_difference_zero_is_in_the_interval_at_its_rate(spread, most):
  held = 0
  for seed in range(120):
    _, low, high = paired.interval(_differences(seed, *spread), 200, seed)
    held += low <= 0 <= high
  assert 110 <= held <= most


def test_a_difference_is_found():
  for seed in range(20):
    differences = _differences(seed, 0.03, 0.1, 0.4, mean=0.1)
    mean, low, _ = paired.interval(differences, 400)
    assert abs(mean - 0.1) < 0.06 and low > 0


def test_of_equal_questions_the_interval_is_students():
  """t = 2.306 for 8 degrees of freedom, from a table."""
  values = np.random.default_rng(3).standard_normal((2, 5))
  differences = np.repeat(values[:, :, None], 7, axis=2)
  mean, low, high = paired.interval(differences)
  error = np.sqrt(values.var(axis=1, ddof=1).sum() / 5) / 2
  assert mean == pytest.approx(values.mean())
  assert high - low == pytest.approx(2 * 2.306 * error, rel=0.05)


def test_pairing_by_question_narrows_the_interval():
  rng = np.random.default_rng(0)
  chance = 0.5 + 0.5 * rng.uniform(-1, 1, 200)
  first, second = (
    (rng.uniform(size=(2, 5, 200)) < chance + x).astype(float) for x in (0.1, 0)
  )
  widths = [
    high - low
    for _, low, high in (
      paired.interval(first - x) for x in (second, second[..., ::-1])
    )
  ]
  assert widths[0] < 0.7 * widths[1]


def test_answers_are_paired_by_question(tmp_path):
  """A question that a run has no value of is left out of all."""
  (tmp_path / 'rollouts').mkdir()
  runs = []
  for step, ids in enumerate(('abc', 'cab', 'bda')):
    rows = [
      {'env': 'x', 'id': i, 'metrics': {}, 'measures': {'p': ord(i) + step}}
      for i in ids
    ]
    path = tmp_path / 'rollouts' / f's_eval_{step:06d}.jsonl'
    path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
    runs.append(paired.outcomes(str(tmp_path), 's', step))
  first, second = paired.grids(([runs[:2]], [runs[1:]]), ('x', 'p'))
  assert (first - ord('a')).tolist() == [[[0, 1], [1, 2]]]
  assert (second - first).tolist() == [[[1, 1], [1, 1]]]
