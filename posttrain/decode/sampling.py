"""Sampling of one token per row of logits, with its logprob.

One uniform number per row and an inverse CDF, instead of V noise values: the
number can then depend on the request and the position alone.

Axes: B rows, V vocab.
"""

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

  Returns:
    (tokens i32[B], logprobs f32[B]): log softmax(logits / temperature)[token]
    in nats, without truncation; at temperature 0 those of temperature 1. A
    token whose probability is 0 in float32 is never drawn.
  """
  z = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
  top = jnp.max(z, axis=-1, keepdims=True)
  mass = jnp.exp(z - top)
  log_total = jnp.log(jnp.sum(mass, axis=-1))
  truncated = (top_k > 0) | (top_p < 1) | (min_p > 0)
  kept = jax.lax.cond(
    jnp.any(truncated),
    _truncate,
    lambda mass, *_: mass,
    mass,
    top_k,
    top_p,
    min_p,
  )
  # XLA's argmax is slow on CPUs; a maximum and its first index are not.
  best = _first(z == top)
  tokens = jnp.where(temperature > 0, _invert(kept, uniforms), best)
  chosen = jnp.take_along_axis(z - top, tokens[:, None], axis=1)[:, 0]
  return tokens, chosen - log_total


def _first(mask: jax.Array) -> jax.Array:
  """Returns the index of the first True per row, i32[B]; V if there is none."""
  size = mask.shape[-1]
  index = jnp.arange(size, dtype=jnp.int32)[None]
  return jnp.min(jnp.where(mask, index, size), axis=-1)


def _invert(mass: jax.Array, uniforms: jax.Array) -> jax.Array:
  """Returns the index at which the cumulative mass passes `uniforms` of it.

  Two levels, blocks first and then the tokens of one block: two short
  cumulative sums.
  """
  rows, vocab = mass.shape
  width = 1 << (vocab.bit_length() + 1) // 2
  blocks = -(-vocab // width)
  mass = jnp.pad(mass, ((0, 0), (0, blocks * width - vocab)))
  mass = mass.reshape(rows, blocks, width)
  sums = jnp.sum(mass, axis=-1)
  target = uniforms * jnp.sum(sums, axis=-1)
  block, below = _pass(sums, target)
  inside = jnp.take_along_axis(mass, block[:, None, None], axis=1)[:, 0]
  return block * width + _pass(inside, target - below)[0]


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


def _truncate(mass, top_k, top_p, min_p) -> jax.Array:
  """Sets the mass of excluded tokens to 0; the likeliest token has mass 1."""
  vocab = mass.shape[-1]
  order = jax.lax.bitcast_convert_type(mass, jnp.int32)

  def keeps_k(threshold):
    return jnp.sum(order >= threshold[:, None], axis=-1) >= top_k

  threshold = _largest(keeps_k, len(mass))
  on = (top_k > 0) & (top_k < vocab)
  mass = jnp.where((order >= threshold[:, None]) | ~on[:, None], mass, 0.0)
  enough = top_p * jnp.sum(mass, axis=-1)

  def keeps_p(threshold):
    kept = jnp.where(order >= threshold[:, None], mass, 0.0)
    return jnp.sum(kept, axis=-1) >= enough

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
