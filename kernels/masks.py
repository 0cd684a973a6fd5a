"""Masks as intervals of keys, and the blocks that the intervals cover.

Query t of a row attends to the keys `k_start[t] <= s < k_end[t]`; an interval
with `k_end <= k_start` is empty. Causality, packing, padding, sliding windows
and ragged lengths are all such intervals, so a kernel compares no segment ids.

A kernel loops over blocks. The least and greatest ends within a block of
queries give (lo, inner, outer, hi): blocks of keys outside [lo, hi) are in no
query's interval and are skipped, those in [inner, outer) are in every query's
interval and need no mask.

In rows of prefix trees a key also has a bound, the end of its subtree: it is
seen by intervals with `k_end[t] <= k_until[s]` only. Blocks between lo and hi
may then be in no query's interval, so a kernel loops over lists of blocks: the
ranges are positions in a list, from (0, 0, those without a mask, all).

Axes: B rows, T queries, S keys, I blocks of queries, J blocks of keys.
"""

import jax
import jax.numpy as jnp


def fit(size: int, most: int, least: int) -> tuple[int, int]:
  """Returns (block size, size padded to a multiple of it) for an axis.

  The block is the largest power of two from `least` to `most` that divides
  the axis. If none does, the axis is padded, which copies the array.
  """
  block = most
  while block > least and size % block:
    block //= 2
  if size % block:
    block = min(most, max(16, 1 << (size - 1).bit_length()))
  return block, -(-size // block) * block


def pad(x: jax.Array, axis: int, size: int) -> jax.Array:
  """Pads an axis to `size` with zeros, which are empty intervals."""
  if x.shape[axis] == size:
    return x
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, widths)


def clip(
  k_start: jax.Array, k_end: jax.Array, size: int
) -> tuple[jax.Array, jax.Array]:
  """Clips intervals to `size` keys; turns empty ones into [0, 0)."""
  k_start, k_end = jnp.maximum(k_start, 0), jnp.minimum(k_end, size)
  valid = k_start < k_end
  return jnp.where(valid, k_start, 0), jnp.where(valid, k_end, 0)


def window(k_start: jax.Array, k_end: jax.Array, size: int) -> jax.Array:
  """Returns the k_start of a sliding window over the last `size` keys."""
  return jnp.maximum(k_start, k_end - size)


def key_blocks(
  k_start: jax.Array,
  k_end: jax.Array,
  block_q: int,
  block_k: int,
  k_until: jax.Array | None = None,
) -> jax.Array:
  """Returns the ranges of key blocks for each block of queries.

  Args:
    k_start: i32[B, T], clipped.
    k_end: i32[B, T], clipped.
    block_q: divides T.
    block_k: keys of a block.
    k_until: i32[B, S], block_k divides S; None = no bounds.

  Returns:
    i32[B, I, 4], (lo, inner, outer, hi) in blocks of keys, ascending. With
    `k_until`, i32[B, I, 4 + J]: these in the list of blocks that follows.
  """
  shape = (k_start.shape[0], -1, block_q)
  start, end = k_start.reshape(shape), k_end.reshape(shape)
  far = jnp.iinfo(jnp.int32).max
  hi = (jnp.max(end, -1) + block_k - 1) // block_k
  lo = jnp.min(jnp.where(end > 0, start, far), -1) // block_k
  lo = jnp.minimum(lo, hi)
  inner = (jnp.max(start, -1) + block_k - 1) // block_k
  inner = jnp.clip(inner, lo, hi)
  outer = jnp.clip(jnp.min(end, -1) // block_k, inner, hi)
  if k_until is None:
    return jnp.stack([lo, inner, outer, hi], axis=-1).astype(jnp.int32)
  until = k_until.reshape(len(k_until), 1, -1, block_k)
  j = jnp.arange(until.shape[2], dtype=jnp.int32)[None, None]
  lo, inner, outer, hi = (x[..., None] for x in (lo, inner, outer, hi))
  first = jnp.min(jnp.where(end > 0, end, far), -1, keepdims=True)
  last = jnp.max(end, -1, keepdims=True)
  seen = (lo <= j) & (j < hi) & (first <= jnp.max(until, -1))
  whole = (inner <= j) & (j < outer) & (last <= jnp.min(until, -1))
  return _listed(jnp.where(whole, 0, jnp.where(seen, 1, 2)))


def query_blocks(blocks: jax.Array, count: int) -> jax.Array:
  """Returns the ranges of query blocks for each block of keys.

  Args:
    blocks: i32[B, I, 4], from `key_blocks`.
    count: J, blocks of keys.

  Returns:
    i32[B, J, 4], (lo, inner, outer, hi) in blocks of queries, ascending. The
    inner range is empty if it would have gaps. Of lists, i32[B, J, 4 + I].
  """
  lo, inner, outer, hi = (blocks[..., i, None] for i in range(4))
  if blocks.shape[-1] > 4:
    place = jnp.argsort(blocks[..., 4:], axis=-1)
    kind = (place >= outer).astype(jnp.int32) + (place >= hi)
    return _listed(kind.mT)
  j = jnp.arange(count, dtype=jnp.int32)[None, None]
  lo, hi, _ = _extent((lo <= j) & (j < hi))
  inner, outer, whole = _extent((inner <= j) & (j < outer))
  inner, outer = jnp.where(whole, inner, hi), jnp.where(whole, outer, hi)
  return jnp.stack([lo, inner, outer, hi], axis=-1)


def _listed(kind):
  """Returns lists of blocks: of kind 0 (no mask), of kind 1, the others."""
  order = jnp.argsort(kind, axis=-1, stable=True)
  outer, hi = (jnp.sum(kind <= i, -1, keepdims=True) for i in range(2))
  zero = jnp.zeros_like(outer)
  blocks = jnp.concatenate([zero, zero, outer, hi, order], axis=-1)
  return blocks.astype(jnp.int32)


def _extent(mask):
  """Returns (first, last + 1, no gaps) of the true entries along axis 1."""
  size = mask.shape[1]
  index = jnp.arange(size, dtype=jnp.int32)[None, :, None]
  end = jnp.max(jnp.where(mask, index + 1, 0), axis=1)
  start = jnp.min(jnp.where(mask, index, size), axis=1)
  start = jnp.minimum(start, end)
  whole = jnp.sum(mask, axis=1, dtype=jnp.int32) == end - start
  return start, end, whole & (end > start)
