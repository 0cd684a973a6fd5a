"""Sampling of one token per row of logits, with its logprob.

One uniform number per row and an inverse CDF, instead of V noise values: the
number can then depend on the request and the position alone.

The vocabulary may be split over a mesh axis, within `sharding.split`: then
`axis` is its name, V the columns of one device, and each token one of all.

Axes: B rows, V vocab.
"""

import functools

import jax
import jax.numpy as jnp

_BITS = 30  # of a float32 in [0, 1] as an integer, which has the same order


def draw(
  logits: jax.Array,
  uniforms: jax.Array,
  temperature: jax.Array,
  top_k: jax.Array,
  top_p: jax.Array,
  min_p: jax.Array,
  axis: str | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Draws a token per row.

  token = F^-1(u),  F the CDF of softmax(logits / temperature), truncated

  Args:
    logits: f32[B, V].
    uniforms: f32[B], in [0, 1).
    temperature: f32[B]; 0 = the likeliest token, the first of equals.
    top_k: i32[B], keeps the k likeliest tokens; 0 = all.
    top_p: f32[B], then the likeliest tokens whose mass reaches it; 1 = all.
    min_p: f32[B], then tokens this likely relative to the likeliest; 0 = all.
    axis: mesh axis that splits the vocabulary; None = it is whole.

  Returns:
    (tokens i32[B], logprobs f32[B]): log softmax(logits / temperature)[token]
    in nats, without truncation; at temperature 0 those of temperature 1. A
    token whose probability is 0 in float32 is never drawn.
  """
  z = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
  top = jnp.max(z, axis=-1)
  top = (top if axis is None else jax.lax.pmax(top, axis))[:, None]
  mass = jnp.exp(z - top)
  log_total = jnp.log(_sum(mass, axis))
  truncated = (top_k > 0) | (top_p < 1) | (min_p > 0)
  kept = jax.lax.cond(
    jnp.any(truncated),
    functools.partial(_truncate, axis=axis),
    lambda mass, *_: mass,
    mass,
    top_k,
    top_p,
    min_p,
  )
  tokens = _invert(kept, uniforms, axis)
  best = _first(z == top)
  if axis is not None:  # the first of all devices
    size = z.shape[-1]
    vocab = size * jax.lax.axis_size(axis)
    best = jnp.where(best < size, best + _offset(z, axis), vocab)
    best = jax.lax.pmin(best, axis)
  tokens = jnp.where(temperature > 0, tokens, best)
  return tokens, _at(z - top, tokens, axis) - log_total


def _sum(x: jax.Array, axis: str | None) -> jax.Array:
  total = jnp.sum(x, axis=-1)
  return total if axis is None else jax.lax.psum(total, axis)


def _offset(x: jax.Array, axis: str | None) -> jax.Array | int:
  """Returns the token of the first column of x [B, V]."""
  return 0 if axis is None else jax.lax.axis_index(axis) * x.shape[-1]


def _at(x: jax.Array, tokens: jax.Array, axis: str | None) -> jax.Array:
  """Returns the entry of a token per row of x [B, V]."""
  if axis is None:
    return jnp.take_along_axis(x, tokens[:, None], axis=1)[:, 0]
  local, size = tokens - _offset(x, axis), x.shape[-1]
  inside = (local >= 0) & (local < size)
  local = jnp.clip(local, 0, size - 1)[:, None]
  entries = jnp.take_along_axis(x, local, axis=1)[:, 0]
  return jax.lax.psum(jnp.where(inside, entries, 0.0), axis)


def _first(mask: jax.Array) -> jax.Array:
  """Returns the index of the first True per row, i32[B]; V if there is none.

  XLA's argmax is slow on CPUs; a maximum and its first index are not.
  """
  size = mask.shape[-1]
  index = jnp.arange(size, dtype=jnp.int32)[None]
  return jnp.min(jnp.where(mask, index, size), axis=-1)


def _invert(
  mass: jax.Array, uniforms: jax.Array, axis: str | None
) -> jax.Array:
  """Returns the token at which the cumulative mass passes `uniforms` of it.

  Two levels, blocks first and then the tokens of one block: two short
  cumulative sums. A split vocabulary has a level above them, of its parts.
  """
  rows, vocab = mass.shape
  width = 1 << (vocab.bit_length() + 1) // 2
  blocks = -(-vocab // width)
  padded = jnp.pad(mass, ((0, 0), (0, blocks * width - vocab)))
  padded = padded.reshape(rows, blocks, width)
  sums = jnp.sum(padded, axis=-1)
  part, target = 0, jnp.sum(sums, axis=-1)
  if axis is None:
    target = uniforms * target
  else:
    parts = jax.lax.all_gather(target, axis, axis=1)
    target = uniforms * jnp.sum(parts, axis=-1)
    part, below = _pass(parts, target)
    target -= below
  block, below = _pass(sums, target)
  inside = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]
  tokens = block * width + _pass(inside, target - below)[0]
  if axis is None:
    return tokens
  here = part == jax.lax.axis_index(axis)
  return jax.lax.psum(jnp.where(here, tokens + _offset(mass, axis), 0), axis)


def _pass(mass: jax.Array, target: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the first index whose cumulative mass exceeds the target.

  Rounding may leave the target at or above the last sum: then it is the last
  index with any mass. An index without mass is never returned.

  Returns:
    (index, mass before it).
  """
  sums = jnp.cumsum(mass, axis=-1)
  index = jnp.arange(mass.shape[-1], dtype=jnp.int32)[None]
  positive = mass > 0
  first = _first((sums > target[:, None]) & positive)
  last = jnp.max(jnp.where(positive, index, 0), axis=-1)
  first = jnp.minimum(first, last)
  before = jnp.where(index < first[:, None], mass, 0.0)
  return first, jnp.sum(before, axis=-1)


def _truncate(mass, top_k, top_p, min_p, axis) -> jax.Array:
  """Sets the mass of excluded tokens to 0; the likeliest token has mass 1."""
  vocab = mass.shape[-1] * (1 if axis is None else jax.lax.axis_size(axis))
  order = jax.lax.bitcast_convert_type(mass, jnp.int32)

  def keeps_k(threshold):
    return _sum(order >= threshold[:, None], axis) >= top_k

  threshold = _largest(keeps_k, len(mass))
  on = (top_k > 0) & (top_k < vocab)
  mass = jnp.where((order >= threshold[:, None]) | ~on[:, None], mass, 0.0)
  enough = top_p * _sum(mass, axis)

  def keeps_p(threshold):
    kept = jnp.where(order >= threshold[:, None], mass, 0.0)
    return _sum(kept, axis) >= enough

  threshold = _largest(keeps_p, len(mass))
  keep = (order >= threshold[:, None]) | (top_p == 1)[:, None]
  mass = jnp.where(keep, mass, 0.0)
  return jnp.where(mass >= min_p[:, None], mass, 0.0)


def _largest(holds, rows: int) -> jax.Array:
  """Returns the largest threshold per row with `holds`, exact, bit by bit."""

  def try_bit(i, threshold):
    higher = threshold | (1 << (_BITS - 1 - i))
    return jnp.where(holds(higher), higher, threshold)

  return jax.lax.fori_loop(0, _BITS, try_bit, jnp.zeros(rows, jnp.int32))
