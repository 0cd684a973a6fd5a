"""Attention of one query per row in XLA, which reads all keys.

Axes: B rows, S keys, N query heads, K kv heads (each read by N/K
query heads), H head dim.
"""

import functools

import jax
import jax.numpy as jnp

_MASKED = -1e30  # finite: -inf - (-inf) would be NaN for an empty interval


def decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *,
  scale: float,
  softcap: float | None,
) -> jax.Array:
  """Computes attention of q [B, N, H] over k, v [B, K, S, H]."""
  q = q * scale
  b, n, h = q.shape
  kv, s = k.shape[1:3]
  assert n % kv == 0, f'{n} query heads over {kv} kv heads'
  # A product per head of the group: on CPUs, one batched product of so few rows
  # takes two to three times as long as all of these together.
  q = q.reshape(b, kv, n // kv, h)
  dot = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
  heads = [dot('bkh,bksh->bks', q[:, :, g], k) for g in range(n // kv)]
  scores = _capped(jnp.stack(heads, axis=2), softcap)
  keys = jnp.arange(s, dtype=jnp.int32)[None]
  mask = (k_start[:, None] <= keys) & (keys < k_end[:, None])
  weights, inverse = _exponentials(scores, mask[:, None, None])
  out = dot('bkgs,bksh->bkgh', weights.astype(v.dtype), v) * inverse
  return out.astype(q.dtype).reshape(b, n, h)


def _capped(scores, softcap):
  return scores if softcap is None else softcap * jnp.tanh(scores / softcap)


def _exponentials(scores, mask):
  """Returns (exp(scores - their maximum), 1 / its sum), 0 where masked."""
  top = jnp.max(jnp.where(mask, scores, _MASKED), axis=-1, keepdims=True)
  # Masked scores may exceed `top`, so they are masked before exp.
  unnormalized = jnp.exp(jnp.where(mask, scores - top, _MASKED))
  total = jnp.sum(unnormalized, axis=-1, keepdims=True)
  # 0 / 1 for an empty interval; otherwise the top key alone contributes 1.
  return unnormalized, 1.0 / jnp.maximum(total, 1.0)
