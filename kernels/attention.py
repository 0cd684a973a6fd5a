"""Attention by Pallas kernels: the public functions.

    attention   queries and keys in time order: training, scoring
    cached      queries over a cache, heads before time: prefill
    decode      one query per row over a cache

`attention` and `cached` have gradients, `decode` has none. Masks are intervals:
each query attends to an interval of keys (see `kernels.masks`). The oracles in
`kernels.reference` have the same signatures without `backend`, `interpret` and
`splits`.

`backend` is 'triton' (GPU), 'mosaic_tpu', 'reference' (the oracle), or 'auto':
the kernels of the platform that the program is lowered for, and the oracle on
other platforms and for unsupported heads. `interpret` runs a kernel as plain
jax on any platform, for tests; always call it under `jax.jit`.

A kernel runs on one device: on several, call it within `jax.shard_map`.

Axes: B rows, T queries, S keys, N query heads, K kv heads, H head dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from kernels import decode_tpu, decode_triton, flash, reference
from kernels import options as options_lib

MAX_HEAD_DIM = 256  # of any backend
BACKENDS = ('auto', 'reference', *flash.MODULES)


def unsupported(backend: str, head_dim: int, dtype: jnp.dtype) -> str | None:
  """Returns why a backend's kernels do not support such heads, or None."""
  return flash.MODULES[backend].unsupported(head_dim, jnp.dtype(dtype))


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
  backend: str = 'auto',
  interpret: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Attends each query to the keys of its interval.

  z[t, s] = scale q[t] . k[s],  or  softcap tanh(scale q[t] . k[s] / softcap)
  out[t] = sum_s softmax_s(z[t, s]) v[s],
           k_start[t] <= s < k_end[t] <= k_until[s]
  lse[t] = log sum_s exp z[t, s]

  Query head n reads kv head n // (N / K). A query with an empty interval
  gives exactly 0, an lse of -1e30, and zero gradients.

  Args:
    q: float[B, T, N, H].
    k: float[B, S, K, H], q's dtype.
    v: float[B, S, K, H], q's dtype.
    k_start: i32[B, T], first key of a query's interval.
    k_end: i32[B, T], one past the last key of the interval.
    k_until: i32[B, S], the largest k_end that sees a key; None = no bounds.
    scale: factor on the scores.
    softcap: bound of the scores; None = unbounded.
    return_lse: whether to return lse as well.
    backend: one of BACKENDS.
    interpret: whether to interpret the kernels.

  Returns:
    out, float[B, T, N, H] in q's dtype; scores and softmax are float32. With
    `return_lse`, (out, lse f32[B, N, T] in nats).

  Raises:
    NotImplementedError: the named backend does not support such heads.

  References:
    Dao, FlashAttention-2, arXiv 2307.08691.
  """
  return cached(
    q,
    k.transpose(0, 2, 1, 3),
    v.transpose(0, 2, 1, 3),
    k_start,
    k_end,
    k_until,
    scale=scale,
    softcap=softcap,
    return_lse=return_lse,
    backend=backend,
    interpret=interpret,
  )


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
  backend: str = 'auto',
  interpret: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Computes `attention` over keys in a cache: k, v are [B, K, S, H]."""
  options = options_lib.Options(scale, softcap, backend, interpret)
  _check(q, k, v, options)
  q = q.transpose(0, 2, 1, 3)
  out, lse = flash.flash(options, q, k, v, k_start, k_end, k_until)
  out = out.transpose(0, 2, 1, 3)
  return (out, lse) if return_lse else out


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
  backend: str = 'auto',
  interpret: bool = False,
  splits: int | None = None,
  scales: tuple[jax.Array, jax.Array] | tuple[()] = (),
) -> jax.Array | tuple[jax.Array, jax.Array]:
  """Computes `cached` with one query per row: q [B, N, H], intervals i32[B].

  Args:
    scales: f32[B, K, S] of keys and of values, which are int8 then; () = they
      have q's dtype.
    splits: programs among which Triton divides the keys of a row and kv head;
      None = `decode_triton.default_splits`. Other backends do not split.

  Returns:
    out, float[B, N, H] in q's dtype; with `return_lse`, (out, lse f32[B, N]).
  """
  options = options_lib.Options(scale, softcap, backend, interpret)
  _check(q, k, v, options, jnp.dtype('int8') if scales else q.dtype)

  def oracle(q, k, v, k_start, k_end, *scales):
    if scales:
      pairs = zip((k, v), scales, strict=True)
      k, v = ((x * y[..., None]).astype(q.dtype) for x, y in pairs)
    return reference.decode(
      q, k, v, k_start, k_end, scale=scale, softcap=softcap, return_lse=True
    )

  calls = {
    'triton': functools.partial(decode_triton.forward, options, splits),
    'mosaic_tpu': functools.partial(decode_tpu.forward, options),
    'reference': oracle,
  }
  args = q, k, v, k_start, k_end, *scales
  if backend != 'auto':
    out, lse = calls[backend](*args)
  else:
    for name in flash.MODULES:
      if unsupported(name, q.shape[-1], q.dtype):
        calls[name] = oracle
    out, lse = lax.platform_dependent(
      *args, cuda=calls['triton'], tpu=calls['mosaic_tpu'], default=oracle
    )
  return (out, lse) if return_lse else out


def _check(q, k, v, options, dtype=None):
  n, kv = q.shape[-2], k.shape[1]
  assert options.backend in BACKENDS, f'no backend {options.backend!r}'
  assert n % kv == 0, f'{n} query heads over {kv} kv heads'
  assert k.shape == v.shape, f'k {k.shape} and v {v.shape} differ'
  dtype = dtype or q.dtype
  if k.dtype != dtype or v.dtype != dtype:
    raise NotImplementedError(
      f'k and v must be {dtype} with q {q.dtype}: got {k.dtype}, {v.dtype}'
    )
  if options.backend in flash.MODULES:
    reason = unsupported(options.backend, q.shape[-1], q.dtype)
    if reason:
      raise NotImplementedError(f'{options.backend}: {reason}')
