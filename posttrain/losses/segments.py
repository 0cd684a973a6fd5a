"""Sums over the sequences that share a row, by doubling.

A sequence lies whole in its row, under an id that is unique in the row; of a
row with trees, the tokens that it does not share, which have all its weights
but where tokens that train are shared (no loss reads a sum there).
Step k adds to a token's running sum the running sum 2^k tokens to its left, if
the id is the same there; the sum at a sequence's last token is copied back to
all of its tokens in the same number of steps. The cost is O(T log T) for any
number of sequences, the order of additions is fixed (a scatter on a GPU has no
fixed order), and no other row is read, so rows may be split over devices.

Axes: T tokens of a row; any dimensions before it.
"""

import jax
import jax.numpy as jnp


@jax.jit
def totals(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """Returns, at every token, the sum over its segment.

  Args:
    values: float or bool[..., T]; no gradient passes.
    segment_ids: i32[..., T], equal within a segment, whose tokens are
      contiguous, and different between the segments of a row; pads are a
      segment too.

  Returns:
    float[..., T], bitwise equal within a segment.
  """

  def bring(step, sums):
    same, right = _neighbour(sums, segment_ids, -(1 << step))
    return jnp.where(same, right, sums)

  return _double(bring, running(jax.lax.stop_gradient(values), segment_ids))


def firsts(member: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """Returns True at the first member of each segment, bool[..., T]."""
  return member & (running(member, segment_ids) == 1)


@jax.jit
def running(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """Returns, at every token, the sum up to it in its segment, f32[..., T]."""

  def add(step, sums):
    same, left = _neighbour(sums, segment_ids, 1 << step)
    return sums + jnp.where(same, left, 0.0)

  dtype = jnp.promote_types(values.dtype, jnp.float32)
  return _double(add, values.astype(dtype))


def _double(body, values):
  """Applies `body(step, values)` until 2^step exceeds a row."""
  return jax.lax.fori_loop(0, (values.shape[-1] - 1).bit_length(), body, values)


def _neighbour(values, segment_ids, distance):
  """Returns (is it in the same segment, its value) `distance` to the left."""
  axis = values.ndim - 1
  place = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis) - distance
  inside = (place >= 0) & (place < values.shape[-1])
  other = jnp.roll(segment_ids, distance, axis)
  return inside & (other == segment_ids), jnp.roll(values, distance, axis)
