"""Attention by blocks, against XLA with all scores."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kernels import reference
from posttrain.ops import attention, chunked
from tests.kernels import gates, inputs

T, N, K, H = 80, 4, 2, 8
SCALE = H**-0.5


def by_blocks(q, k, v, *ends, scale, softcap, block=32, by_row=False):
  blocks = chunked.Blocks(block // 2, block, block, by_row)
  options = chunked.Options(scale, softcap, blocks)
  return chunked.attention(options, q, k, v, *ends)[0]


def whole(q, k, v, start, end, **options):
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  return reference.attention(q, k, v, start, end, **options)


def make_inputs(b, t=T, s=T, dtype=jnp.float32):
  """Draws (q, k, v) and a gradient; keys have heads before time."""
  shapes = ((b, t, N, H), (b, K, s, H), (b, K, s, H), (b, t, N, H))
  *arrays, g = inputs.draw(0, *shapes, dtype=dtype)
  return arrays, g


def run(fn, arrays, g, ends, **options):
  @jax.jit
  def call(arrays, g, ends):
    out, vjp = jax.vjp(
      lambda *x: fn(*x, *ends, scale=SCALE, **options), *arrays
    )
    return out, *vjp(g)

  return call(arrays, g, ends)


def close(ours, expected, bound):
  for a, b in zip(ours, expected, strict=True):
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert np.isfinite(a).all()
    np.testing.assert_allclose(a, b, atol=bound * np.abs(b).max())


@pytest.mark.parametrize(
  't, s, block, softcap, by_row',
  [
    (T, T, 32, None, True),
    (T, T, 32, None, False),
    (T, T, 128, None, True),
    (T, T, 256, 0.8, True),
    (24, T, 32, 0.8, True),
    (24, T, 64, None, True),
    (T, 87, 16, None, True),
  ],
)
def test_matches_the_oracle_on_all_kinds_of_intervals(
  t, s, block, softcap, by_row
):
  """Sizes that blocks divide or not; empty intervals; windows; a cache."""
  ends = inputs.every_kind(t, s)
  arrays, g = make_inputs(len(inputs.KINDS), t, s)
  fn = functools.partial(by_blocks, block=block, by_row=by_row)
  ours = run(fn, arrays, g, ends, softcap=softcap)
  close(ours, run(whole, arrays, g, ends, softcap=softcap), 5e-6)
  empty = np.maximum(ends[0], 0) >= np.minimum(ends[1], s)
  assert empty.any() and not np.asarray(ours[0])[empty].any()
  assert not np.asarray(ours[1])[empty].any()  # the gradient of queries


@pytest.mark.parametrize(
  'block, by_row', [(32, True), (32, False), (256, True)]
)
def test_prefix_trees_match_the_mask_of_ancestors(block, by_row):
  ends, mask = inputs.forests(T)
  arrays, g = make_inputs(4)

  def expected(q, k, v, *, scale, softcap):
    k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
    return gates.by_mask(q, k, v, mask, scale, softcap)[0]

  fn = functools.partial(by_blocks, block=block, by_row=by_row)
  ours = run(fn, arrays, g, ends, softcap=0.8)
  close(ours, run(expected, arrays, g, (), softcap=0.8), 5e-6)


def test_a_branch_does_not_read_its_sibling():
  arrays, g = make_inputs(1, 96, 96)
  start, end = (jnp.asarray(x)[None] for x in inputs.packed((96,), 96))
  until = jnp.asarray(np.repeat([96, 64, 96], 32)[None], jnp.int32)
  q, k, v = arrays
  nan = jnp.zeros(96).at[32:64].set(jnp.nan)[None, None, :, None]
  args = g, (start, end, until)
  ours = run(by_blocks, arrays, *args, softcap=None)[0]
  other = run(by_blocks, (q, k + nan, v + nan), *args, softcap=None)[0]
  np.testing.assert_array_equal(ours[:, 64:], other[:, 64:])
  assert np.isnan(other[:, 32:64]).all()


def test_bfloat16_matches_the_oracle():
  ends = inputs.every_kind(T)
  arrays, g = make_inputs(len(inputs.KINDS), dtype=jnp.bfloat16)
  ours = run(by_blocks, arrays, g, ends, softcap=None)
  assert {x.dtype for x in ours} == {jnp.dtype(jnp.bfloat16)}
  close(ours, run(whole, arrays, g, ends, softcap=None), 2e-2)


def test_blocks_outside_every_interval_are_not_read():
  """NaN in a block of keys that no query reaches changes nothing."""
  arrays, g = make_inputs(2)
  start, end = (np.full((2, T), x, np.int32) for x in (33, 60))
  ends = jnp.asarray(start), jnp.asarray(end)
  q, k, v = arrays
  nan = jnp.where(jnp.arange(T) < T // 3, jnp.nan, 0.0)[None, None, :, None]
  ours = run(by_blocks, arrays, g, ends, softcap=None)
  other = run(by_blocks, (q, k + nan, v + nan), g, ends, softcap=None)
  for a, b in zip(ours, other, strict=True):
    np.testing.assert_array_equal(a, b)


def test_a_row_does_not_read_what_another_one_reaches():
  arrays, g = make_inputs(2)
  start, end = (np.full((2, T), x, np.int32) for x in (0, T))
  start[0] = 48  # the first row skips the first block, the other reads all
  ends = jnp.asarray(start), jnp.asarray(end)
  q, k, v = arrays
  nan = jnp.zeros(k.shape).at[0, :, :32].set(jnp.nan)
  fn = functools.partial(by_blocks, by_row=True)
  ours = run(fn, arrays, g, ends, softcap=None)
  other = run(fn, (q, k + nan, v + nan), g, ends, softcap=None)
  for a, b in zip(ours, other, strict=True):
    np.testing.assert_array_equal(a, b)


def test_gradients_by_finite_differences():
  arrays, _ = make_inputs(1, 12, 12)
  start, end = (jnp.asarray(x)[None] for x in inputs.packed((7, 3), 12))
  fn = functools.partial(by_blocks, scale=SCALE, softcap=0.8, block=16)
  check_grads(
    jax.jit(lambda *x: fn(*x, start, end)),
    arrays,
    order=1,
    modes=['rev'],
    atol=1e-2,
    rtol=1e-2,
  )


@pytest.mark.parametrize(
  'impl', ['xla', pytest.param('interpret', marks=pytest.mark.slow)]
)
@pytest.mark.parametrize('t', [24, pytest.param(200, marks=pytest.mark.slow)])
def test_sinks_are_keys_without_values(impl, t):
  rng = np.random.default_rng(0)
  q, g = rng.normal(size=(2, 2, t, N, 16)).astype(np.float32)
  k, v = rng.normal(size=(2, 2, t, K, 16)).astype(np.float32)
  sinks = rng.normal(size=N).astype(np.float32)
  start, end = (
    jnp.stack([jnp.asarray(x)] * 2) for x in inputs.packed((t // 3, t // 2), t)
  )

  def ours(q, k, v, sinks):
    return attention.attention(
      q, k, v, start, end, scale=SCALE, impl=impl, sinks=sinks
    )

  def whole(q, k, v, sinks):
    scores = SCALE * jnp.einsum(
      'btkgh,bskh->bkgts', q.reshape(2, t, K, 2, -1), k
    )
    keys = jnp.arange(t)[None, None]
    mask = (start[..., None] <= keys) & (keys < end[..., None])
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    own = jnp.broadcast_to(sinks.reshape(1, K, 2, 1, 1), (2, K, 2, t, 1))
    p = jax.nn.softmax(jnp.concatenate([scores, own], axis=-1))[..., :-1]
    return jnp.einsum('bkgts,bskh->btkgh', p, v).reshape(q.shape)

  @functools.partial(jax.jit, static_argnums=0)
  def run(fn, *args):
    out, vjp = jax.vjp(fn, *args)
    return out, *vjp(g)

  outcomes = [run(fn, q, k, v, sinks) for fn in (ours, whole)]
  close(*outcomes, 1e-5)
  cached = (x.swapaxes(1, 2) for x in (k, v))
  last = attention.decode(
    q[:, 3], *cached, start[:, 3], end[:, 3], scale=SCALE, sinks=sinks
  )
  np.testing.assert_allclose(last, outcomes[1][0][:, 3], atol=1e-5)


@pytest.mark.parametrize('t, stored', [(512, False), (160, True)])
def test_long_rows_store_no_scores(t, stored):
  """No array of the gradient's program has as many entries as T times S."""
  shape = jax.ShapeDtypeStruct

  def loss(q, k, v, *ends):
    return attention.attention(q, k, v, *ends, scale=SCALE).sum()

  q, ends = shape((1, t, N, H), jnp.float32), shape((1, t), jnp.int32)
  k = shape((1, t, K, H), jnp.float32)
  text = jax.jit(jax.grad(loss, (0, 1, 2))).lower(q, k, k, ends, ends).as_text()
  sizes = re.findall(r'tensor<((?:\d+x)+)', text)
  largest = max(math.prod(map(int, x[:-1].split('x'))) for x in sizes)
  assert (largest >= t * t) == stored, largest


@pytest.mark.parametrize('kept', ['kept', 'attention'])
def test_a_rematerialized_layer_runs_forward_once(kept):
  """Two loops over blocks of queries: one forward, one backward."""
  shape = jax.ShapeDtypeStruct
  q, ends = shape((1, 1024, N, H), jnp.float32), shape((1, 1024), jnp.int32)
  policy = jax.checkpoint_policies.save_only_these_names(kept)

  @functools.partial(jax.checkpoint, policy=policy, prevent_cse=False)
  def layer(x, start, end):
    return jnp.sin(attention.attention(x, x, x, start, end, scale=SCALE))

  def loss(x, *ends):
    return layer(jnp.sin(x), *ends).sum()

  text = jax.jit(jax.grad(loss)).lower(q, ends, ends).as_text()
  exps = text.count('stablehlo.exponential ')
  # p and the shrinking of the state forward, p backward.
  assert exps == 3, exps


def test_no_rows_give_no_rows():
  arrays, _ = make_inputs(0)
  q, k, v = arrays
  ends = jnp.zeros((0, T), jnp.int32)
  assert attention.cached(q, k, v, ends, ends, scale=SCALE).shape == q.shape
