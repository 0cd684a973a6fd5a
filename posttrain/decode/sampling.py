"""Draws one token per row from logits, and says how likely it was.

One uniform number per row and an inverse CDF, instead of V noises: which number
a token gets can then depend on its request and position alone.

Axes: B rows, V vocab.
"""

import jax
import jax.numpy as jnp

_BITS = 30  # of a float32 in [0, 1], as an integer that orders the same


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
    top_k: i32[B], keep the k likeliest tokens; 0 = all.
    top_p: f32[B], then the likeliest whose mass reaches this; 1 = all.
    min_p: f32[B], then those this likely relative to the likeliest; 0 = all.

  Returns:
    (tokens i32[B], logprobs f32[B]): log softmax(logits / temperature)[token]
    in nats, without truncation; at temperature 0 that of temperature 1. A token
    whose probability is 0 in float32 is never drawn.
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
  # XLA's argmax is slow on CPUs; a maximum and the first that equals it is not.
  best = _first(z == top)
  tokens = jnp.where(temperature > 0, _invert(kept, uniforms), best)
  chosen = jnp.take_along_axis(z - top, tokens[:, None], axis=1)[:, 0]
  return tokens, chosen - log_total


def _first(mask: jax.Array) -> jax.Array:
  """Index of the first True per row, i32[B]; V if there is none."""
  size = mask.shape[-1]
  index = jnp.arange(size, dtype=jnp.int32)[None]
  return jnp.min(jnp.where(mask, index, size), axis=-1)


def _invert(mass: jax.Array, uniforms: jax.Array) -> jax.Array:
  """Index at which the cumulative mass passes `uniforms` of it, in two levels.

  Blocks first, then the tokens of one block: two short cumulative sums.
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
  """(first index whose cumulative mass exceeds the target, mass before it).

  Rounding may leave the target at or above the last sum: the last index with
  any mass is meant then. An index without mass is never returned.
  """
  sums = jnp.cumsum(mass, axis=-1)
  index = jnp.arange(mass.shape[-1], dtype=jnp.int32)[None]
  some = mass > 0
  found = _first((sums > target[:, None]) & some)
  last = jnp.max(jnp.where(some, index, 0), axis=-1)
  found = jnp.minimum(found, last)
  before = jnp.where(index < found[:, None], mass, 0.0)
  return found, jnp.sum(before, axis=-1)


def _truncate(mass, top_k, top_p, min_p) -> jax.Array:
  """Sets what the three rules exclude to 0; the likeliest token has mass 1."""
  vocab = mass.shape[-1]
  order = jax.lax.bitcast_convert_type(mass, jnp.int32)

  def keeps_k(threshold):
    return jnp.sum(order >= threshold[:, None], axis=-1) >= top_k

  at = _largest(keeps_k, len(mass))
  on = (top_k > 0) & (top_k < vocab)
  mass = jnp.where((order >= at[:, None]) | ~on[:, None], mass, 0.0)
  enough = top_p * jnp.sum(mass, axis=-1)

  def keeps_p(threshold):
    kept = jnp.where(order >= threshold[:, None], mass, 0.0)
    return jnp.sum(kept, axis=-1) >= enough

  at = _largest(keeps_p, len(mass))
  mass = jnp.where((order >= at[:, None]) | (top_p == 1)[:, None], mass, 0.0)
  return jnp.where(mass >= min_p[:, None], mass, 0.0)


def _largest(holds, rows: int) -> jax.Array:
  """The largest threshold per row at which `holds`, exact: bit by bit."""

  def try_bit(i, at):
    higher = at | (1 << (_BITS - 1 - i))
    return jnp.where(holds(higher), higher, at)

  return jax.lax.fori_loop(0, _BITS, try_bit, jnp.zeros(rows, jnp.int32))
