"""The compiled kernels on a GPU, against the oracle."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import attention, reference
from tests.kernels import inputs

pytestmark = pytest.mark.gpu
B, T, N, K = len(inputs.KINDS), 512, 8, 2
dtypes = pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=str)


@pytest.fixture(autouse=True)
def full_precision():
  with jax.default_matmul_precision('highest'):  # else float32 is TF32
    yield


def close(ours, expected, dtype, exact, rough, relative=False):
  a, b = (np.asarray(x, np.float32) for x in (ours, expected))
  size = np.abs(b).max() if relative else 1.0
  bound = size * (exact if dtype == jnp.float32 else rough)
  assert np.isfinite(a).all() and np.abs(a - b).max() <= bound


@dtypes
@pytest.mark.parametrize('trees', [False, True])
@pytest.mark.parametrize('h', [64, 128])
def test_compiled_flash_matches_oracle_and_is_deterministic(h, trees, dtype):
  *arrays, g = inputs.draw(
    0, (B, T, N, h), (B, T, K, h), (B, T, K, h), (B, T, N, h), dtype=dtype
  )
  ends = inputs.every_kind(T)
  if trees:
    ends = [jnp.tile(x, (2, 1)) for x in inputs.forests(T)[0]]

  def run(fn, g, *x):
    def call(*x):
      return fn(*x, *ends, scale=h**-0.5, return_lse=True)

    (out, lse), vjp = jax.vjp(call, *x)
    return out, lse, *vjp((g, jnp.zeros_like(lse)))

  compiled = jax.jit(
    functools.partial(
      run, functools.partial(attention.attention, backend='triton')
    )
  )
  ours, repeated = (compiled(g, *arrays) for _ in range(2))
  for a, b in zip(ours, repeated, strict=True):
    np.testing.assert_array_equal(a, b)
  out, lse, *grads = jax.jit(functools.partial(run, reference.attention))(
    *(x.astype(jnp.float32) for x in (g, *arrays))
  )
  close(ours[0], out, dtype, 2e-5, 1e-2)
  close(ours[1], lse, dtype, 1e-5, 5e-3)
  for a, b in zip(ours[2:], grads, strict=True):
    close(a, b, dtype, 1e-5, 2e-2, relative=True)


@dtypes
@pytest.mark.parametrize('splits', [1, 16, None])
def test_compiled_decode_matches_oracle(splits, dtype):
  s, h = 2048, 128
  q, k, v = inputs.draw(1, (4, N, h), (4, K, s, h), (4, K, s, h), dtype=dtype)
  ends = np.array([0, 700, 0, 5], np.int32), np.array([s, 1500, 0, 6], np.int32)
  out = jax.jit(
    functools.partial(
      attention.decode, scale=h**-0.5, splits=splits, backend='triton'
    )
  )(q, k, v, *ends)
  expected = reference.decode(
    *(x.astype(jnp.float32) for x in (q, k, v)), *ends, scale=h**-0.5
  )
  close(out, expected, dtype, 2e-5, 1e-2)
  assert not np.asarray(out[2], np.float32).any()
