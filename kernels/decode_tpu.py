"""Decode attention for TPUs: one query per row, blocks of keys in sequence.

The grid is (row, block of keys); a step handles all kv heads of its block, so
that it copies one long range of the cache. The ends of the intervals are
prefetched as scalars: blocks outside are neither copied nor computed.

A TPU core runs its steps one after the other, so keys are not split.

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
) -> tuple[jax.Array, jax.Array]:
  """Computes (out [B, N, H], lse f32[B, N]) of q over k, v [B, K, S, H].

  A cache whose length is no multiple of 128 is padded, which copies it.
  """
  b, n, h = q.shape
  kv, s = k.shape[1:3]
  group = n // kv
  most = BLOCK
  while most > LEAST and most * kv * h * k.dtype.itemsize > BLOCK_BYTES:
    most //= 2
  block, padded = masks.fit(s, most, LEAST)
  k, v = masks.pad(k, 2, padded), masks.pad(v, 2, padded)
  rows = pl.BlockSpec((None, kv, group, h), lambda i, j, *_: (i, 0, 0, 0))
  stats = pl.BlockSpec((None, kv, group, 1), lambda i, j, *_: (i, 0, 0, 0))
  keys = pl.BlockSpec(
    (None, kv, block, h), functools.partial(_key_block, block)
  )
  column = _compat.VMEM((kv, group, 1), jnp.float32)
  acc = _compat.VMEM((kv, group, h), jnp.float32)
  out, lse = pl.pallas_call(
    functools.partial(_kernel, options),
    out_shape=(
      _compat.struct((b, kv, group, h), q.dtype, q),
      _compat.struct((b, kv, group, 1), jnp.float32, q),
    ),
    grid_spec=_compat.PrefetchScalarGridSpec(
      num_scalar_prefetch=2,
      grid=(b, padded // block),
      in_specs=[rows, keys, keys],
      out_specs=(rows, stats),
      scratch_shapes=[column, column, acc],
    ),
    name='decode',
    **_compat.mosaic_tpu(options.interpret, 'parallel', 'arbitrary'),
  )(*masks.clip(k_start, k_end, s), q.reshape(b, kv, group, h), k, v)
  return out.reshape(b, n, h), lse.reshape(b, n)


def _key_block(block, i, j, start_ref, end_ref):
  """Returns the block that step j of row i reads.

  Steps outside the interval repeat its nearest block, which is not copied
  again.
  """
  first = start_ref[i] // block
  last = jnp.maximum((end_ref[i] + block - 1) // block - 1, first)
  return i, 0, jnp.clip(j, first, last), 0


def _kernel(
  options,
  start_ref,
  end_ref,
  q_ref,
  k_ref,
  v_ref,
  out_ref,
  lse_ref,
  *state_refs,
):
  kv, group, h = q_ref.shape
  block = k_ref.shape[1]
  j = pl.program_id(1)
  start, end = (ref[pl.program_id(0)] for ref in (start_ref, end_ref))

  @pl.when(j == 0)
  def _():
    for ref, x in zip(state_refs, tiles.start(group, h), strict=True):
      for head in range(kv):
        ref[head] = x

  @pl.when((start < (j + 1) * block) & (j * block < end))
  def _():
    keys = jax.lax.broadcasted_iota(jnp.int32, (group, block), 1)
    mask = tiles.in_interval(start, end, j * block + keys)
    for head in range(kv):
      s = tiles.scores(q_ref[head], k_ref[head], options.scale, options.softcap)
      state = tuple(ref[head] for ref in state_refs)
      state = tiles.step(state, s, v_ref[head], mask)
      for ref, x in zip(state_refs, state, strict=True):
        ref[head] = x

  @pl.when(j == pl.num_programs(1) - 1)
  def _():
    for head in range(kv):
      out, lse = tiles.finish(tuple(ref[head] for ref in state_refs))
      out_ref[head] = out.astype(out_ref.dtype)
      lse_ref[head] = lse
