"""Decode attention for TPUs: one query per row, blocks of keys in sequence.

A step of the grid is a block of keys that a row's interval reaches, and handles
all kv heads of it, so that it copies one long range of the cache. The list of
steps and the ends of the intervals are prefetched as scalars; other blocks cost
nothing. Rows with an empty interval have one step, which writes 0.

A TPU core runs its steps one after the other, so keys are not split; a chip of
two cores (v4, v5p) uses one.

The cache must be laid out with H along lanes. With heads of less than 128, XLA
chooses another layout in loops over a cache (observed in programs compiled for
a v5e), and then copies the cache to and from the kernel at every step.

Axes: B rows, S cache slots, N query heads, K kv heads, H head dim, G query
heads of a kv head.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels import _compat, masks, tiles
from kernels import options as options_lib

BLOCK, LEAST = 512, 128  # keys of a block, at most and at least
BLOCK_BYTES = 1 << 20  # of keys; twice that with values, twice again in flight


def forward(
  options: options_lib.Options,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *scales: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Computes (out [B, N, H], lse f32[B, N]) of q over k, v [B, K, S, H].

  With `scales`, f32[B, K, S] each, k and v are int8, times these. A cache whose
  length is no multiple of 128 is padded, which copies it.
  """
  b, n, h = q.shape
  kv, s = k.shape[1:3]
  group = n // kv
  most = BLOCK
  while most > LEAST and most * kv * h * k.dtype.itemsize > BLOCK_BYTES:
    most //= 2
  block, padded = masks.fit(s, most, LEAST)
  cache = [masks.pad(x, 2, padded) for x in (k, v, *scales)]
  k_start, k_end = masks.clip(k_start, k_end, s)
  count, *pairs = steps(k_start, k_end, block, padded // block)
  rows = pl.BlockSpec((None, kv, group, h), lambda i, r, *_: (r[i], 0, 0, 0))
  stats = pl.BlockSpec((None, kv, group, 1), lambda i, r, *_: (r[i], 0, 0, 0))
  keys = pl.BlockSpec(
    (None, kv, block, h), lambda i, r, j, *_: (r[i], 0, j[i], 0)
  )
  scale = pl.BlockSpec((None, kv, block), lambda i, r, j, *_: (r[i], 0, j[i]))
  column = _compat.VMEM((kv, group, 1), jnp.float32)
  acc = _compat.VMEM((kv, group, h), jnp.float32)
  out, lse = pl.pallas_call(
    functools.partial(_kernel, options),
    out_shape=(
      _compat.struct((b, kv, group, h), q.dtype, q),
      _compat.struct((b, kv, group, 1), jnp.float32, q),
    ),
    grid_spec=_compat.PrefetchScalarGridSpec(
      num_scalar_prefetch=4,
      grid=(count,),
      in_specs=[rows, keys, keys, *[scale] * len(scales)],
      out_specs=(rows, stats),
      scratch_shapes=[column, column, acc],
    ),
    name='decode',
    **_compat.mosaic_tpu(options.interpret, 'arbitrary'),
  )(*pairs, k_start, k_end, q.reshape(b, kv, group, h), *cache)
  return out.reshape(b, n, h), lse.reshape(b, n)


def steps(
  k_start: jax.Array, k_end: jax.Array, block: int, most: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Returns the steps of the grid.

  Args:
    k_start: i32[B], clipped.
    k_end: i32[B], clipped.
    block: keys of a block.
    most: blocks of a row.

  Returns:
    (count i32[], rows i32[B * most], blocks of keys i32[B * most]), row by row;
    entries from `count` on have no meaning.
  """
  first, size = k_start // block, len(k_start) * most
  counts = jnp.maximum((k_end + block - 1) // block - first, 1)
  ends = jnp.cumsum(counts)
  index = jnp.arange(len(k_start), dtype=jnp.int32)
  rows = jnp.repeat(index, counts, total_repeat_length=size)
  blocks = (first - ends + counts)[rows] + jnp.arange(size, dtype=jnp.int32)
  return ends[-1], rows, blocks


def _kernel(
  options, row_ref, block_ref, start_ref, end_ref, q_ref, k_ref, v_ref, *refs
):
  scale_refs, (out_ref, lse_ref, *state_refs) = refs[:-5], refs[-5:]
  kv, group, h = q_ref.shape
  block = k_ref.shape[1]
  i = pl.program_id(0)
  row, first = row_ref[i], block_ref[i] * block
  start, end = start_ref[row], end_ref[row]

  @pl.when(first <= start)
  def _():
    for ref, x in zip(state_refs, tiles.start(group, h), strict=True):
      for head in range(kv):
        ref[head] = x

  @pl.when(start < end)
  def _():
    keys = jax.lax.broadcasted_iota(jnp.int32, (group, block), 1)
    mask = tiles.in_interval(start, end, first + keys)
    for head in range(kv):
      q = q_ref[head]
      k = k_ref[head].astype(q.dtype)
      own = slice(head, head + 1)
      k_scale, v_scale = [x[own] for x in scale_refs] or (1.0, None)
      s = tiles.scores(q, k, options.scale * k_scale, options.softcap)
      state = tuple(ref[head] for ref in state_refs)
      v = v_ref[head].astype(q.dtype)
      state = tiles.step(state, s, v, mask, v_scale)
      for ref, x in zip(state_refs, state, strict=True):
        ref[head] = x

  @pl.when(first + block >= end)
  def _():
    for head in range(kv):
      out, lse = tiles.finish(tuple(ref[head] for ref in state_refs))
      out_ref[head] = out.astype(out_ref.dtype)
      lse_ref[head] = lse
