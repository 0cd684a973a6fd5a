"""Flash attention for GPUs: Pallas kernels on the Triton backend.

    forward   a program per (block of queries, row and query head)
    dq        the same
    dkv       a program per (block of keys, row and kv head); it loops over
              the query heads of its kv head, so that programs add up nothing
              among them, and two runs agree bitwise

A program loops over the blocks that its intervals cover, or over a list of
them where keys have bounds, and masks only those that are partly covered (see
`kernels.masks`).

Axes: B rows, T queries, S keys, N query heads, K kv heads, H head dim,
I blocks of queries, J blocks of keys.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels import _compat, masks, tiles
from kernels import options as options_lib

# Queries and keys of a tile. With 4 warps forward and 8 backward, and bfloat16
# heads of 64 or 128, no register spills on sm_90a by ptxas; wider tiles do.
BLOCK = 64
MAX_HEAD_DIM = 256


def unsupported(head_dim: int, dtype: jnp.dtype) -> str | None:
  """Returns why the Triton kernels do not support such heads, or None."""
  if head_dim & (head_dim - 1) or not 16 <= head_dim <= MAX_HEAD_DIM:
    return (
      f'head_dim must be a power of two from 16 to {MAX_HEAD_DIM}: '
      f'got {head_dim}'
    )
  if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
    return f'dtype must be float32, bfloat16 or float16: got {dtype}'
  return None


def forward(
  options: options_lib.Options,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  k_until: jax.Array | None,
) -> tuple[jax.Array, jax.Array]:
  """Computes (out [B, N, T, H], lse f32[B, N, T]); k and v are [B, K, S, H]."""
  t = q.shape[2]
  until, args, plan = _prepare(q, k, v, k_start, k_end, k_until)
  rows, stats = plan.rows(), plan.stats()
  q = args[3]
  out, lse = pl.pallas_call(
    plan.bind(_forward_kernel, options),
    out_shape=(
      _compat.struct(q.shape, q.dtype, q),
      _compat.struct(q.shape[:3], jnp.float32, q),
    ),
    grid=plan.query_grid(),
    in_specs=plan.inputs(),
    out_specs=(rows, stats),
    name='flash_forward',
    **_compat.triton(options.interpret, num_warps=4, num_stages=2),
  )(*until, *args)
  return out[:, :, :t], lse[:, :, :t]


def backward(
  options: options_lib.Options,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  k_until: jax.Array | None,
  lse: jax.Array,
  delta: jax.Array,
  g: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Computes (dq, dk, dv) from g [B, N, T, H], lse and delta f32[B, N, T]."""
  t, s = q.shape[2], k.shape[2]
  until, args, plan = _prepare(q, k, v, k_start, k_end, k_until)
  rest = tuple(masks.pad(x, 2, plan.t) for x in (lse, delta, g))
  params = _compat.triton(options.interpret, num_warps=8, num_stages=2)
  dq = pl.pallas_call(
    plan.bind(_dq_kernel, options),
    out_shape=_compat.struct(args[3].shape, q.dtype, q),
    grid=plan.query_grid(),
    in_specs=[*plan.inputs(), plan.stats(), plan.stats(), plan.rows()],
    out_specs=plan.rows(),
    name='flash_dq',
    **params,
  )(*until, *args, *rest)
  blocks = masks.query_blocks(args[0], plan.s // plan.block_k)
  specs, grid = plan.key_side()
  shape = args[4].shape
  dk, dv = pl.pallas_call(
    plan.bind(_dkv_kernel, options),
    out_shape=(
      _compat.struct(shape, k.dtype, k),
      _compat.struct(shape, v.dtype, v),
    ),
    grid=grid,
    in_specs=specs,
    out_specs=(specs[-5], specs[-4]),
    name='flash_dkv',
    **params,
  )(*until, blocks, *args[1:], *rest)
  return dq[:, :, :t], dk[:, :, :s], dv[:, :, :s]


class _Plan(NamedTuple):
  """Sizes (t and s padded), and the block specs of the kernels."""

  b: int
  n: int
  kv: int
  t: int
  s: int
  h: int
  block_q: int
  block_k: int
  listed: int  # length of a list of blocks of keys; 0 = ranges

  def bind(self, kernel, options):
    until = () if self.listed else (None,)
    return functools.partial(kernel, options, self, *until)

  def query_grid(self):
    # Rows and heads share a dimension: vmap needs one of Triton's three.
    return self.t // self.block_q, self.b * self.n

  def inputs(self):
    n, group = self.n, self.n // self.kv
    vector = pl.BlockSpec((None, self.block_q), lambda i, x: (x // n, i))
    keys = pl.BlockSpec(
      (None, None, self.s, self.h), lambda i, x: (x // n, x % n // group, 0, 0)
    )
    size = 4 + self.listed
    blocks = pl.BlockSpec((None, None, size), lambda i, x: (x // n, i, 0))
    specs = [blocks, vector, vector, self.rows(), keys, keys]
    until = pl.BlockSpec((None, self.s), lambda i, x: (x // n, 0))
    return [until, *specs] if self.listed else specs

  def rows(self):
    return pl.BlockSpec(
      (None, None, self.block_q, self.h),
      lambda i, x: (x // self.n, x % self.n, i, 0),
    )

  def stats(self):
    return pl.BlockSpec(
      (None, None, self.block_q), lambda i, x: (x // self.n, x % self.n, i)
    )

  def key_side(self):
    kv, group = self.kv, self.n // self.kv
    size = 4 + (self.listed and self.t // self.block_q)
    blocks = pl.BlockSpec((None, None, size), lambda j, x: (x // kv, j, 0))
    vector = pl.BlockSpec((None, self.t), lambda j, x: (x // kv, 0))
    rows = pl.BlockSpec(
      (None, group, self.t, self.h), lambda j, x: (x // kv, x % kv, 0, 0)
    )
    stats = pl.BlockSpec(
      (None, group, self.t), lambda j, x: (x // kv, x % kv, 0)
    )
    keys = pl.BlockSpec(
      (None, None, self.block_k, self.h), lambda j, x: (x // kv, x % kv, j, 0)
    )
    specs = [blocks, vector, vector, rows, keys, keys, stats, stats, rows]
    until = pl.BlockSpec((None, self.block_k), lambda j, x: (x // kv, j))
    specs = [until, *specs] if self.listed else specs
    return specs, (self.s // self.block_k, self.b * kv)


def _prepare(q, k, v, k_start, k_end, k_until):
  """Returns padded (k_until,) or (), (blocks, ends, q, k, v), and the plan."""
  b, n, t, h = q.shape
  kv, s = k.shape[1:3]
  block_q, t = masks.fit(t, BLOCK, 16)
  # Wide heads need smaller tiles of keys to fit into shared memory.
  block_k, padded = masks.fit(s, BLOCK if h <= 128 else BLOCK // 2, 16)
  k_start, k_end = (masks.pad(x, 1, t) for x in masks.clip(k_start, k_end, s))
  until = () if k_until is None else (masks.pad(k_until, 1, padded),)
  blocks = masks.key_blocks(k_start, k_end, block_q, block_k, *until)
  q, k, v = (
    masks.pad(x, 2, size) for x, size in ((q, t), (k, padded), (v, padded))
  )
  listed = blocks.shape[-1] - 4
  plan = _Plan(b, n, kv, t, padded, h, block_q, block_k, listed)
  return until, (blocks, k_start, k_end, q, k, v), plan


def _walk(plan, blocks_ref, step, state):
  """Runs step(masked, block, state) over [lo, hi), unmasked on the inner."""
  lo, inner, outer, hi = (blocks_ref[i] for i in range(4))

  def visit(masked, i, state):
    return step(masked, blocks_ref[4 + i] if plan.listed else i, state)

  loops = (True, lo, inner), (False, inner, outer), (True, outer, hi)
  # A list begins with the blocks that need no mask.
  for masked, first, last in loops[bool(plan.listed) :]:
    state = lax.fori_loop(first, last, functools.partial(visit, masked), state)
  return state


def _keys(j, block):
  return j * block + lax.iota(jnp.int32, block)


def _mask(plan, start, end, until_ref, j):
  """Returns the mask [queries, keys] of key block j."""
  keys, until = _keys(j, plan.block_k)[None], None
  if plan.listed:
    until = until_ref[pl.ds(j * plan.block_k, plan.block_k)][None]
  return tiles.in_interval(start, end, keys, until)


def _forward_kernel(
  options,
  plan,
  until_ref,
  blocks_ref,
  start_ref,
  end_ref,
  q_ref,
  k_ref,
  v_ref,
  out_ref,
  lse_ref,
):
  q = q_ref[...]
  start, end = start_ref[...][:, None], end_ref[...][:, None]

  def step(masked, j, state):
    block = pl.ds(j * plan.block_k, plan.block_k)
    s = tiles.scores(q, k_ref[block, :], options.scale, options.softcap)
    mask = _mask(plan, start, end, until_ref, j) if masked else None
    return tiles.step(state, s, v_ref[block, :], mask)

  state = _walk(plan, blocks_ref, step, tiles.start(plan.block_q, plan.h))
  out, lse = tiles.finish(state)
  out_ref[...] = out.astype(out_ref.dtype)
  lse_ref[...] = lse[:, 0]


def _dq_kernel(
  options,
  plan,
  until_ref,
  blocks_ref,
  start_ref,
  end_ref,
  q_ref,
  k_ref,
  v_ref,
  lse_ref,
  delta_ref,
  g_ref,
  dq_ref,
):
  q, g = q_ref[...], g_ref[...]
  start, end, lse, delta = (
    ref[...][:, None] for ref in (start_ref, end_ref, lse_ref, delta_ref)
  )

  def step(masked, j, dq):
    block = pl.ds(j * plan.block_k, plan.block_k)
    k = k_ref[block, :]
    s = tiles.scores(q, k, options.scale, options.softcap)
    dp = tiles.dot(g, v_ref[block, :], (1, 1))
    mask = _mask(plan, start, end, until_ref, j) if masked else None
    _, ds = tiles.gradient(s, dp, lse, delta, mask, options.softcap)
    return dq + tiles.dot(ds.astype(k.dtype), k, (1, 0))

  zero = jnp.zeros((plan.block_q, plan.h), jnp.float32)
  dq = _walk(plan, blocks_ref, step, zero) * options.scale
  dq_ref[...] = dq.astype(dq_ref.dtype)


def _dkv_kernel(
  options,
  plan,
  until_ref,
  blocks_ref,
  start_ref,
  end_ref,
  q_ref,
  k_ref,
  v_ref,
  lse_ref,
  delta_ref,
  g_ref,
  dk_ref,
  dv_ref,
):
  k, v = k_ref[...], v_ref[...]
  keys = _keys(pl.program_id(0), plan.block_k)[:, None]
  until = until_ref[...][:, None] if plan.listed else None

  def step(head, masked, i, state):  # tiles are [keys, queries]
    block = pl.ds(i * plan.block_q, plan.block_q)
    dk, dv = state
    q, g = q_ref[head, block, :], g_ref[head, block, :]
    s = tiles.scores(k, q, options.scale, options.softcap)
    dp = tiles.dot(v, g, (1, 1))
    lse, delta = lse_ref[head, block][None], delta_ref[head, block][None]
    mask = None
    if masked:
      start, end = start_ref[block][None], end_ref[block][None]
      mask = tiles.in_interval(start, end, keys, until)
    p, ds = tiles.gradient(s, dp, lse, delta, mask, options.softcap)
    dv = dv + tiles.dot(p.astype(g.dtype), g, (1, 0))
    dk = dk + tiles.dot(ds.astype(q.dtype), q, (1, 0))
    return dk, dv

  zero = jnp.zeros((plan.block_k, plan.h), jnp.float32)

  def head_step(head, state):
    return _walk(plan, blocks_ref, functools.partial(step, head), state)

  group = plan.n // plan.kv
  dk, dv = lax.fori_loop(0, group, head_step, (zero, zero))
  dk_ref[...] = (dk * options.scale).astype(dk_ref.dtype)
  dv_ref[...] = dv.astype(dv_ref.dtype)
