"""Attention over per-query key intervals.

Query t of a row attends to the keys `k_start[t] <= s < k_end[t]`. Causality,
packing, padding (an empty interval), sliding windows and ragged lengths are all
such intervals.

`impl` names an implementation (see `posttrain.ops.dispatch`). The default is
the XLA code below on a CPU, and the Pallas kernels on one GPU or TPU.

Axes: B rows, T queries, S keys, N query heads, K kv heads (each read by N/K
query heads), H head dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from kernels import attention as kernels
from posttrain.ops import dispatch

_MASKED = -1e30  # finite: -inf - (-inf) would be NaN for an empty interval


def intervals(
  segment_ids: jax.Array, positions: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """Returns causal intervals of packed rows: each segment up to the token.

  Args:
    segment_ids: i32[B, T], packed example id; 0 = pad.
    positions: i32[B, T], index of a token within its segment.

  Returns:
    (k_start, k_end), i32[B, T] each; both 0 on pads.
  """
  index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None]
  valid = segment_ids != 0
  start = jnp.where(valid, index - positions, 0)
  return start, jnp.where(valid, index + 1, 0)


def attention(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *,
  scale: float,
  softcap: float | None = None,
  impl: str = 'auto',
) -> jax.Array:
  """Attends each query to the keys of its interval.

  out[t] = sum_s softmax_s(scale q[t] . k[s]) v[s],  k_start[t] <= s < k_end[t]

  With a softcap, scores are bounded before the softmax.

  Query head n reads kv head n // (N/K). A query with an empty interval gives
  exactly 0, and zero gradients.

  Args:
    q: float[B, T, N, H].
    k: float[B, S, K, H].
    v: float[B, S, K, H].
    k_start: i32[B, T], the first key that a query attends to.
    k_end: i32[B, T], one past the last key that it attends to.
    scale: factor on the scores.
    softcap: bound c of the scores, which become c tanh(score / c); None: none.
    impl: one of `dispatch.IMPLS`.

  Returns:
    float[B, T, N, H] in q's dtype; scores and softmax are float32.

  Raises:
    NotImplementedError: the named implementation does not support the
      arguments.
  """
  k, v = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
  options = {'scale': scale, 'softcap': softcap, 'impl': impl}
  return cached(q, k, v, k_start, k_end, **options)


def cached(
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  *,
  scale: float,
  softcap: float | None = None,
  impl: str = 'auto',
) -> jax.Array:
  """Computes `attention` over keys in a cache, heads before time.

  Args:
    q: float[B, T, N, H].
    k: float[B, K, S, H].
    v: float[B, K, S, H].
    k_start: i32[B, T], the first key that a query attends to.
    k_end: i32[B, T], one past the last key that it attends to.
    scale: factor on the scores.
    softcap: bound c of the scores, which become c tanh(score / c); None: none.
    impl: one of `dispatch.IMPLS`.

  Returns:
    float[B, T, N, H] in q's dtype.
  """
  impl = _choose(impl, q, k, v)
  if impl != 'xla':
    args = q, k, v, k_start, k_end
    return _kernel(kernels.cached, impl, scale, softcap, *args)
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
  softcap: float | None = None,
  impl: str = 'auto',
) -> jax.Array:
  """Computes `cached` with one query per row.

  Args:
    q: float[B, N, H].
    k: float[B, K, S, H].
    v: float[B, K, S, H].
    k_start: i32[B], first key of a row's interval.
    k_end: i32[B], one past the last key of the interval.
    scale: factor on the scores.
    softcap: bound c of the scores, which become c tanh(score / c); None: none.
    impl: one of `dispatch.IMPLS`.

  Returns:
    float[B, N, H] in q's dtype.
  """
  impl = _choose(impl, q, k, v, in_loop=True)
  if impl != 'xla':
    args = q, k, v, k_start, k_end
    return _kernel(kernels.decode, impl, scale, softcap, *args)
  return _decode(softcap, q * scale, k, v, k_start, k_end)


def _choose(impl, q, k, v, in_loop=False):
  """Chooses an implementation.

  Args:
    in_loop: whether the op is called at every step of a loop that carries k
      and v.
  """

  def unsupported(backend):
    narrow = backend == 'mosaic_tpu' and k.shape[3] % 128
    if in_loop and narrow and impl == 'auto':
      # The kernel needs H along lanes; XLA chooses another layout in a loop.
      return f'head_dim {k.shape[3]}: the cache would be copied at every step'
    if q.dtype != k.dtype or q.dtype != v.dtype:
      return f'dtypes must agree: got {q.dtype}, {k.dtype}, {v.dtype}'
    return kernels.unsupported(backend, q.shape[-1], q.dtype)

  return dispatch.choose(impl, unsupported)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _kernel(fn, impl, scale, softcap, q, k, v, k_start, k_end):
  """Calls a kernel; under jit, so that layers share one tracing of it."""
  interpret = impl == 'interpret'
  backend = 'triton' if interpret else impl
  return fn(
    q,
    k,
    v,
    k_start,
    k_end,
    scale=scale,
    softcap=softcap,
    backend=backend,
    interpret=interpret,
  )


def _decode(softcap, q, k, v, k_start, k_end):
  """Computes attention of scaled q [B, N, H] over k, v [B, K, S, H]."""
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
  # The name by which a remat policy saves these instead of recomputing them.
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
