"""The jnp oracles of the kernels: same signatures, plain formulas.

Axes: B rows, T queries, S keys, N query heads, K kv heads, H head dim.
"""

import jax
import jax.numpy as jnp


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  k_until: jax.Array | None = None,
  *,
  scale: float,
  softcap: float | None = None,
  return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Attends each query to the keys of its interval.

  z[t, s] = scale q[t] . k[s],  or  softcap tanh(scale q[t] . k[s] / softcap)
  out[t] = sum_s softmax_s(z[t, s]) v[s],
           k_start[t] <= s < k_end[t] <= k_until[s]
  lse[t] = log sum_s exp z[t, s]

  Query head n reads kv head n // (N / K). An empty interval gives exactly 0,
  and an lse of -1e30.

  Args:
    q: float[B, T, N, H].
    k: float[B, S, K, H].
    v: float[B, S, K, H].
    k_start: i32[B, T], first key of a query's interval.
    k_end: i32[B, T], one past the last key of the interval.
    k_until: i32[B, S], the largest k_end that sees a key; None = no bounds.
    scale: factor on the scores.
    softcap: bound of the scores; None = unbounded.
    return_lse: whether to return lse as well.

  Returns:
    out, float[B, T, N, H] in q's dtype; scores and softmax are float32. With
    `return_lse`, (out, lse f32[B, N, T] in nats).
  """
  dtype, group = q.dtype, q.shape[2] // k.shape[2]
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
  scores = scale * jnp.einsum('btnh,bsnh->bnts', q, k, precision='highest')
  if softcap is not None:
    scores = softcap * jnp.tanh(scores / softcap)
  keys = jnp.arange(k.shape[1])[None, None]
  mask = (k_start[..., None] <= keys) & (keys < k_end[..., None])
  if k_until is not None:
    mask &= k_end[..., None] <= k_until[:, None]
  mask = mask[:, None]  # [B, 1, T, S]
  scores = jnp.where(mask, scores, -1e30)
  # For an empty interval, softmax of the finite fill would be uniform, not 0.
  weights = jnp.where(mask, jax.nn.softmax(scores, axis=-1), 0.0)
  out = jnp.einsum('bnts,bsnh->btnh', weights, v, precision='highest')
  out = out.astype(dtype)
  if not return_lse:
    return out
  lse = jax.nn.logsumexp(scores, axis=-1)
  return out, jnp.where(mask.any(-1), lse, -1e30)


def cached(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  k_until: jax.Array | None = None,
  *,
  scale: float,
  softcap: float | None = None,
  return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Computes `attention` over keys in a cache: k, v are [B, K, S, H]."""
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  return attention(
    q,
    k,
    v,
    k_start,
    k_end,
    k_until,
    scale=scale,
    softcap=softcap,
    return_lse=return_lse,
  )


def decode(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *,
  scale: float,
  softcap: float | None = None,
  return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Computes `cached` with one query per row: q [B, N, H], intervals i32[B].

  Returns:
    out, float[B, N, H]; with `return_lse`, (out, lse f32[B, N]).
  """
  out = cached(
    q[:, None],
    k,
    v,
    k_start[:, None],
    k_end[:, None],
    scale=scale,
    softcap=softcap,
    return_lse=return_lse,
  )
  if not return_lse:
    return out[:, 0]
  return out[0][:, 0], out[1][..., 0]
