"""Jitted forward and backward passes, and their tolerances."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kernels import attention, reference
from posttrain.ops import attention as ops
from tests.kernels import inputs

# With small arrays, compilation takes nearly all of the time.
FAST = {'xla_backend_optimization_level': 0}
NAMES = ('out', 'lse', 'dq', 'dk', 'dv')


@functools.cache
def make_run(backend, scale, name='attention', softcap=None, small=True):
  """Returns a jitted (q, k, v, intervals, g, g_lse) -> out, lse, dq, dk, dv."""
  fn = getattr(reference, name)
  if backend != 'oracle':
    fn = functools.partial(
      getattr(attention, name), backend=backend, interpret=True
    )

  def run(q, k, v, *args):
    *ends, g, g_lse = args

    def call(q, k, v):
      return fn(q, k, v, *ends, scale=scale, softcap=softcap, return_lse=True)

    (out, lse), vjp = jax.vjp(call, q, k, v)
    return out, lse, *vjp((g.astype(out.dtype), g_lse))

  return jax.jit(run, compiler_options=FAST if small else None)


def by_mask(q, k, v, mask, scale, softcap=None):
  """Attends by a mask bool[B, T, S] of all pairs; returns out, lse."""
  group = q.shape[2] // k.shape[2]
  k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
  s = scale * jnp.einsum('btnh,bsnh->bnts', q, k, precision='highest')
  s = s if softcap is None else softcap * jnp.tanh(s / softcap)
  s = jnp.where(mask[:, None], s, -1e30)
  lse = jnp.where(mask.any(-1)[:, None], jax.nn.logsumexp(s, axis=-1), -1e30)
  p = jnp.where(mask[:, None], jnp.exp(s - lse[..., None]), 0.0)
  return jnp.einsum('bnts,bsnh->btnh', p, v, precision='highest'), lse


@functools.cache
def make_xla(scale):
  """Returns the same for the op in XLA, without lse and its gradient."""

  def run(q, k, v, start, end, g):
    out, vjp = jax.vjp(
      lambda *x: ops.attention(*x, start, end, scale=scale, impl='xla'), q, k, v
    )
    return out, *vjp(g)

  return jax.jit(run)


def make_inputs(seed, b, t, n, k, h, dtype=jnp.float32):
  """Draws (q, k, v), (g, g_lse)."""
  q, k, v, g = inputs.draw(
    seed, (b, t, n, h), (b, t, k, h), (b, t, k, h), (b, t, n, h), dtype=dtype
  )
  return (q, k, v), (g, *inputs.draw(seed + 1, (b, n, t)))


def error(a, b):
  """Returns the largest difference, in float32."""
  return np.abs(np.asarray(a, np.float32) - np.asarray(b, np.float32)).max()


def compare(ours, expected, dtype):
  """Checks the tolerances; gradients relative to their largest entry."""
  exact = dtype == jnp.float32
  for name, a, b in zip(NAMES, ours, expected, strict=True):
    assert a.dtype == (jnp.float32 if name == 'lse' else dtype)
    a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
    assert np.isfinite(a).all(), name
    if name == 'out':
      # bfloat16 rounds entries beyond 4 by up to 1.6e-2: beyond 2, the bound
      # of 1e-2 is relative to 2.
      size = 1.0 if exact else np.maximum(np.abs(b) / 2, 1.0)
      worst = (np.abs(a - b) / size).max()
      assert worst <= (2e-6 if exact else 1e-2), (name, worst)
    elif name == 'lse':
      assert error(a, b) <= (1e-5 if exact else 5e-3), (name, error(a, b))
    else:
      relative = error(a, b) / np.abs(b).max()
      assert relative <= (1e-5 if exact else 2e-2), (name, relative)
      cosine = (a * b).sum() / np.sqrt((a * a).sum() * (b * b).sum())
      assert cosine >= 0.9999, (name, cosine)


def check_empty(ours, start, end):
  """Checks empty intervals: out and dq exactly 0, lse -1e30."""
  t = start.shape[1]
  empty = np.minimum(end, t) <= np.maximum(start, 0)
  assert empty.sum() > t // 8
  out, lse, dq = (np.asarray(x, np.float32) for x in ours[:3])
  assert not out[empty].any() and not dq[empty].any()
  assert (lse.transpose(0, 2, 1)[empty] == -1e30).all()
