"""Attention in XLA that stores all scores: the fastest on a CPU for short rows.

Axes: B rows, T queries, S keys, N query heads, K kv heads (each read by N/K
query heads), H head dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

_MASKED = -1e30  # finite: -inf - (-inf) would be NaN for an empty interval


def cached(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *,
  scale: float,
  softcap: float | None,
) -> jax.Array:
  """Computes attention of q [B, T, N, H] over k, v [B, K, S, H]."""
  b, t, n, h = q.shape
  kv = k.shape[1]
  assert n % kv == 0, f'{n} query heads over {kv} kv heads'
  # Heads before time, and the N/K query heads of a kv head folded into rows:
  # every contraction is then a plain batched matmul, the fastest on CPUs.
  q = (q * scale).reshape(b, t, kv, n // kv, h)
  q = q.transpose(0, 2, 3, 1, 4).reshape(b, kv, n // kv * t, h)
  out = _folded(softcap, q, k, v, k_start, k_end)
  out = out.reshape(b, kv, n // kv, t, h).transpose(0, 3, 1, 2, 4)
  return out.reshape(b, t, n, h)


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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _folded(softcap, q, k, v, k_start, k_end):
  """Computes attention of scaled q [B, K, N/K*T, H] over k, v [B, K, S, H]."""
  return _folded_fwd(softcap, q, k, v, k_start, k_end)[0]


_matmul = functools.partial(jnp.matmul, preferred_element_type=jnp.float32)


def _folded_fwd(softcap, q, k, v, k_start, k_end):
  b, kv, rows, _ = q.shape
  t, s = k_start.shape[1], k.shape[2]
  scores = _capped(_matmul(q, k.mT), softcap).reshape(b, kv, rows // t, t, s)
  keys = jnp.arange(s, dtype=jnp.int32)[None, None]
  mask = (k_start[..., None] <= keys) & (keys < k_end[..., None])
  # [B, 1, 1, T, S]
  unnormalized, inverse = _exponentials(scores, mask[:, None, None])
  inverse = inverse.reshape(b, kv, rows, 1)
  weights = unnormalized.reshape(b, kv, rows, s).astype(v.dtype)
  out = _matmul(weights, v) * inverse
  out = out.astype(q.dtype)
  slope = None  # d tanh = 1 - tanh^2
  if softcap is not None:
    slope = 1.0 - jnp.square(scores.reshape(weights.shape) / softcap)
  # The names by which remat policies save these, see `kernels.flash`.
  out = checkpoint_name(out, 'attention')
  residuals = (slope, q, k, v, weights, inverse, out)
  *_, out = residuals = checkpoint_name(residuals, 'kept')
  return out, residuals


def _folded_bwd(softcap, residuals, g):
  """Computes dv = p^T g, ds = p (g v^T - g . out), dq = ds k, with p = e / l.

  e is saved instead of p: dividing g by l takes H divisions per row, not S.
  """
  del softcap
  slope, q, k, v, weights, inverse, out = residuals
  scaled = g.astype(jnp.float32) * inverse
  delta = jnp.sum(scaled * out, axis=-1, keepdims=True)
  scaled = scaled.astype(v.dtype)
  dv = _matmul(weights.mT, scaled)
  ds = weights * (_matmul(scaled, v.mT) - delta)
  ds = (ds if slope is None else ds * slope).astype(k.dtype)
  dq, dk = _matmul(ds, k), _matmul(ds.mT, q)
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), None, None


_folded.defvjp(_folded_fwd, _folded_bwd)
