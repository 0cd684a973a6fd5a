"""Sums over sequences, against loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.losses import segments


def _random(shape=(3, 17), seed=0):
  rng = np.random.default_rng(seed)
  ids = np.cumsum(rng.random(shape) < 0.3, axis=-1).astype(np.int32)
  return rng.normal(size=shape).astype(np.float32), ids


def test_totals_by_hand():
  ids = jnp.array([[1, 1, 2, 0], [1, 2, 2, 2]])
  values = jnp.array([[1.0, 2.0, 4.0, 8.0], [1.0, 2.0, 4.0, 8.0]])
  assert segments.totals(values, ids).tolist() == [
    [3, 3, 4, 8],
    [1, 14, 14, 14],
  ]
  member = jnp.array([[False, True, True, False], [False, False, True, True]])
  assert segments.totals(member, ids).tolist() == [[1, 1, 1, 0], [0, 2, 2, 2]]
  assert segments.firsts(member, ids).tolist() == [
    [False, True, True, False],
    [False, False, True, False],
  ]


@pytest.mark.parametrize('shape', [(1, 1), (3, 17), (2, 2, 8), (5,)])
def test_totals_equal_a_loop(shape):
  values, ids = _random(shape)
  totals = np.asarray(segments.totals(jnp.asarray(values), jnp.asarray(ids)))
  for row in np.ndindex(shape[:-1]):
    for segment in np.unique(ids[row]):
      here = ids[row] == segment
      np.testing.assert_allclose(
        totals[row][here], values[row][here].sum(), rtol=1e-5, atol=1e-6
      )
      assert len(set(totals[row][here])) == 1


def test_values_of_other_segments_have_no_effect():
  values, ids = _random()
  totals = segments.totals(values, ids)
  bad = np.where(ids == 1, np.nan, values)
  other = segments.totals(bad, ids)
  np.testing.assert_array_equal(totals[ids != 1], other[ids != 1])
  assert (ids == 1).any() and np.isnan(other[ids == 1]).all()


def test_equal_ids_in_neighbouring_rows_are_separate():
  """Also if the id is at the last and the first token of two rows."""
  ids = jnp.array([[1, 1, 2], [2, 1, 1]])
  assert segments.totals(jnp.ones((2, 3)), ids).tolist() == [
    [2, 2, 1],
    [1, 2, 2],
  ]
  flat = segments.totals(jnp.ones(5), jnp.ones(5, 'int32'))
  assert flat.tolist() == [5] * 5


def test_no_gradient_passes():
  values, ids = _random()
  grad = jax.grad(lambda x: segments.totals(x, ids).sum())(values)
  assert not grad.any()
