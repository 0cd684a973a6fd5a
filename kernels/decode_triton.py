"""Decode attention for GPUs: one query per row, split over keys.

A program of the Triton backend handles one (row, kv head, split): the query
heads of a kv head share the reads of the cache. The blocks between `k_start`
and `k_end` are divided evenly among the splits, so that none is idle in a
short row; their results are combined by their lse:

    out = sum_i out_i exp(lse_i - lse),     lse = log sum_i exp lse_i

Axes: B rows, S cache slots, N query heads, K kv heads, H head dim, G query
heads of a kv head.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import _compat, masks, tiles
from kernels import options as options_lib

BLOCK, TILE_BYTES = 128, 1 << 15  # keys of a tile, both at most
LEAST_ROWS = 16  # of a tile that is multiplied; fewer queries are padded
# Programs that keep a large GPU busy (two per multiprocessor of an H200), and
# the smallest part of the cache that is worth a program.
PROGRAMS, LEAST_KEYS, MOST_SPLITS = 264, 128, 16


def forward(
  options: options_lib.Options,
  splits: int | None,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *scales: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Computes (out [B, N, H], lse f32[B, N]) of q over k, v [B, K, S, H].

  With `scales`, f32[B, K, S] each, k and v are int8, times these. A cache whose
  length is no multiple of 16 is padded, which copies it.
  """
  b, n, h = q.shape
  kv, s = k.shape[1:3]
  group = n // kv
  most = min(BLOCK, TILE_BYTES // (h * k.dtype.itemsize))
  block, padded = masks.fit(s, most, 16)
  cache = [masks.pad(x, 2, padded) for x in (k, v, *scales)]
  ends = jnp.stack(masks.clip(k_start, k_end, s), axis=1)
  splits = splits or default_splits(b * kv, s)
  rows = max(LEAST_ROWS, 1 << (group - 1).bit_length())
  plan = _Plan(kv, group, rows, h, block, splits)
  dtype = q.dtype if splits == 1 else jnp.float32
  out, lse = pl.pallas_call(
    functools.partial(_kernel, options, plan),
    out_shape=(
      _compat.struct((b, kv, splits, group, h), dtype, q),
      _compat.struct((b, kv, splits, group), jnp.float32, q),
    ),
    grid=(b * kv, splits),
    in_specs=plan.inputs(padded, len(scales)),
    out_specs=(plan.partial(h), plan.partial()),
    name='decode',
    **_compat.triton(options.interpret, num_warps=4, num_stages=3),
  )(ends, q.reshape(b, kv, group, h), *cache)
  out, lse = _combine(out, lse)
  return out.astype(q.dtype).reshape(b, n, h), lse.reshape(b, n)


def default_splits(programs: int, size: int) -> int:
  """Returns the number of splits of a cache, a power of two.

  Args:
    programs: rows times kv heads.
    size: cache slots.
  """
  splits = 1
  while (
    splits < MOST_SPLITS
    and splits * programs < PROGRAMS
    and size // (2 * splits) >= LEAST_KEYS
  ):
    splits *= 2
  return splits


class _Plan(NamedTuple):
  kv: int
  group: int
  rows: int  # group, padded
  h: int
  block: int
  splits: int

  def inputs(self, size, scales):
    kv = self.kv
    ends = pl.BlockSpec((None, 2), lambda x, i: (x // kv, 0))
    rows = pl.BlockSpec(
      (None, None, self.rows, self.h), lambda x, i: (x // kv, x % kv, 0, 0)
    )
    keys = pl.BlockSpec(
      (None, None, size, self.h), lambda x, i: (x // kv, x % kv, 0, 0)
    )
    scale = pl.BlockSpec((None, None, size), lambda x, i: (x // kv, x % kv, 0))
    return [ends, rows, keys, keys, *[scale] * scales]

  def partial(self, *last):
    zeros = (0,) * (1 + len(last))
    return pl.BlockSpec(
      (None, None, None, self.rows, *last),
      lambda x, i: (x // self.kv, x % self.kv, i, *zeros),
    )


def _kernel(options, plan, ends_ref, q_ref, k_ref, v_ref, *refs):
  *scale_refs, out_ref, lse_ref = refs
  # Blocks of queries and results are wider than the arrays: rows outside are
  # neither read nor written.
  valid = lax.iota(jnp.int32, plan.rows) < plan.group
  tile = jnp.broadcast_to(valid[:, None], (plan.rows, plan.h))
  q = _compat.load(q_ref, mask=tile, other=0.0)
  start, end = ends_ref[0], ends_ref[1]
  first, last = start // plan.block, (end + plan.block - 1) // plan.block
  split, count = pl.program_id(1), last - first
  lo = first + count * split // plan.splits
  hi = first + count * (split + 1) // plan.splits

  def step(j, state):
    block = pl.ds(j * plan.block, plan.block)
    k = k_ref[block, :].astype(q.dtype)
    k_scale, v_scale = [x[block][None] for x in scale_refs] or (1.0, None)
    s = tiles.scores(q, k, options.scale * k_scale, options.softcap)
    keys = j * plan.block + lax.iota(jnp.int32, plan.block)
    mask = tiles.in_interval(start, end, keys)[None]
    mask = jnp.broadcast_to(mask, (plan.rows, plan.block))
    v = v_ref[block, :].astype(q.dtype)
    return tiles.step(state, s, v, mask, v_scale)

  state = lax.fori_loop(lo, hi, step, tiles.start(plan.rows, plan.h))
  out, lse = tiles.finish(state)
  _compat.store(out_ref, out.astype(out_ref.dtype), mask=tile)
  _compat.store(lse_ref, lse[:, 0], mask=valid)


def _combine(out, lse):
  """Combines splits: out [B, K, splits, G, H], lse f32[B, K, splits, G]."""
  if out.shape[2] == 1:
    return out[:, :, 0], lse[:, :, 0]
  top = jnp.max(lse, axis=2, keepdims=True)
  weights = jnp.exp(lse - top)  # all 1 where no split has a key: 1 * 0 = 0
  total = jnp.sum(weights, axis=2)
  out = jnp.sum(out * weights[..., None], axis=2) / total[..., None]
  empty = top[:, :, 0] <= tiles.MASKED
  lse = jnp.where(empty, tiles.MASKED, top[:, :, 0] + jnp.log(total))
  return out, lse
