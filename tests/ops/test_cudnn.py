"""Masks and paddings for cuDNN, with XLA in its place where there is no GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels import reference
from posttrain.ops import attention, cudnn
from tests.kernels import inputs

N, K, H = 4, 2, 16
B = len(inputs.KINDS)


def run(fn, arrays, g, ends):
  @jax.jit
  def call(arrays, g):
    out, vjp = jax.vjp(lambda *x: fn(*x, *ends, scale=0.25), *arrays)
    return out, *vjp(g)

  return [np.asarray(x, np.float32) for x in call(arrays, g)]


def compare(fn, t, dtype, bound):
  shapes = ((B, t, N, H), (B, t, K, H), (B, t, K, H), (B, t, N, H))
  *arrays, g = inputs.draw(0, *shapes, dtype=dtype)
  ends = inputs.every_kind(t)
  ours = run(fn, arrays, g, ends)
  exact = [x.astype(jnp.float32) for x in arrays], g.astype(jnp.float32)
  expected = run(reference.attention, *exact, ends)
  for a, b in zip(ours, expected, strict=True):
    np.testing.assert_allclose(a, b, atol=bound * np.abs(b).max())
  start, end = (np.asarray(x) for x in ends)
  empty = np.maximum(start, 0) >= np.minimum(end, t)
  assert empty.any() and not ours[0][empty].any() and not ours[1][empty].any()


@pytest.mark.parametrize('t', [24, 31])
def test_masks_and_padding_are_those_of_the_intervals(t, monkeypatch):
  """Odd lengths are padded; an empty interval gives 0 and no gradient."""
  compute = jax.nn.dot_product_attention

  def xla(q, k, v, *, implementation, **options):
    assert implementation == 'cudnn' and q.shape[1] % 2 == k.shape[1] % 2 == 0
    return compute(q, k, v, implementation='xla', **options)

  monkeypatch.setattr(jax.nn, 'dot_product_attention', xla)
  compare(cudnn.attention, t, jnp.float32, 1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize('t', [256, 301])
def test_matches_oracle_on_a_gpu(t):
  compare(
    functools.partial(attention.attention, impl='cudnn'), t, jnp.bfloat16, 2e-2
  )


@pytest.mark.parametrize(
  'head_dim, dtype, softcap, message',
  [
    (64, jnp.bfloat16, None, None),
    (64, jnp.float32, None, 'dtype must be bfloat16 or float16: got float32'),
    (64, jnp.bfloat16, 30.0, 'attention_softcap must be None: got 30.0'),
    (512, jnp.bfloat16, None, 'multiple of 8 up to 256: got 512'),
  ],
)
def test_unsupported_arguments_are_named(head_dim, dtype, softcap, message):
  reason = cudnn.unsupported(head_dim, jnp.dtype(dtype), softcap)
  assert reason is None if message is None else message in (reason or '')
