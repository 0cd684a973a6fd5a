"""Lowering of every kernel for every accelerator, without one."""

import functools

import jax
import jax.numpy as jnp
import pytest

from kernels import attention
from tests.kernels import lowering

B, T, S, N, K = 2, 256, 512, 4, 2
NAMES = ('flash_forward', 'flash_dq', 'flash_dkv', 'decode')


def program(backend, arrays):
  """Runs forward and backward, prefill over a cache, and decode."""
  call = functools.partial(attention.attention, scale=0.1, backend=backend)
  q, k, v, cache, ends = arrays
  out, vjp = jax.vjp(lambda *x: call(*x, ends, ends), q, k, v)
  prefill = attention.cached(
    q, cache, cache, ends, ends, scale=0.1, softcap=30.0, backend=backend
  )
  last = attention.decode(
    q[:, 0], cache, cache, ends[:, 0], ends[:, 0], scale=0.1, backend=backend
  )
  return vjp(out), prefill, last


targets = pytest.mark.parametrize(
  'backend, target',
  [('triton', 'h200'), ('mosaic_tpu', 'v5e'), ('mosaic_tpu', 'v6e')],
)


@targets
@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=str)
@pytest.mark.parametrize('h', [64, 128])
def test_every_kernel_lowers_to_a_custom_call(backend, target, dtype, h):
  shapes = [(B, T, N, h), (B, T, K, h), (B, T, K, h), (B, K, S, h)]
  arrays = [jax.ShapeDtypeStruct(shape, dtype) for shape in shapes]
  arrays.append(jax.ShapeDtypeStruct((B, T), jnp.int32))
  text = lowering.lower(
    functools.partial(program, backend), arrays, target=target
  )
  assert text.count(lowering.CUSTOM_CALLS[target]) == 5
  assert all(name in text for name in NAMES)


@targets
def test_decoding_over_an_int8_cache_lowers_to_a_custom_call(backend, target):
  def decode(q, k, scale, ends):
    options = {'scale': 0.1, 'backend': backend, 'scales': (scale, scale)}
    return attention.decode(q, k, k, ends, ends, **options)

  shape = jax.ShapeDtypeStruct
  text = lowering.lower(
    decode,
    shape((B, N, 128), jnp.bfloat16),
    shape((B, K, S, 128), jnp.int8),
    shape((B, K, S), jnp.float32),
    shape((B,), jnp.int32),
    target=target,
  )
  assert text.count(lowering.CUSTOM_CALLS[target]) == 1


@targets
def test_training_on_trees_lowers_to_custom_calls(backend, target):
  def program(x, ends):
    call = functools.partial(attention.attention, scale=0.1, backend=backend)
    return jax.grad(lambda x: call(x, x, x, *[ends] * 3).sum())(x)

  shape = jax.ShapeDtypeStruct
  x, ends = shape((B, T, K, 64), jnp.float32), shape((B, T), jnp.int32)
  text = lowering.lower(program, x, ends, target=target)
  assert text.count(lowering.CUSTOM_CALLS[target]) == 3
