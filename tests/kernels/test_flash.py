"""Flash attention, interpreted: against the oracle, and exact identities.

All kinds of intervals are rows of one batch, and the blocks are small, so that
a few compilations cross every edge.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from jax.test_util import check_grads

from kernels import attention, flash_tpu, flash_triton, masks
from tests.kernels import gates, inputs

B, T, N, K, H = len(inputs.KINDS), 32, 4, 2, 16
SCALE = H**-0.5
make_inputs = functools.partial(gates.make_inputs, b=B, t=T, n=N, k=K, h=H)
backends = pytest.mark.parametrize('backend', ['triton', 'mosaic_tpu'])


@pytest.fixture(autouse=True, scope='module')
def small_blocks():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(flash_triton, 'BLOCK', 16)
    patch.setattr(flash_tpu, 'BLOCK', 16)
    patch.setattr(flash_tpu, 'LANES', 16)
    yield


def make_run(backend, name='attention', softcap=None):
  return gates.make_run(backend, SCALE, name, softcap)


def rows(kind):
  """Returns intervals of one kind, repeated for B rows."""
  start, end = inputs.intervals(kind, T)
  return tuple(np.tile(x.astype(np.int32), (B, 1)) for x in (start, end))


@backends
@pytest.mark.parametrize(
  't, n, k, h, dtype',
  [(T, N, K, H, jnp.float32), (50, 4, 1, 64, jnp.bfloat16)],
  ids=['float32', 'bfloat16'],
)
def test_values_and_gradients_match_oracle(backend, t, n, k, h, dtype):
  start, end = inputs.every_kind(t)
  arrays, gradients = gates.make_inputs(3, B, t, n, k, h, dtype)
  ours = make_run(backend)(*arrays, start, end, *gradients)
  arrays = [x.astype(jnp.float32) for x in arrays]
  expected = make_run('oracle')(*arrays, start, end, *gradients)
  gates.compare(ours, expected, dtype)
  gates.check_empty(ours, start, end)


@backends
def test_prefix_trees_match_the_mask_of_ancestors(backend):
  """Rows of 1 to 4 levels; some blocks need no mask, some are not visited."""
  ends, mask = inputs.forests(2 * T)
  arrays, gradients = make_inputs(0, b=4, t=2 * T)

  def expected(*x):
    out, vjp = jax.vjp(lambda *x: gates.by_mask(*x, mask, SCALE), *x)
    return *out, *vjp(gradients)

  ours = make_run(backend)(*arrays, *ends, *gradients)
  expected = jax.jit(expected, compiler_options=gates.FAST)(*arrays)
  gates.compare(ours, expected, jnp.float32)


@backends
def test_odd_prefill_over_a_cache_matches_oracle(backend):
  t, s, n, h = 21, 57, 6, 32  # no multiples of anything; groups of three
  q, k, v, g, g_lse = inputs.draw(
    4, (B, t, n, h), (B, K, s, h), (B, K, s, h), (B, t, n, h), (B, n, t)
  )
  args = (q, k, v, *inputs.every_kind(t, s), g, g_lse)
  ours = make_run(backend, 'cached', softcap=3.0)(*args)
  expected = make_run('oracle', 'cached', softcap=3.0)(*args)
  gates.compare(ours, expected, jnp.float32)


@backends
def test_keys_outside_every_interval_change_nothing_bitwise(backend):
  (q, k, v), gradients = make_inputs(0)
  intervals = np.full((B, T), 5, np.int32), np.full((B, T), 19, np.int32)
  outside = (np.arange(T) < 5) | (np.arange(T) >= 19)

  def edited(x):
    return np.where(outside[:, None, None], 1e4 * x + 7.0, x)

  run = make_run(backend)
  ours = run(q, k, v, *intervals, *gradients)
  other = run(q, edited(k), edited(v), *intervals, *gradients)
  for a, b in zip(ours, other, strict=True):
    np.testing.assert_array_equal(a, b)
  assert not any(np.asarray(x)[:, outside].any() for x in ours[3:])


@backends
def test_packed_segments_equal_separate_rows(backend):
  arrays, (g, g_lse) = make_inputs(0)
  lengths = (T // 4, T // 2 - 1, T // 8)
  run = make_run(backend)
  whole = run(*arrays, *rows('packed'), g, g_lse)
  first = 0
  for length in lengths:

    def rolled(x, axis=1, first=first):
      return np.roll(x, -first, axis)

    valid = np.arange(T) < length  # masks g of other segments
    interval = [np.tile(x, (B, 1)) for x in inputs.packed((length,), T)]
    separate = run(
      *map(rolled, arrays),
      *interval,
      rolled(g) * valid[:, None, None],
      rolled(g_lse, 2) * valid,
    )
    for i, (a, b) in enumerate(zip(whole, separate, strict=True)):
      a, b = (
        np.moveaxis(np.asarray(x), 2, 1) if i == 1 else np.asarray(x)
        for x in (a, b)
      )
      a, b = a[:, first : first + length], b[:, :length]
      np.testing.assert_allclose(a, b, atol=1e-5 if i == 1 else 5e-6)
    first += length


@backends
def test_gradient_of_padding_is_zero(backend):
  arrays, gradients = make_inputs(0)
  start, end = rows('packed')
  pad = end[0] == 0
  out, lse, *grads = map(
    np.asarray, make_run(backend)(*arrays, start, end, *gradients)
  )
  assert pad.any() and not out[:, pad].any() and (lse[..., pad] == -1e30).all()
  for grad in grads:
    assert grad[:, ~pad].any() and not grad[:, pad].any()


@backends
def test_grouped_heads_equal_repeated_heads(backend):
  (q, k, v), gradients = make_inputs(0)
  repeated = [np.repeat(x, N // K, axis=2) for x in (k, v)]
  run = make_run(backend)
  grouped = run(q, k, v, *rows('packed'), *gradients)
  full = run(q, *repeated, *rows('packed'), *gradients)
  summed = [np.asarray(x).reshape(B, T, K, N // K, H).sum(3) for x in full[3:]]
  for a, b in zip(grouped, (*full[:3], *summed), strict=True):
    np.testing.assert_allclose(a, b, atol=5e-6)


@backends
def test_a_window_of_all_keys_is_causal_bitwise(backend):
  arrays, gradients = make_inputs(0)
  start, end = rows('causal')
  run = make_run(backend)
  causal = run(*arrays, start, end, *gradients)
  for size in (T, 10 * T):
    wide = run(*arrays, masks.window(start, end, size), end, *gradients)
    for a, b in zip(causal, wide, strict=True):
      np.testing.assert_array_equal(a, b)


@backends
def test_a_huge_softcap_equals_none(backend):
  arrays, gradients = make_inputs(0)
  args = (*arrays, *rows('packed'), *gradients)
  plain = make_run(backend)(*args)
  capped = make_run(backend, softcap=1e6)(*args)
  for a, b in zip(plain, capped, strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)


@backends
def test_gradients_by_finite_differences(backend):
  arrays, (g, g_lse) = make_inputs(0)
  run, intervals = make_run(backend), rows('packed')

  def without_pads(out, lse):  # an lse of -1e30 would hide all differences
    return out, jnp.where(lse > -1e29, lse, 0.0)

  @jax.custom_vjp
  def call(*x):
    return without_pads(*run(*x, *intervals, g, g_lse)[:2])

  call.defvjp(
    lambda *x: (call(*x), x), lambda x, g: run(*x, *intervals, *g)[2:]
  )
  check_grads(call, arrays, order=1, modes=['rev'], atol=1e-2, rtol=1e-2)


@backends
def test_large_scores_are_finite_and_one_key_gives_its_value(backend):
  (q, k, v), gradients = make_inputs(0)
  for kind, size in (('causal', 1e4), ('causal', -1e4), ('one key', 1e4)):
    run = make_run(backend)
    ours = run(q * size / SCALE, k, v, *rows(kind), *gradients)
    for x in ours:
      assert np.isfinite(x).all()
  np.testing.assert_allclose(  # with one key, out is its value
    ours[0], np.repeat(v, N // K, axis=2), rtol=1e-6
  )


@backends
def test_two_runs_agree_bitwise(backend):
  arrays, gradients = make_inputs(0)
  run = make_run(backend)
  one, two = (run(*arrays, *rows('packed'), *gradients) for _ in range(2))
  for a, b in zip(one, two, strict=True):
    np.testing.assert_array_equal(a, b)


@backends
def test_vmap_and_shard_map_equal_the_plain_call(backend):
  arrays, gradients = make_inputs(0)
  args = (*arrays, *rows('packed'), *gradients)
  run = make_run(backend)
  mesh = jax.make_mesh((1,), ('data',), (jax.sharding.AxisType.Auto,))
  spec = PartitionSpec('data')
  wrapped = jax.jit(
    jax.shard_map(
      jax.vmap(run.__wrapped__),
      mesh=mesh,
      in_specs=spec,
      out_specs=spec,
      check_vma=False,
    ),
    compiler_options=gates.FAST,
  )(*(x.reshape(2, B // 2, *x.shape[1:]) for x in args))
  for a, b in zip(run(*args), wrapped, strict=True):
    np.testing.assert_allclose(a, b.reshape(a.shape), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
  'backend, h, dtype',
  [
    ('triton', 96, 'float32'),
    ('triton', 8, 'float32'),
    ('triton', 64, 'float64'),
    ('mosaic_tpu', 20, 'float32'),
    ('mosaic_tpu', 64, 'float16'),
  ],
)
def test_unsupported_heads_are_refused(backend, h, dtype):
  x = np.zeros((1, 2, 2, h), dtype)
  ends = np.zeros((1, 2), np.int32)
  with pytest.raises(NotImplementedError, match=f'{backend}: .* must be'):
    attention.attention(x, x, x, ends, ends, scale=1.0, backend=backend)


def test_mixed_dtypes_are_refused():
  x, ends = np.zeros((1, 2, 2, 16), np.float32), np.zeros((1, 2), np.int32)
  with pytest.raises(NotImplementedError, match='k and v must be float32'):
    attention.attention(x, x.astype(np.float16), x, ends, ends, scale=1.0)
