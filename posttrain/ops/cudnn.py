"""Attention by cuDNN, through `jax.nn.dot_product_attention`.

Its masks by lengths and windows cannot express intervals of packed rows: it
reads a mask of all queries times all keys, one for all heads. The scores of the
heads are never stored.

A remat policy by names does not see what it saves for its gradient: every
policy repeats its forward pass.

Axes: B rows, T queries, S keys, N query heads, K kv heads, H head dim.
"""

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels import masks, tiles

MAX_HEAD_DIM = 256  # 128 before Hopper, which jax checks


def unsupported(
  head_dim: int, dtype: jnp.dtype, softcap: float | None
) -> str | None:
  """Returns why cuDNN does not support such heads, or None."""
  if softcap is not None:
    return f'attention_softcap must be None: got {softcap}'
  if head_dim % 8 or head_dim > MAX_HEAD_DIM:
    return (
      f'head_dim must be a multiple of 8 up to {MAX_HEAD_DIM}: got {head_dim}'
    )
  if dtype not in (jnp.bfloat16, jnp.float16):
    return f'dtype must be bfloat16 or float16: got {dtype}'
  return None


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *,
  scale: float,
) -> jax.Array:
  """Computes attention of q [B, T, N, H] over k, v [B, S, K, H]."""
  t, s = q.shape[1], k.shape[1]
  k_start, k_end = masks.clip(k_start, k_end, s)
  # Its gradient takes even lengths only. An empty interval, of which softmax is
  # undefined, becomes that of the first key, and its result 0.
  q, k, v = (masks.pad(x, 1, x.shape[1] + x.shape[1] % 2) for x in (q, k, v))
  k_start, k_end = (masks.pad(x, 1, q.shape[1]) for x in (k_start, k_end))
  empty = k_start == k_end
  k_end = jnp.where(empty, 1, k_end)
  keys = jnp.arange(k.shape[1], dtype=jnp.int32)[None, None]
  mask = tiles.in_interval(k_start[..., None], k_end[..., None], keys)
  out = jax.nn.dot_product_attention(
    q, k, v, mask=mask[:, None], scale=scale, implementation='cudnn'
  )
  out = jnp.where(empty[..., None, None], 0, out)[:, :t]
  return checkpoint_name(checkpoint_name(out, 'attention'), 'kept')
