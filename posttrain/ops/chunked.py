"""Attention in XLA by blocks: no array of all queries times all keys exists.

1. Queries are cut into blocks of all heads, of one row (CPU) or of all (where
   a loop over rows would leave a device idle). A block visits the blocks of
   keys that the intervals of any of its queries reach; the others are skipped,
   so that packed rows of short segments cost little. Short rows are one block,
   of all rows, visited once.
2. The forward pass adds up a softmax over the visits; it saves out and lse.
3. The backward pass repeats the visits, and computes p again from lse.

The formulas are those of `kernels.tiles`. `decode` is for one query per row,
and reads all keys.

Axes: B rows, T queries, S keys, N query heads, K kv heads, H head dim, I blocks
of queries, R query heads of a kv head times queries of a block.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kernels import masks, tiles


class Blocks(NamedTuple):
  """The sizes of blocks; hashable."""

  single: int  # the most queries, or keys, that are one block
  queries: int  # of a block of more queries, at most; and its keys
  keys: int  # of a block of more keys, for a single block of queries
  by_row: bool  # whether a block of queries is of one row, not of all


# On a CPU, measured at rows of 16 to 2,048 tokens: against blocks of 32, 48, 96
# and 128 queries, and 64 to 192 for a single one. On accelerators a visit is
# several kernels, whose launches larger blocks make up for; not tuned.
CPU_BLOCKS = Blocks(single=160, queries=64, keys=128, by_row=True)
BLOCKS = Blocks(single=512, queries=512, keys=512, by_row=False)


_MASKED = -1e30  # finite: -inf - (-inf) would be NaN for an empty interval


class Options(NamedTuple):
  """The static options of a call; hashable."""

  scale: float
  softcap: float | None
  blocks: Blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attention(
  options: Options,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  k_until: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Computes attention over keys with heads before time.

  Args:
    options: static options.
    q: float[B, T, N, H].
    k: float[B, K, S, H].
    v: float[B, K, S, H].
    k_start: i32[B, T].
    k_end: i32[B, T].
    k_until: i32[B, S], the largest k_end that sees a key; None = no bounds.

  Returns:
    (out float[B, T, N, H] in q's dtype, exactly 0 for an empty interval; lse
    f32[B, T, N] in nats).
  """
  return _forward(options, q, k, v, k_start, k_end, k_until)[0]


def _forward(options, q, k, v, *ends):
  fn = functools.partial(_out, options)
  out = _map_rows(options, fn, q, k, v, ends)
  # The names by which remat policies save these, see `kernels.flash`.
  out, lse = checkpoint_name(out, 'attention')
  residuals = checkpoint_name((q, k, v, out, lse), 'kept')
  joined = _plan(options, q, k).join(residuals[4].swapaxes(0, 1)[..., None])
  return (residuals[3], joined[..., 0]), (residuals, *ends)


def _out(options, q, k, v, ends):
  """Returns (out, lse f32[B, I, K, R])."""
  plan = _plan(options, q, k)
  visits, start, end = plan.visits(*ends)
  tile = _per_head(functools.partial(_add_tile, options))

  def block(_, xs):
    visits, start, end, q = xs

    def visit(j, state):
      mask, keys = plan.keys(j, start, end, ends[2], k, v)
      return tile(mask, q, *keys, *state)

    out, lse = tiles.finish(plan.loop(visits, visit, plan.state()))
    # An axis of size one would be padded to 128 on a TPU.
    return None, (out.astype(q.dtype), lse[..., 0])

  _, (out, lse) = lax.scan(block, None, (visits, start, end, plan.cut(q)))
  return plan.join(out), lse.swapaxes(0, 1)


def _backward(options, saved, gradients):
  (q, k, v, out, lse), *ends = saved
  g, g_lse = gradients
  delta = g.astype(jnp.float32) * out.astype(jnp.float32)
  # As in `kernels.flash`.
  delta = jnp.sum(delta, axis=-1, keepdims=True) - g_lse[..., None]
  fn = functools.partial(_gradients, options)
  args = q, k, v, ends, g.astype(q.dtype), lse, delta
  return *_map_rows(options, fn, *args), None, None, None


