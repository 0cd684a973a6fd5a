"""Flash attention for TPUs: Pallas kernels on the Mosaic backend.

    forward   grid (row, query head, block of queries, block of keys)
    dq        the same
    dkv       grid (row, kv head, block of keys, query head of the kv head,
              block of queries): dk and dv are added up in scratch memory

The last dimensions run one after the other and carry their state in scratch
memory. The ranges of blocks are prefetched as scalars: a step outside of them
computes nothing, and repeats the previous block, so that nothing is copied.
Where keys have bounds, ranges are of lists of blocks (see `kernels.masks`).

Numbers per query are laid out along lanes in memory, [1, T]; a column [T, 1]
would take 128 times its size.

Axes: B rows, T queries, S keys, N query heads, K kv heads, H head dim,
I blocks of queries, J blocks of keys.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from kernels import _compat, masks, tiles
from kernels import options as options_lib

BLOCK = 512  # queries and keys of a tile
LANES = 128  # least width of a block of numbers per query, if several


def unsupported(head_dim: int, dtype: jnp.dtype) -> str | None:
  """Returns why the Mosaic kernels do not support such heads, or None."""
  if head_dim % 8 or not 16 <= head_dim <= 256:
    return f'head_dim must be a multiple of 8 from 16 to 256: got {head_dim}'
  if dtype not in (jnp.float32, jnp.bfloat16):
    return f'dtype must be float32 or bfloat16: got {dtype}'
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
  blocks, until, args, plan = _prepare(q, k, v, k_start, k_end, k_until)
  q = args[1]
  stats = (*q.shape[:2], 1, plan.t)
  column = _compat.VMEM((plan.block_q, 1), jnp.float32)
  out, lse = _call(
    options,
    plan,
    _forward_kernel,
    'flash_forward',
    plan.query_grid(),
    in_specs=plan.inputs(),
    out_specs=(plan.rows(), plan.stats()),
    out_shape=(
      _compat.struct(q.shape, q.dtype, q),
      _compat.struct(stats, jnp.float32, q),
    ),
    scratch_shapes=[column, column, plan.scratch(plan.block_q)],
  )(blocks.reshape(-1), *until, *args)
  return out[:, :, :t], lse[:, :, 0, :t]


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
  blocks, until, args, plan = _prepare(q, k, v, k_start, k_end, k_until)
  args += tuple(masks.pad(x[:, :, None], 3, plan.t) for x in (lse, delta))
  args += (masks.pad(g, 2, plan.t),)
  dq = _call(
    options,
    plan,
    _dq_kernel,
    'flash_dq',
    plan.query_grid(),
    in_specs=[*plan.inputs(), plan.stats(), plan.stats(), plan.rows()],
    out_specs=plan.rows(),
    out_shape=_compat.struct(args[1].shape, q.dtype, q),
    scratch_shapes=[plan.scratch(plan.block_q)],
  )(blocks.reshape(-1), *until, *args)
  blocks = masks.query_blocks(blocks, plan.s // plan.block_k)
  specs, grid = plan.key_side()
  dk, dv = _call(
    options,
    plan,
    _dkv_kernel,
    'flash_dkv',
    grid,
    in_specs=specs,
    out_specs=(specs[-5], specs[-4]),
    out_shape=(_compat.struct(args[2].shape, k.dtype, k),) * 2,
    scratch_shapes=[plan.scratch(plan.block_k)] * 2,
  )(blocks.reshape(-1), *until, *args)
  return dq[:, :, :t], dk[:, :, :s], dv[:, :, :s]


def _call(options, plan, kernel, name, grid, *, out_shape, **specs):
  """Builds a `pallas_call` with prefetched ranges; 3 axes are parallel."""
  serial = ('arbitrary',) * (len(grid) - 3)

  def bound(blocks_ref, *refs):
    refs = refs if plan.listed else (None, *refs)
    kernel(options, plan, blocks_ref, *refs)

  return pl.pallas_call(
    bound,
    out_shape=out_shape,
    grid_spec=_compat.PrefetchScalarGridSpec(
      num_scalar_prefetch=1, grid=grid, **specs
    ),
    name=name,
    **_compat.mosaic_tpu(options.interpret, *('parallel',) * 3, *serial),
  )


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
  listed: bool  # whether ranges are of lists, and keys have bounds

  def scratch(self, rows):
    return _compat.VMEM((rows, self.h), jnp.float32)

  def query_grid(self):
    return self.b, self.n, self.t // self.block_q, self.s // self.block_k

  def inputs(self):
    group, ranges = self.n // self.kv, self.key_ranges()

    def key_block(b, n, i, j, blocks):
      return b, n // group, ranges.nearest(blocks, b, i, j), 0

    keys = pl.BlockSpec((None, None, self.block_k, self.h), key_block)
    vector = pl.BlockSpec(
      (None, 2, self.block_q), lambda b, n, i, j, _: (b, 0, i)
    )
    until = pl.BlockSpec(
      (None, 1, self.block_k),
      lambda b, n, i, j, blocks: (b, 0, ranges.nearest(blocks, b, i, j)),
    )
    specs = [vector, self.rows(), keys, keys]
    return [until, *specs] if self.listed else specs

  def key_ranges(self):
    """Returns the ranges of key blocks, of each block of queries."""
    count = self.s // self.block_k
    return _Ranges(self.t // self.block_q, count if self.listed else 0)

  def query_ranges(self):
    """Returns the ranges of blocks of queries, of each key block."""
    count = self.t // self.block_q
    return _Ranges(self.s // self.block_k, count if self.listed else 0)

  def rows(self):
    return pl.BlockSpec(
      (None, None, self.block_q, self.h), lambda b, n, i, j, _: (b, n, i, 0)
    )

  def stats(self):
    return pl.BlockSpec(
      (None, None, 1, self.block_q), lambda b, n, i, j, _: (b, n, 0, i)
    )

  def key_side(self):
    group, count = self.n // self.kv, self.s // self.block_k
    grid = (self.b, self.kv, count, group, self.t // self.block_q)
    ranges = self.query_ranges()

    def spec(shape, index):
      return pl.BlockSpec(
        (None, *shape),
        lambda b, h, j, n, i, blocks: (
          b,
          *index(h, j, h * group + n, ranges.nearest(blocks, b, j, i)),
        ),
      )

    vector = spec((2, self.block_q), lambda h, j, n, i: (0, i))
    rows = spec((None, self.block_q, self.h), lambda h, j, n, i: (n, i, 0))
    stats = spec((None, 1, self.block_q), lambda h, j, n, i: (n, 0, i))
    keys = spec((None, self.block_k, self.h), lambda h, j, n, i: (h, j, 0))
    until = spec((1, self.block_k), lambda h, j, n, i: (0, j))
    specs = [vector, rows, keys, keys, stats, stats, rows]
    return ([until, *specs] if self.listed else specs), grid


class _Ranges(NamedTuple):
  """The places of ranges and lists of blocks in a flat array."""

  count: int  # ranges of a row
  listed: int  # blocks of a list; 0 = ranges alone

  def _read(self, blocks_ref, index, i):
    return blocks_ref[index * (4 + self.listed) + i]

  def _block(self, blocks_ref, index, step):
    """Returns the block of a step."""
    return self._read(blocks_ref, index, 4 + step) if self.listed else step

  def nearest(self, blocks_ref, row, index, step):
    """Returns the block that a step has in memory."""
    index = row * self.count + index
    lo, hi = (self._read(blocks_ref, index, i) for i in (0, 3))
    step = jnp.clip(step, lo, jnp.maximum(hi - 1, lo))
    return self._block(blocks_ref, index, step)

  def visit(self, blocks_ref, row, index, step, compute):
    """Calls compute(masked, block) if a step is within the range."""
    index = row * self.count + index
    lo, inner, outer, hi = (self._read(blocks_ref, index, i) for i in range(4))
    block = self._block(blocks_ref, index, step)
    whole = (inner <= step) & (step < outer)
    pl.when(whole)(lambda: compute(False, block))
    partly = (lo <= step) & (step < hi) & ~whole
    pl.when(partly)(lambda: compute(True, block))


def _prepare(q, k, v, k_start, k_end, k_until):
  """Returns ranges, (k_until,) or (), (intervals, q, k, v), and the plan.

  Arrays are padded; intervals are [B, 2, T], k_until is [B, 1, S].
  """
  b, n, t, h = q.shape
  kv, s = k.shape[1:3]
  block_q, t = masks.fit(t, BLOCK, LANES)
  block_k, padded = masks.fit(s, BLOCK, LANES)
  k_start, k_end = (masks.pad(x, 1, t) for x in masks.clip(k_start, k_end, s))
  until = () if k_until is None else (masks.pad(k_until, 1, padded),)
  blocks = masks.key_blocks(k_start, k_end, block_q, block_k, *until)
  q, k, v = (
    masks.pad(x, 2, size) for x, size in ((q, t), (k, padded), (v, padded))
  )
  plan = _Plan(b, n, kv, t, padded, h, block_q, block_k, bool(until))
  until = tuple(x[:, None] for x in until)
  vector = jnp.stack([k_start, k_end], axis=1)
  return blocks, until, (vector, q, k, v), plan


def _keys(j, block, axis):
  shape = (1, block) if axis else (block, 1)
  return j * block + jax.lax.broadcasted_iota(jnp.int32, shape, axis)


def _mask(plan, vector_ref, until_ref, j):
  """Returns the mask [queries, keys] of key block j."""
  start, end = (vector_ref[x : x + 1].T for x in range(2))
  until = until_ref[...] if plan.listed else None
  return tiles.in_interval(start, end, _keys(j, plan.block_k, 1), until)


def _forward_kernel(
  options,
  plan,
  blocks_ref,
  until_ref,
  vector_ref,
  q_ref,
  k_ref,
  v_ref,
  out_ref,
  lse_ref,
  *state_refs,
):
  b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

  @pl.when(j == 0)
  def _():
    for ref, x in zip(
      state_refs, tiles.start(plan.block_q, plan.h), strict=True
    ):
      ref[...] = x

  def step(masked, block):
    s = tiles.scores(q_ref[...], k_ref[...], options.scale, options.softcap)
    mask = _mask(plan, vector_ref, until_ref, block) if masked else None
    state = tiles.step(tuple(r[...] for r in state_refs), s, v_ref[...], mask)
    for ref, x in zip(state_refs, state, strict=True):
      ref[...] = x

  plan.key_ranges().visit(blocks_ref, b, i, j, step)

  @pl.when(j == plan.s // plan.block_k - 1)
  def _():
    out, lse = tiles.finish(tuple(r[...] for r in state_refs))
    out_ref[...] = out.astype(out_ref.dtype)
    lse_ref[...] = lse.T


def _dq_kernel(
  options,
  plan,
  blocks_ref,
  until_ref,
  vector_ref,
  q_ref,
  k_ref,
  v_ref,
  lse_ref,
  delta_ref,
  g_ref,
  dq_ref,
  sum_ref,
):
  b, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)

  @pl.when(j == 0)
  def _():
    sum_ref[...] = jnp.zeros_like(sum_ref)

  def step(masked, block):
    k = k_ref[...]
    s = tiles.scores(q_ref[...], k, options.scale, options.softcap)
    dp = tiles.dot(g_ref[...], v_ref[...], (1, 1))
    mask = _mask(plan, vector_ref, until_ref, block) if masked else None
    lse, delta = lse_ref[...].T, delta_ref[...].T
    _, ds = tiles.gradient(s, dp, lse, delta, mask, options.softcap)
    sum_ref[...] += tiles.dot(ds.astype(k.dtype), k, (1, 0))

  plan.key_ranges().visit(blocks_ref, b, i, j, step)

  @pl.when(j == plan.s // plan.block_k - 1)
  def _():
    dq_ref[...] = (sum_ref[...] * options.scale).astype(dq_ref.dtype)


def _dkv_kernel(
  options,
  plan,
  blocks_ref,
  until_ref,
  vector_ref,
  q_ref,
  k_ref,
  v_ref,
  lse_ref,
  delta_ref,
  g_ref,
  dk_ref,
  dv_ref,
  dk_sum_ref,
  dv_sum_ref,
):
  b, j, n, i = (pl.program_id(x) for x in (0, 2, 3, 4))

  @pl.when((n == 0) & (i == 0))
  def _():
    dk_sum_ref[...] = jnp.zeros_like(dk_sum_ref)
    dv_sum_ref[...] = jnp.zeros_like(dv_sum_ref)

  def step(masked, _):  # tiles are [keys, queries]
    q, g = q_ref[...], g_ref[...]
    s = tiles.scores(k_ref[...], q, options.scale, options.softcap)
    dp = tiles.dot(v_ref[...], g, (1, 1))
    mask = None
    if masked:
      keys = _keys(j, plan.block_k, 0)
      until = until_ref[...].T if plan.listed else None
      mask = tiles.in_interval(vector_ref[0:1], vector_ref[1:2], keys, until)
    p, ds = tiles.gradient(
      s, dp, lse_ref[...], delta_ref[...], mask, options.softcap
    )
    dv_sum_ref[...] += tiles.dot(p.astype(g.dtype), g, (1, 0))
    dk_sum_ref[...] += tiles.dot(ds.astype(q.dtype), q, (1, 0))

  plan.query_ranges().visit(blocks_ref, b, j, i, step)

  @pl.when((n == plan.n // plan.kv - 1) & (i == plan.t // plan.block_q - 1))
  def _():
    dk_ref[...] = (dk_sum_ref[...] * options.scale).astype(dk_ref.dtype)
    dv_ref[...] = dv_sum_ref[...].astype(dv_ref.dtype)
