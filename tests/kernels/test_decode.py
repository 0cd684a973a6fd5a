"""Decode attention, interpreted, against the oracle and flash attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from kernels import attention, decode_tpu, decode_triton, masks, reference
from tests.kernels import gates, inputs

S, N, K, H = 64, 6, 2, 16  # groups of three
SCALE = H**-0.5
# Empty, one key, a window, out of range, everything, a ragged length.
START = np.array([9, 63, 17, -5, 0, 0], np.int32)
END = np.array([9, 64, 44, 70, 64, 37], np.int32)
B = len(START)
# (backend, splits); 16 are more than the blocks.
CASES = [('triton', 1), ('triton', 16), ('mosaic_tpu', None)]
cases = pytest.mark.parametrize('case', CASES, ids=str)


@pytest.fixture(autouse=True, scope='module')
def small_blocks():
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(decode_triton, 'BLOCK', 16)
    patch.setattr(decode_tpu, 'BLOCK', 16)
    patch.setattr(decode_tpu, 'LEAST', 16)
    yield


@functools.cache
def make_run(case, softcap=None):
  """Jitted (q, k, v, k_start, k_end) -> (out, lse)."""
  options = dict(scale=SCALE, softcap=softcap, return_lse=True)
  if case == 'oracle':
    return jax.jit(functools.partial(reference.decode, **options))
  backend, splits = case
  decode = functools.partial(
    attention.decode, **options, backend=backend, splits=splits, interpret=True
  )
  return jax.jit(decode, compiler_options=gates.FAST)


@functools.cache
def make_flash(backend):
  """Jitted (q [B, 16, N, H], k, v, k_start, k_end) -> (out, lse)."""
  cached = functools.partial(
    attention.cached,
    scale=SCALE,
    return_lse=True,
    backend=backend,
    interpret=True,
  )
  return jax.jit(cached, compiler_options=gates.FAST)


def make_inputs(dtype=jnp.float32, s=S):
  return inputs.draw(0, (B, N, H), (B, K, s, H), (B, K, s, H), dtype=dtype)


@cases
def test_int8_caches_are_read_with_their_scales(case):
  q, k, v = make_inputs(jnp.bfloat16, 50)
  scales = 0.01 + inputs.draw(1, (B, K, 50), (B, K, 50))[0] ** 2 / 99
  scales = scales, scales[:, :, ::-1]
  k, v = (jnp.round(x * 40).astype(jnp.int8) for x in (k, v))
  backend, splits = case
  decode = functools.partial(
    attention.decode,
    scale=SCALE,
    softcap=2.0,
    return_lse=True,
    backend=backend,
    splits=splits,
    interpret=True,
    scales=scales,
  )
  out, lse = jax.jit(decode, compiler_options=gates.FAST)(q, k, v, START, END)
  k, v = (x * y[..., None] for x, y in zip((k, v), scales, strict=True))
  expected, expected_lse = make_run('oracle', 2.0)(
    q.astype(jnp.float32), k, v, START, END
  )
  np.testing.assert_allclose(np.asarray(out, np.float32), expected, atol=1e-2)
  np.testing.assert_allclose(lse, expected_lse, atol=1e-2)


@cases
@pytest.mark.parametrize(
  'softcap, s, dtype',
  [(None, S, jnp.float32), (2.0, 50, jnp.bfloat16)],
  ids=['float32', 'bfloat16 softcap odd'],
)
def test_out_and_lse_match_oracle(case, softcap, s, dtype):
  arrays = make_inputs(dtype, s)
  out, lse = make_run(case, softcap)(*arrays, START, END)
  assert out.dtype == dtype and lse.dtype == jnp.float32
  expected, expected_lse = make_run('oracle', softcap)(
    *(x.astype(jnp.float32) for x in arrays), START, END
  )
  exact = dtype == jnp.float32
  np.testing.assert_allclose(
    np.asarray(out, np.float32), expected, rtol=0, atol=2e-6 if exact else 1e-2
  )
  np.testing.assert_allclose(
    lse, expected_lse, rtol=0, atol=1e-5 if exact else 5e-3
  )
  assert not np.asarray(out, np.float32)[0].any() and (lse[0] == -1e30).all()


@pytest.mark.parametrize(
  'dtype, bound',
  [(jnp.float32, 2e-6), (jnp.bfloat16, 5e-3)],
  ids=['float32', 'bfloat16'],
)
def test_one_split_and_many_agree(dtype, bound):
  arrays = make_inputs(dtype)
  one, many = (make_run(case)(*arrays, START, END) for case in CASES[:2])
  assert gates.error(one[0], many[0]) <= bound
  np.testing.assert_allclose(one[1], many[1], rtol=0, atol=1e-5)


@cases
def test_grouped_heads_equal_repeated_heads(case):
  q, k, v = make_inputs()
  run = make_run(case)
  grouped = run(q, k, v, START, END)
  full = run(q, *(np.repeat(x, N // K, axis=1) for x in (k, v)), START, END)
  for a, b in zip(grouped, full, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


@cases
def test_a_window_of_all_keys_is_causal_bitwise(case):
  arrays, start, end = make_inputs(), np.zeros_like(END), np.minimum(END, S)
  run = make_run(case)
  causal = run(*arrays, start, end)
  for size in (S, 10 * S):
    wide = run(*arrays, masks.window(start, end, size), end)
    for a, b in zip(causal, wide, strict=True):
      np.testing.assert_array_equal(a, b)


@cases
def test_a_huge_softcap_equals_none(case):
  arrays = make_inputs()
  plain = make_run(case)(*arrays, START, END)
  capped = make_run(case, 1e6)(*arrays, START, END)
  for a, b in zip(plain, capped, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


@cases
def test_two_runs_agree_bitwise(case):
  arrays, run = make_inputs(), make_run(case)
  one, two = (run(*arrays, START, END) for _ in range(2))
  for a, b in zip(one, two, strict=True):
    np.testing.assert_array_equal(a, b)


@cases
def test_vmap_and_shard_map_equal_the_plain_call(case):
  args = (*make_inputs(), START, END)
  run = make_run(case)
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


@pytest.mark.parametrize('dtype, atol', [('float32', 5e-6), ('bfloat16', 1e-2)])
@cases
def test_decode_equals_the_last_row_of_flash(case, dtype, atol):
  q, k, v = (x.astype(dtype) for x in make_inputs())
  out, lse = make_run(case)(q, k, v, START, END)
  queries = np.stack([np.zeros_like(q)] * 15 + [q], axis=1)
  start, end = (
    np.stack([np.zeros_like(x)] * 15 + [x], axis=1) for x in (START, END)
  )
  flash, flash_lse = make_flash(case[0])(queries, k, v, start, end)
  out, last = (np.asarray(x, np.float32) for x in (out, flash[:, -1]))
  np.testing.assert_allclose(out, last, rtol=0, atol=atol)
  np.testing.assert_allclose(lse, flash_lse[..., -1], rtol=0, atol=2 * atol)


@cases
def test_keys_outside_the_interval_change_nothing_bitwise(case):
  q, k, v = make_inputs()
  keys = np.arange(S)[None]
  outside = ~((START[:, None] <= keys) & (keys < END[:, None]))
  outside = outside[:, None, :, None]
  run = make_run(case)
  ours = run(q, k, v, START, END)
  other = run(
    q, *(np.where(outside, 1e4 * x + 7.0, x) for x in (k, v)), START, END
  )
  for a, b in zip(ours, other, strict=True):
    np.testing.assert_array_equal(a, b)


@cases
def test_large_scores_are_finite_and_one_key_gives_its_value(case):
  q, k, v = make_inputs()
  for size in (1e4, -1e4):
    out, lse = make_run(case)(q * size / SCALE, k, v, START, END)
    assert np.isfinite(out).all() and np.isfinite(lse).all()
    np.testing.assert_allclose(  # row 1 attends to the last key only
      out[1], np.repeat(v[1, :, -1], N // K, axis=0), rtol=1e-6
    )


def test_steps_of_a_tpu_are_the_blocks_that_intervals_reach():
  # Empty; keys 17 to 43 in blocks of 16; all of 64.
  start, end = jnp.array([0, 17, 0]), jnp.array([0, 44, 64])
  count, rows, blocks = decode_tpu.steps(start, end, 16, 4)
  assert count == 7 and len(rows) == len(blocks) == 12
  assert rows[:7].tolist() == [0, 1, 1, 2, 2, 2, 2]
  assert blocks[:7].tolist() == [0, 1, 2, 0, 1, 2, 3]


@pytest.mark.parametrize(
  'programs, size, expected',
  [(512, 4096, 1), (64, 4096, 8), (8, 4096, 16), (8, 256, 2), (8, 64, 1)],
)
def test_default_splits_grow_up_to_a_least_size(programs, size, expected):
  assert decode_triton.default_splits(programs, size) == expected