def _gradients(options, q, k, v, ends, g, lse, delta):
  """Returns (dq, dk, dv)."""
  plan = _plan(options, q, k)
  visits, start, end = plan.visits(*ends)
  tile = _per_head(functools.partial(_tile_gradients, options))

  def block(grads, xs):
    visits, start, end, q, *more = xs

    def visit(j, state):
      mask, keys = plan.keys(j, start, end, ends[2], k, v)
      dq, dk, dv = tile(mask, q, *keys, *more)
      return state[0] + dq, plan.add(state[1], j, dk), plan.add(state[2], j, dv)

    state = (jnp.zeros(q.shape, jnp.float32), *grads)
    dq, *grads = plan.loop(visits, visit, state)
    return tuple(grads), (dq * options.scale).astype(q.dtype)

  zeros = jnp.zeros(k.shape, jnp.float32)
  q, g, delta = map(plan.cut, (q, g, delta))
  xs = visits, start, end, q, g, lse.swapaxes(0, 1)[..., None], delta
  (dk, dv), dq = lax.scan(block, (zeros, zeros), xs)
  dk = (dk * options.scale).astype(k.dtype)
  return plan.join(dq), dk, dv.astype(v.dtype)


def _map_rows(options, fn, q, k, *args):
  """Calls fn(q, k, *args), for each row by itself where `by_row` says so."""
  if len(q) == 1 or not options.blocks.by_row or _plan(options, q, k).whole:
    return fn(q, k, *args)

  def one(row):
    row = jax.tree.map(lambda x: x[None], row)
    return jax.tree.map(lambda x: x[0], fn(*row))

  return lax.map(one, (q, k, *args))


attention.defvjp(_forward, _backward)


def _add_tile(options, mask, q, k, v, *state):
  """Adds a tile to the state of the softmax of one row and kv head."""
  s = tiles.scores(q, k, options.scale, options.softcap)
  return tiles.step(state, s, v, mask)


def _tile_gradients(options, mask, q, k, v, g, lse, delta):
  """Returns a tile's (dq / scale, dk / scale, dv), f32."""
  s = tiles.scores(q, k, options.scale, options.softcap)
  dp = tiles.dot(g, v, (1, 1))
  p, ds = tiles.gradient(s, dp, lse, delta, mask, options.softcap)
  p, ds = p.astype(g.dtype), ds.astype(k.dtype)
  dq, dk = tiles.dot(ds, k, (1, 0)), tiles.dot(ds, q, (0, 0))
  return dq, dk, tiles.dot(p, g, (0, 0))


def _per_head(fn):
  """Maps fn(mask, ...) over rows and kv heads; these share a row's mask."""

  def call(mask, *args):
    heads = jax.vmap(fn, (None,) + (0,) * len(args))
    return jax.vmap(heads)(mask, *args)

  return call


