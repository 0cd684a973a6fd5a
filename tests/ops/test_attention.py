"""Attention in XLA: against the oracle, invariances, gradients."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from kernels import reference
from posttrain import schema
from posttrain.ops import attention
from tests.kernels import inputs

B, T, N, K, H = 2, 24, 4, 2, 8
SCALE = H**-0.5

STATIC = ('scale', 'softcap')
attend = jax.jit(attention.attention, static_argnames=STATIC)
ancestors = jax.jit(attention.ancestors, static_argnums=1)
oracle = jax.jit(reference.attention, static_argnames=STATIC)


def make_inputs(seed=0, n=N, k=K, t=T, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(seed), 3)
  shapes = ((B, t, n, H), (B, t, k, H), (B, t, k, H))
  return tuple(
    jax.random.normal(key, shape, dtype)
    for key, shape in zip(keys, shapes, strict=True)
  )


def packed(lengths, t=T):
  """Returns (segment_ids, positions) of one row, tiled over B."""
  ids = np.zeros(t, np.int32)
  positions = np.zeros(t, np.int32)
  start = 0
  for i, length in enumerate(lengths):
    ids[start : start + length] = i + 1
    positions[start : start + length] = np.arange(length)
    start += length
  return jnp.tile(ids, (B, 1)), jnp.tile(positions, (B, 1))


def make_intervals(kind):
  if kind == 'packed':
    return attention.intervals(*packed((7, 10, 3)))
  if kind == 'causal':
    return attention.intervals(*packed((T,)))
  rng = np.random.default_rng(0)  # random, a fifth of them empty
  start = rng.integers(0, T, (B, T)).astype(np.int32)
  width = rng.integers(0, 5, (B, T)) * 3
  end = np.minimum(start + width, T).astype(np.int32)
  return jnp.asarray(start), jnp.asarray(end)


def test_intervals_of_a_literal_row():
  ids = jnp.array([[1, 1, 1, 2, 2, 0]])
  positions = jnp.array([[0, 1, 2, 0, 1, 0]])
  start, end = attention.intervals(ids, positions)
  assert start.tolist() == [[0, 0, 0, 3, 3, 0]]
  assert end.tolist() == [[1, 2, 3, 4, 5, 0]]


def test_intervals_and_windows_of_a_literal_tree():
  # A segment of two; two tokens with branches of two and one; a pad.
  ids = jnp.array([[1, 1, 2, 2, 2, 2, 3, 0]])
  positions = jnp.array([[0, 1, 0, 1, 2, 3, 2, 0]])
  ends = jnp.array([[2, 2, 7, 7, 6, 6, 7, 0]])
  start, end = attention.intervals(ids, positions, ends)
  assert start.tolist() == [[0, 0, 2, 2, 2, 2, 2, 0]]
  assert end.tolist() == [[1, 2, 3, 4, 5, 6, 7, 0]]
  first = ancestors(positions, 2)
  assert first[0, :7].tolist() == [0, 0, 2, 2, 3, 4, 3]


@pytest.mark.parametrize('window', [1, 3, 99])
def test_a_window_begins_at_an_ancestor(window):
  for levels in (1, 2, 3, 4):
    positions, _, mask = inputs.forest(levels, 64, levels)
    first = ancestors(jnp.asarray(positions)[None], window)[0]
    valid = mask.any(1)
    depth = np.maximum(positions - window + 1, 0)
    assert (positions[first] == depth)[valid].all()
    assert mask[np.arange(64), first][valid].all()


def test_windows_of_rows_of_more_than_65536_tokens():
  # Two trees, the second one of a depth times a length of more than 2**32.
  positions = jnp.concatenate((jnp.arange(10), jnp.arange(70_000)))[None]
  first = ancestors(positions, 4)
  index = np.arange(70_010)
  expected = index - np.minimum(positions[0], 3)
  np.testing.assert_array_equal(first[0], expected)


def test_a_tree_is_refused_by_cudnn():
  with pytest.raises(schema.FieldError, match='batch.trees must be False'):
    attention.check(
      dataclasses.replace(schema.Model(), attention='cudnn', dtype='bfloat16'),
      'gpu',
      trees=True,
    )


def test_oracle_of_literal_scores():
  # Two keys with scores log 3 and 0: weights 3/4 and 1/4.
  q = jnp.ones((1, 2, 1, 1))
  k = jnp.array([np.log(3.0), 0.0], jnp.float32).reshape(1, 2, 1, 1)
  v = jnp.array([4.0, 8.0]).reshape(1, 2, 1, 1)
  start, end = jnp.array([[0, 1]]), jnp.array([[2, 2]])
  out = oracle(q, k, v, start, end, scale=1.0)
  np.testing.assert_allclose(out.ravel(), [5.0, 8.0], rtol=1e-6)


@pytest.mark.parametrize('softcap', [None, 0.8])
@pytest.mark.parametrize('kind', ['causal', 'packed', 'any'])
def test_values_and_gradients_match_oracle(kind, softcap):
  options = {'scale': SCALE, 'softcap': softcap}
  q, k, v = make_inputs()
  start, end = make_intervals(kind)
  g = jax.random.normal(jax.random.key(9), q.shape)

  def run(fn):
    @jax.jit
    def call(*x):
      out, vjp = jax.vjp(lambda *x: fn(*x, start, end, **options), *x)
      return out, vjp(g)

    return call(q, k, v)

  ours, expected = run(attend), run(oracle)
  for a, b in zip(*map(jax.tree.leaves, (ours, expected)), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


def test_bfloat16_matches_oracle():
  start, end = make_intervals('packed')
  q, k, v = make_inputs(dtype=jnp.bfloat16)
  out = attend(q, k, v, start, end, scale=SCALE)
  expected = oracle(q, k, v, start, end, scale=SCALE)
  assert out.dtype == jnp.bfloat16
  np.testing.assert_allclose(
    out.astype(np.float32), expected.astype(np.float32), atol=2e-2
  )


def test_keys_outside_every_interval_change_nothing():
  q, k, v = make_inputs()
  start = jnp.full((B, T), 5, jnp.int32)
  end = jnp.full((B, T), 9, jnp.int32)
  outside = (jnp.arange(T) < 5) | (jnp.arange(T) >= 9)

  def edited(x):
    return jnp.where(outside[None, :, None, None], 1e4 * x + 7.0, x)

  ours = attend(q, k, v, start, end, scale=SCALE)
  other = attend(q, edited(k), edited(v), start, end, scale=SCALE)
  np.testing.assert_array_equal(ours, other)


def test_packed_segments_equal_separate_rows():
  inputs = make_inputs()
  whole = attend(*inputs, *make_intervals('packed'), scale=SCALE)
  start = 0
  for length in (7, 10, 3):
    rolled = [jnp.roll(x, -start, axis=1) for x in inputs]
    interval = attention.intervals(*packed((length,)))
    separate = attend(*rolled, *interval, scale=SCALE)
    np.testing.assert_allclose(
      whole[:, start : start + length], separate[:, :length], atol=2e-6
    )
    start += length


def test_grouped_heads_equal_repeated_heads():
  q, k, v = make_inputs()
  start, end = make_intervals('packed')
  grouped = attend(q, k, v, start, end, scale=SCALE)
  k, v = (jnp.repeat(x, N // K, axis=2) for x in (k, v))
  repeated = attend(q, k, v, start, end, scale=SCALE)
  np.testing.assert_allclose(grouped, repeated, atol=2e-6)


def test_padding_is_zero_and_has_no_gradient():
  inputs = make_inputs()
  start, end = make_intervals('packed')  # 20 tokens and 4 pads

  def loss(q, k, v):
    out = attend(q, k, v, start, end, scale=SCALE)
    return jnp.sum(out * jnp.arange(1.0, out.size + 1).reshape(out.shape)), out

  grads, out = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(*inputs)
  assert not out[:, 20:].any()
  for g in grads:
    assert jnp.isfinite(g).all() and g[:, :20].any()
    assert not g[:, 20:].any()


@pytest.mark.parametrize('size', [1e2, 1e4])
def test_gradients_are_finite_at_large_scores(size):
  q, k, v = make_inputs()
  start, end = make_intervals('causal')

  def loss(q, k, v):
    return attend(q * size, k, v, start, end, scale=1.0).sum()

  for g in jax.jit(jax.grad(loss, (0, 1, 2)))(q, k, v):
    assert jnp.isfinite(g).all()


@pytest.mark.parametrize('softcap', [None, 0.8])
def test_gradients_by_finite_differences(softcap):
  q, k, v = make_inputs(t=6)
  start, end = attention.intervals(*packed((3, 2), 6))
  check_grads(
    lambda *x: attend(*x, start, end, scale=SCALE, softcap=softcap),
    (q, k, v),
    order=1,
    modes=['rev'],
    atol=1e-2,
    rtol=1e-2,
  )
