"""The computation of attention on one tile, shared by all kernels.

A tile is a block of queries against a block of keys, as values in registers.
Statistics of a query have an axis of size one, so that the gradient tile may
be [queries, keys] or [keys, queries].

Forward, online softmax over tiles (Milakov and Gimelshein, arXiv 1805.02867;
Dao et al., FlashAttention, arXiv 2205.14135):

    s = cap(scale q k^T)      top' = max(top, max s)     p = exp(s - top')
    total' = total exp(top - top') + sum p
    acc' = acc exp(top - top') + p v        out = acc / total
    lse = top + log total

Backward, p again from lse, with delta = sum_h g out - (gradient of lse):

    dv = p^T g     ds = p (g v^T - delta) cap'     dq = scale ds k
    dk = scale ds^T q                    cap' = 1 - (s / softcap)^2
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

MASKED = -1e30  # finite: -inf - (-inf) would be NaN for an empty interval


def dot(a: jax.Array, b: jax.Array, axes: tuple[int, int]) -> jax.Array:
  """Contracts an axis of a with one of b, accumulated in float32."""
  # float32 follows jax_default_matmul_precision, as in XLA; for bfloat16 that
  # option has no meaning, and Mosaic rejects it.
  precision = None if a.dtype == jnp.float32 else lax.Precision.DEFAULT
  contract = (((axes[0],), (axes[1],)), ((), ()))
  return lax.dot_general(
    a, b, contract, precision=precision, preferred_element_type=jnp.float32
  )


def scores(
  a: jax.Array, b: jax.Array, scale: Any, softcap: float | None
) -> jax.Array:
  """Computes softcap tanh(scale a b^T / softcap), f32[rows of a, rows of b].

  The scale may be f32[1, rows of b].
  """
  s = dot(a, b, (1, 1)) * scale
  return s if softcap is None else softcap * jnp.tanh(s / softcap)


def in_interval(
  k_start: jax.Array,
  k_end: jax.Array,
  keys: jax.Array,
  k_until: jax.Array | None = None,
) -> jax.Array:
  """Returns a tile's mask from intervals and key indices that broadcast."""
  mask = (k_start <= keys) & (keys < k_end)
  return mask if k_until is None else mask & (k_end <= k_until)


def start(rows: int, head_dim: int) -> tuple[jax.Array, ...]:
  """Returns the state (top, total, acc) before the first tile."""
  return (
    jnp.full((rows, 1), MASKED, jnp.float32),
    jnp.zeros((rows, 1), jnp.float32),
    jnp.zeros((rows, head_dim), jnp.float32),
  )


def step(
  state: tuple[jax.Array, ...],
  s: jax.Array,
  v: jax.Array,
  mask: jax.Array | None,
  v_scale: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
  """Adds a tile of scores [queries, keys] to the state; mask None = all.

  With `v_scale`, f32[1, keys], the values are v_scale v.
  """
  top, total, acc = state
  if mask is not None:
    s = jnp.where(mask, s, MASKED)
  new = jnp.maximum(top, jnp.max(s, axis=1, keepdims=True))
  p = jnp.exp(s - new)
  if mask is not None:  # exp(MASKED - MASKED) = 1 for an empty interval
    p = jnp.where(mask, p, 0.0)
  shrink = jnp.exp(top - new)
  total = total * shrink + jnp.sum(p, axis=1, keepdims=True)
  p = p if v_scale is None else p * v_scale
  return new, total, acc * shrink + dot(p.astype(v.dtype), v, (1, 0))


def finish(state: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
  """Returns (out, lse) after the last tile; (0, MASKED) for no keys."""
  top, total, acc = state
  empty = total == 0.0
  total = jnp.where(empty, 1.0, total)
  return acc / total, jnp.where(empty, MASKED, top + jnp.log(total))


def gradient(
  s: jax.Array,
  dp: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
  mask: jax.Array | None,
  softcap: float | None,
) -> tuple[jax.Array, jax.Array]:
  """Computes (p, ds / scale) of a tile, in either layout; dp = g v^T."""
  p = jnp.exp(s - lse)
  if mask is not None:  # a masked score may exceed lse: its p may be inf
    p = jnp.where(mask, p, 0.0)
  ds = p * (dp - delta)
  if softcap is not None:
    ds = ds * (1.0 - jnp.square(s / softcap))
  return p, ds
