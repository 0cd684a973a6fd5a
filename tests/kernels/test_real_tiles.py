"""The kernels with their real tile sizes, interpreted, against the oracle.

Other tests patch blocks to be small, to cross many edges cheaply. Here are
Triton's tiles of 64 queries and keys, and Mosaic's of 128 to 512.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import attention, reference
from tests.kernels import gates, inputs

B, K = len(inputs.KINDS), 2
DTYPES = (jnp.float32, jnp.bfloat16)
# (backend, T, H, N / K, dtype); the rest of the grid is slow.
QUICK = (
  ('triton', 200, 64, 2, jnp.float32),  # padded to four tiles
  ('mosaic_tpu', 384, 64, 1, jnp.bfloat16),  # three tiles of 128
)
# Long: Mosaic has three tiles of 512, the last of them mostly padding.
GRID = (
  *itertools.product(
    ('triton', 'mosaic_tpu'), (200, 256), (64, 128), (1, 2, 4), DTYPES
  ),
  *itertools.product(('triton', 'mosaic_tpu'), (1100,), (128,), (2,), DTYPES),
  ('mosaic_tpu', 384, 128, 2, jnp.bfloat16),
)


# Most of the time is spent running.
pytestmark = pytest.mark.usefixtures('optimized')


def name(case):
  *rest, dtype = case
  return '-'.join(map(str, (*rest, dtype.__name__)))


def both(quick, grid):
  """Parametrizes the quick cases, and the rest of the grid as slow ones."""
  rest = [x for x in grid if x not in quick]
  return pytest.mark.parametrize(
    'case',
    [
      *(pytest.param(x, id=name(x)) for x in quick),
      *(pytest.param(x, id=name(x), marks=pytest.mark.slow) for x in rest),
    ],
  )


@both(QUICK, GRID)
def test_flash_matches_oracle(case):
  backend, t, h, group, dtype = case
  intervals = inputs.every_kind(t)
  (q, k, v), (g, g_lse) = gates.make_inputs(3, B, t, K * group, K, h, dtype)
  run, oracle = (
    gates.make_run(x, h**-0.5, small=False) for x in (backend, 'oracle')
  )
  exact = [x.astype(jnp.float32) for x in (q, k, v)]
  ours = run(q, k, v, *intervals, g, g_lse)
  gates.compare(ours, oracle(*exact, *intervals, g, g_lse), dtype)
  gates.check_empty(ours, *intervals)
  if dtype == jnp.float32:
    return
  # The op in XLA returns no lse, so the gradient of lse is 0 here.
  zero = jnp.zeros_like(g_lse)
  ours, expected = (
    x[:1] + x[2:]
    for x in (
      run(q, k, v, *intervals, g, zero),
      oracle(*exact, *intervals, g, zero),
    )
  )
  xla = gates.make_xla(h**-0.5)(q, k, v, *intervals, g)
  for a, b, c in zip(ours, xla, expected, strict=True):
    assert gates.error(a, c) <= 1.5 * gates.error(b, c)


def ragged(s):
  """Returns a batch of intervals: empty, one key, windows, all keys."""
  start = [9, s - 1, s // 3, -5, 0, 0]
  end = [9, s, s // 3 + 130, s + 6, s, s // 2 + 1]
  return np.array(start, np.int32), np.array(end, np.int32)


# S = 500 is padded; 640 is tiles of 128 for both, 1024 two of 512 for Mosaic.
@both(
  (
    ('triton', 500, 128, 4, jnp.bfloat16),
    ('mosaic_tpu', 640, 128, 2, jnp.float32),
  ),
  tuple(
    itertools.product(
      ('triton', 'mosaic_tpu'), (500, 640, 1024), (64, 128), (1, 2, 4), DTYPES
    )
  ),
)
def test_decode_matches_oracle(case):
  backend, s, h, group, dtype = case
  start, end = ragged(s)
  b = len(start)
  arrays = inputs.draw(
    5, (b, K * group, h), (b, K, s, h), (b, K, s, h), dtype=dtype
  )
  options = dict(scale=h**-0.5, return_lse=True)
  run = functools.partial(
    attention.decode, **options, backend=backend, interpret=True
  )
  out, lse = jax.jit(run)(*arrays, start, end)
  oracle = jax.jit(functools.partial(reference.decode, **options))
  expected, expected_lse = oracle(
    *(x.astype(jnp.float32) for x in arrays), start, end
  )
  exact = dtype == jnp.float32
  assert out.dtype == dtype
  assert gates.error(out, expected) <= (2e-6 if exact else 1e-2)
  assert gates.error(lse, expected_lse) <= (1e-5 if exact else 5e-3)
  assert not np.asarray(out, np.float32)[0].any() and (lse[0] == -1e30).all()
