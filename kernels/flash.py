"""Flash attention with a gradient, on any backend.

1. forward: (out, lse) from q, k, v and the mask; all are residuals.
2. delta = sum_h g out - (gradient of lse), in XLA.
3. backward: two kernels, dq over blocks of queries, dk and dv over blocks of
   keys; both recompute p from lse. No atomics: two runs agree bitwise.

Backends: 'triton' (GPU), 'mosaic_tpu', 'reference' (plain jnp), and 'auto':
that of the platform that the program is lowered for.

Axes: B rows, T queries, S keys, N query heads, K kv heads, H head dim.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kernels import flash_tpu, flash_triton, reference
from kernels import options as options_lib

MODULES = {'triton': flash_triton, 'mosaic_tpu': flash_tpu}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def flash(
  options: options_lib.Options,
  q: jax.Array,
  k: jax.Array,
  v: jax.Array,
  k_start: jax.Array,
  k_end: jax.Array,
  k_until: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Computes attention, heads before time.

  Args:
    options: static options.
    q: float[B, N, T, H].
    k: float[B, K, S, H].
    v: float[B, K, S, H].
    k_start: i32[B, T].
    k_end: i32[B, T].
    k_until: i32[B, S], the largest k_end that sees a key; None = no bounds.

  Returns:
    (out [B, N, T, H] in q's dtype, lse f32[B, N, T] in nats); 0 and -1e30
    for an empty interval.
  """
  return _run(options, 'forward', q, k, v, k_start, k_end, k_until)


def _forward(options, q, k, v, *ends):
  out, lse = flash(options, q, k, v, *ends)
  # The names by which remat policies save these instead of recomputing them:
  # 'kept' saves all, 'attention' what only another forward pass computes.
  out, lse = checkpoint_name((out, lse), 'attention')
  residuals = checkpoint_name((q, k, v, out, lse), 'kept')
  *_, out, lse = residuals
  return (out, lse), (residuals, *ends)


def _backward(options, saved, gradients):
  (q, k, v, out, lse), *ends = saved
  g, g_lse = gradients
  # d lse / d s = p: the gradient of lse joins delta, with the other sign.
  delta = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
  args = (q, k, v, *ends, lse, delta - g_lse, g.astype(q.dtype))
  return (*_run(options, 'backward', *args), None, None, None)


flash.defvjp(_forward, _backward)


def _run(options, direction, q, k, *args):
  """Calls `direction` of the backend, or of the platform's one for 'auto'."""

  def function(backend):
    return functools.partial(getattr(backend, direction), options)

  if options.backend in MODULES:
    return function(MODULES[options.backend])(q, k, *args)
  oracle = function(_Oracle)
  if options.backend == 'reference':
    return oracle(q, k, *args)
  calls = {
    name: oracle
    if module.unsupported(q.shape[-1], q.dtype)
    else function(module)
    for name, module in MODULES.items()
  }
  return lax.platform_dependent(
    q, k, *args, cuda=calls['triton'], tpu=calls['mosaic_tpu'], default=oracle
  )


class _Oracle:
  """The oracle, with the functions of a module of kernels."""

  @staticmethod
  def forward(options, q, k, v, *ends):
    out, lse = reference.cached(
      q.transpose(0, 2, 1, 3),
      k,
      v,
      *ends,
      scale=options.scale,
      softcap=options.softcap,
      return_lse=True,
    )
    return out.transpose(0, 2, 1, 3), lse

  @staticmethod
  def backward(options, q, k, v, *args):
    *ends, _, delta, g = args

    def run(q, k, v):
      return _Oracle.forward(options, q, k, v, *ends)

    (out, _), vjp = jax.vjp(run, q, k, v)
    inner = jnp.sum(g.astype(jnp.float32) * out.astype(jnp.float32), axis=-1)
    return vjp((g, inner - delta))