class _Plan(NamedTuple):
  """Sizes (padded to whole blocks of queries), and the way to cut arrays."""

  b: int
  n: int
  kv: int
  t: int
  padded: int
  s: int
  h: int
  block_q: int
  block_k: int

  @property
  def whole(self):
    """Returns whether a row's queries are one block."""
    return self.t == self.block_q

  @property
  def rows(self):
    """Returns R."""
    return self.n // self.kv * self.block_q

  def loop(self, visits, visit, state):
    """Returns the state after the visits of a block of queries."""
    lo, hi, order = visits
    if self.whole and self.s == self.block_k:
      return visit(0, state)  # the only one, without a loop
    if order is None:
      return lax.fori_loop(lo, hi, visit, state)
    return lax.fori_loop(lo, hi, lambda i, x: visit(order[i], x), state)

  def visits(self, k_start, k_end, k_until):
    """Returns (visits, intervals [I, B, R]).

    Visits are ranges (i32[I], i32[I]) of key blocks or, with `k_until`, of
    lists of them i32[I, J].
    """
    ends = masks.clip(k_start, k_end, self.s)
    # [B, T] to [I, B, block_q]
    start, end = (
      masks.pad(x, 1, self.padded)
      .reshape(self.b, -1, self.block_q)
      .swapaxes(0, 1)
      for x in ends
    )
    width = self.b * self.block_q
    flat = start.reshape(1, -1), end.reshape(1, -1)
    if k_until is not None:  # of the rows together
      size = -(-self.s // self.block_k) * self.block_k
      k_until = masks.pad(jnp.max(k_until, 0, keepdims=True), 1, size)
    ranges = masks.key_blocks(*flat, width, self.block_k, k_until)[0]
    group = self.n // self.kv
    start, end = (jnp.tile(x, (1, 1, group)) for x in (start, end))
    order = None if k_until is None else ranges[:, 4:]
    return (ranges[:, 0], ranges[:, 3], order), start, end

  def cut(self, x):
    """Cuts [B, T, N, X] into blocks [I, B, K, R, X]."""
    x = masks.pad(x, 1, self.padded)
    group = self.n // self.kv
    shape = self.b, -1, self.block_q, self.kv, group, x.shape[-1]
    x = x.reshape(shape).transpose(1, 0, 3, 4, 2, 5)
    return x.reshape(*x.shape[:3], self.rows, x.shape[-1])

  def join(self, x):
    """Inverts `cut`."""
    x = x.reshape(*x.shape[:3], -1, self.block_q, x.shape[-1])
    x = x.transpose(1, 0, 4, 2, 3, 5)
    x = x.reshape(self.b, self.padded, self.n, x.shape[-1])
    return x[:, : self.t]

  def state(self):
    """Returns the state of a softmax before the first visit, [B, K, R, X]."""
    return jax.tree.map(
      lambda x: jnp.broadcast_to(x, (self.b, self.kv, *x.shape)),
      tiles.start(self.rows, self.h),
    )

  def keys(self, j, start, end, until, *arrays):
    """Returns the mask [B, R, block_k] of block j, and blocks of arrays."""
    first = self._first(j)
    keys = first + lax.iota(jnp.int32, self.block_k)[None, None]
    if until is not None:
      until = lax.dynamic_slice_in_dim(until, first, self.block_k, axis=1)
      until = until[:, None]
    mask = tiles.in_interval(start[..., None], end[..., None], keys, until)
    # The last block starts early enough to be whole: its first keys are those
    # of the block before.
    return mask & (keys >= j * self.block_k), tuple(
      lax.dynamic_slice_in_dim(x, first, self.block_k, axis=2) for x in arrays
    )

  def add(self, x, j, block):
    """Adds a block of keys to block j of x [B, K, S, H]."""
    first = self._first(j)
    block += lax.dynamic_slice_in_dim(x, first, self.block_k, axis=2)
    return lax.dynamic_update_slice_in_dim(x, block, first, axis=2)

  def _first(self, j):
    return jnp.minimum(j * self.block_k, self.s - self.block_k)


def decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *,
  scale: float,
  softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
  """Computes (out, lse f32[B, N]) of q [B, N, H] over k, v [B, K, S, H]."""
  q = q * scale
  b, n, h = q.shape
  kv, s = k.shape[1:3]
  assert n % kv == 0, f'{n} query heads over {kv} kv heads'
  # A product per head of the group: on CPUs, one batched product of so few rows
  # takes two to three times as long as all of these together.
  q = q.reshape(b, kv, n // kv, h)
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  heads = [dot('bkh,bksh->bks', q[:, :, g], k) for g in range(n // kv)]
  ends = k_start[:, None], k_end[:, None]
  out, lse = _attend(softcap, jnp.stack(heads, axis=2), v, *ends)
  return out.astype(q.dtype).reshape(b, n, h), lse.reshape(b, n)


def few_queries(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *,
  scale: float,
  softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
  """Computes (out, lse f32[B, K, T]) in one block of scores, as `decode`.

  Args:
    q: float[B, T, K, H].
    k: float[B, K, S, H].
    v: float[B, K, S, H].
    k_start: i32[B, T].
    k_end: i32[B, T].
    scale: factor on the scores.
    softcap: bound of the scores; None = unbounded.
  """
  scores = jnp.einsum(
    'btkh,bksh->bkts', q * scale, k, preferred_element_type=jnp.float32
  )
  out, lse = _attend(softcap, scores, v, k_start, k_end)
  return out.swapaxes(1, 2).astype(q.dtype), lse


def _attend(softcap, scores, v, k_start, k_end):
  """Returns (out [B, K, R, H], lse [B, K, R]) of scores f32[B, K, R, S].

  Intervals are i32[B, R], or i32[B, 1].
  """
  scores = scores if softcap is None else softcap * jnp.tanh(scores / softcap)
  keys = jnp.arange(v.shape[2], dtype=jnp.int32)[None, None]
  mask = (k_start[..., None] <= keys) & (keys < k_end[..., None])
  mask = mask[:, None]
  top = jnp.max(jnp.where(mask, scores, _MASKED), axis=-1, keepdims=True)
  # Masked scores may exceed `top`, so they are masked before exp.
  weights = jnp.exp(jnp.where(mask, scores - top, _MASKED))
  total = jnp.sum(weights, axis=-1, keepdims=True)
  # 0 / 1 for an empty interval; otherwise the top key alone contributes 1.
  total = jnp.maximum(total, 1.0)
  out = jnp.einsum(
    'bkrs,bksh->bkrh',
    weights.astype(v.dtype),
    v,
    preferred_element_type=jnp.float32,
  )
  return out * (1.0 / total), (top + jnp.log(total))[..., 0]


def _plan(options, q, k):
  b, t, n, h = q.shape
  kv, s = k.shape[1:3]
  assert n % kv == 0, f'{n} query heads over {kv} kv heads'
  sizes = options.blocks
  if t <= sizes.single:
    block_k = s if s <= sizes.single else sizes.keys
    return _Plan(b, n, kv, t, t, s, h, t, block_k)
  count = -(-t // sizes.queries)
  block = -(-t // (16 * count)) * 16
  return _Plan(b, n, kv, t, count * block, s, h, block, min(block, s))
