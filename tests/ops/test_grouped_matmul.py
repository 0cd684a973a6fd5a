"""posttrain.ops.grouped_matmul: products of sorted rows with their matrices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posttrain.ops import grouped_matmul


def draw(sizes, rows, seed=0, inputs=6, outputs=5):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(rows, inputs)).astype(np.float32)
  w = rng.normal(size=(len(sizes), inputs, outputs)).astype(np.float32)
  return jnp.asarray(x), jnp.asarray(w), jnp.asarray(sizes, jnp.int32)


def expected(x, w, sizes):
  out = np.zeros((len(x), w.shape[2]))
  start = 0
  x, w = np.asarray(x, float), np.asarray(w, float)
  for matrix, size in zip(w, np.asarray(sizes), strict=True):
    out[start : start + size] = x[start : start + size] @ matrix
    start += size
  return out


# Empty groups first, last and in a row; rows after the last group; none.
@pytest.mark.parametrize(
  'sizes', [(3, 0, 9, 1), (0, 0, 13, 0), (1, 2, 3, 4), (0, 0, 0, 0)]
)
def test_grouped_matmul(sizes):
  x, w, sizes = draw(sizes, 13)
  out = jax.jit(grouped_matmul.grouped_matmul)(x, w, sizes)
  np.testing.assert_allclose(out, expected(x, w, sizes), atol=1e-5)
  # `ragged_dot`, which accelerators use, defines the same.
  other = jax.lax.ragged_dot(x, w, sizes)
  np.testing.assert_allclose(out, other, atol=1e-5)


def test_gradients():
  x, w, sizes = draw((3, 0, 5, 1), 11)

  def loss(x, w):
    return grouped_matmul.grouped_matmul(x, w, sizes)

  check_grads(loss, (x, w), 1, ('rev',), atol=2e-2, rtol=2e-2)
  _, pull = jax.vjp(loss, x, w)
  g = np.random.default_rng(1).normal(size=(11, 5)).astype(np.float32)
  d_x, d_w = pull(jnp.asarray(g))
  assert not d_x[9:].any() and not d_w[1].any()
  np.testing.assert_allclose(d_w[2], x[3:8].T @ g[3:8], atol=1e-5)


def test_gradients_on_a_tpu_are_the_same():
  x, w, sizes = draw((3, 0, 5, 1), 11)
  g = jnp.asarray(np.random.default_rng(1).normal(size=(11, 5)), jnp.float32)

  def pull(fn):
    return jax.jit(lambda x, w, g: jax.vjp(fn, x, w, sizes)[1](g)[:2])

  got = pull(grouped_matmul._ragged)(x, w, g)
  want = pull(grouped_matmul.grouped_matmul)(x, w, g)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, want
  )


@pytest.mark.parametrize('experts,rows', [(128, 32), (128, 64), (8, 1000)])
def test_products_are_few(experts, rows):
  """At most 1.3 times those of the rows, forward and backward."""
  tile = grouped_matmul.tile(experts * rows, experts)
  # The worst sizes have one row in every last tile.
  worst = np.full(experts, rows - rows % tile + 1)
  for sizes in (worst, np.random.default_rng(0).poisson(rows, experts)):
    computed = tile * np.sum(-(-sizes // tile))
    assert computed <= 1.3 * max(sizes.sum(), experts * rows)
  # The program holds one product of a tile, and two more backward; the loops
  # around them have exactly as many rounds as there are tiles.
  x, w, sizes = draw([rows] * experts, experts * rows, inputs=64, outputs=48)

  def flops(fn):
    return jax.jit(fn).lower(x, w, sizes).compile().cost_analysis()['flops']

  def loss(x, w, sizes):
    return jnp.sum(grouped_matmul.grouped_matmul(x, w, sizes) ** 2)

  one = 2 * tile * 64 * 48
  rest = 10 * (x.size + experts * rows * 48 + experts**2 + 64 * 48)
  assert one < flops(grouped_matmul.grouped_matmul) < 1.1 * one + rest
  assert 3 * one < flops(jax.grad(loss, (0, 1))) < 3.3 * one + rest
