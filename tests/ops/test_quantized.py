"""Matrices of int8 and int4: literal numbers, bounds of errors, products."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.ops import attention, grouped_matmul, quantized

KINDS = ['int8', 'int4']


def test_int8_of_literal_numbers():
  made = quantized.quantize(jnp.array([[127.0, 0.0], [-25.6, 0.0]]), 'int8')
  assert made.values.dtype == jnp.int8
  np.testing.assert_array_equal(made.values, [[127, 0], [-26, 0]])
  np.testing.assert_allclose(made.scale, [[1.0, 0.0]], rtol=1e-6)
  np.testing.assert_allclose(
    made.astype('float32'), [[127, 0], [-26, 0]], rtol=1e-6
  )


def test_int4_packs_two_rows_of_a_block_in_a_byte():
  """Rows 0 and 16 of each block of 32 have -7 and 3 in units of its scale."""
  x = np.zeros((64, 1), np.float32)
  x[[0, 16]] = [[-7.5], [3.0]]
  x[[32, 48]] = [[15.0], [-6.0]]
  made = quantized.quantize(jnp.asarray(x), 'int4')
  np.testing.assert_array_equal(made.scale, [[1.0], [2.0]])
  assert made.values.shape == (32, 1) and made.shape == (64, 1)
  # -7 is 1001 in two's complement, 3 is 0011; 7 is 0111, -3 is 1101.
  assert made.values[[0, 16], 0].tolist() == [0b0011_1001, 0b1101_0111]
  numbers = made.astype('float32')[:, 0]
  assert numbers[jnp.array([0, 16, 32, 48])].tolist() == [-7, 3, 14, -6]
  assert np.count_nonzero(numbers) == 4


@pytest.mark.parametrize('kind', KINDS)
def test_errors_are_at_most_half_a_step(kind):
  x = jax.random.normal(jax.random.key(0), (2, 64, 24)) ** 3
  made = quantized.quantize(x, kind)
  error = jnp.abs(made.astype('float32') - x)
  step = made.scale.astype(jnp.float32)
  step = jnp.repeat(step, 64 // step.shape[1], axis=1)
  # bfloat16 rounds scales: the largest number of a block is off by 2^-8 more.
  assert (error <= (0.5 + 1e-4 if kind == 'int8' else 0.54) * step).all()
  # Each layer alone has the same numbers, as when a file is read.
  jax.tree.map(
    lambda a, b: np.testing.assert_array_equal(a[1], b),
    made,
    quantized.quantize(x[1], kind),
  )


@pytest.mark.parametrize(
  'impl', ['xla', pytest.param('interpret', marks=pytest.mark.slow)]
)
def test_attention_reads_int8_caches(impl):
  """Decoding and prefill, as over the numbers of the cache."""
  keys = iter(jax.random.split(jax.random.key(2), 3))
  k, v = (
    quantized.quantize(
      jax.random.normal(next(keys), (2, 1, 16, 16)), 'int8', -1
    )
    for _ in range(2)
  )
  assert k.scale.shape == (2, 1, 16, 1)
  q, options = jax.random.normal(next(keys), (2, 1, 2, 16)), {'scale': 0.25}
  numbers = k.astype('float32'), v.astype('float32')
  ends = jnp.array([[0], [3]]), jnp.array([[9], [16]])

  @jax.jit
  def both(k, v):
    flat = (x[:, 0] for x in ends)
    return (
      attention.cached(q, k, v, *ends, **options, impl=impl)[:, 0],
      attention.decode(q[:, 0], k, v, *flat, **options, impl=impl),
    )

  for a, b in zip(both(k, v), both(*numbers), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize(
  'kind', ['int4', pytest.param('int8', marks=pytest.mark.slow)]
)
def test_products_of_groups_dequantize_their_matrices(kind):
  keys = jax.random.split(jax.random.key(1), 2)
  x = jax.random.normal(keys[0], (12, 32))
  w = quantized.quantize(jax.random.normal(keys[1], (3, 32, 8)), kind)
  sizes = jnp.array([5, 0, 6])

  def total(x, w):
    return jnp.sum(grouped_matmul.grouped_matmul(x, w, sizes) ** 2)

  grads = [jax.grad(total)(x, y) for y in (w, w.astype('float32'))]
  np.testing.assert_allclose(*grads, rtol=1e-5, atol=1e-5)
