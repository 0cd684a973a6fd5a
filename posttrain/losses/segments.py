"""Sums over the sequences that share a row, by doubling.

A sequence lies whole in its row, under an id that nothing else in the row
has. So a token's running sum is its own and its left neighbour's, then that of
the pair before, of the four before, and so on while the id is the same; and
what stands at the end of a sequence comes back to its tokens in the same
steps. That costs O(T log T) whatever the number of sequences, adds in a fixed
order (a scatter on a GPU has none), and never looks into another row, so that
rows may be split over devices.

Axes: T tokens of a row; any dimensions before it.
"""

import jax
import jax.numpy as jnp


@jax.jit
def totals(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """Sums over each segment; every token of it gets the sum.

  Args:
    values: float or bool[..., T]; no gradient passes.
    segment_ids: i32[..., T], in a row the same for the tokens of a segment,
      which are neighbours, and for no others; pads are a segment too.

  Returns:
    float[..., T], bitwise equal within a segment.
  """

  def bring(step, sums):
    same, right = _neighbour(sums, segment_ids, -(1 << step))
    return jnp.where(same, right, sums)

  return _double(bring, running(values, segment_ids))


def firsts(member: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """True at the first member of each segment: one token per sequence."""
  return member & (running(member, segment_ids) == 1)


@jax.jit
def running(values: jax.Array, segment_ids: jax.Array) -> jax.Array:
  """Sums over each token and those before it in its segment."""

  def add(step, sums):
    same, left = _neighbour(sums, segment_ids, 1 << step)
    return sums + jnp.where(same, left, 0.0)

  dtype = jnp.promote_types(values.dtype, jnp.float32)
  return _double(add, jax.lax.stop_gradient(values).astype(dtype))


def _double(body, values):
  """Applies `body(step, values)` until 2^step exceeds a row."""
  return jax.lax.fori_loop(0, (values.shape[-1] - 1).bit_length(), body, values)


def _neighbour(values, segment_ids, distance):
  """(whether there is one in the segment, its value), so far to the left."""
  axis = values.ndim - 1
  place = jax.lax.broadcasted_iota(jnp.int32, values.shape, axis) - distance
  inside = (place >= 0) & (place < values.shape[-1])
  other = jnp.roll(segment_ids, distance, axis)
  return inside & (other == segment_ids), jnp.roll(values, distance, axis)
