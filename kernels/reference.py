"""The jnp oracles of the kernels: same signatures, written to be read.

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
    *,
    scale: float,
) -> jax.Array:
  """Attends each query to the keys of its interval.

  out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s],  k_start[t] <= s < k_end[t]

  Query head n reads kv head n // (N / K). An empty interval gives exactly 0.

  Args:
    q: float[B, T, N, H].
    k: float[B, S, K, H].
    v: float[B, S, K, H].
    k_start: i32[B, T], first key a query sees.
    k_end: i32[B, T], one past the last key a query sees.
    scale: factor on the scores.

  Returns:
    float[B, T, N, H] in q's dtype; scores and softmax are float32.
  """
  dtype, group = q.dtype, q.shape[2] // k.shape[2]
  q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
  k, v = jnp.repeat(k, group, axis=2), jnp.repeat(v, group, axis=2)
  scores = scale * jnp.einsum(
      'btnh,bsnh->bnts', q, k, precision='highest'
  )
  keys = jnp.arange(k.shape[1])[None, None]
  mask = (k_start[..., None] <= keys) & (keys < k_end[..., None])
  mask = mask[:, None]  # [B, 1, T, S]
  # Without a key, a softmax over the finite fill would be uniform, not 0.
  weights = jax.nn.softmax(jnp.where(mask, scores, -1e30), axis=-1)
  weights = jnp.where(mask, weights, 0.0)
  out = jnp.einsum('bnts,bsnh->btnh', weights, v, precision='highest')
  return out.astype(dtype)
