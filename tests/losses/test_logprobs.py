import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posttrain.losses import logprobs

T, D, V = 13, 6, 50

linear = jax.jit(
  logprobs.linear, static_argnames=('softcap', 'vocab_chunk', 'row_chunk')
)


def make_inputs(seed=0, n=T, d=D, v=V, dtype=jnp.float32):
  keys = jax.random.split(jax.random.key(seed), 4)
  hidden = jax.random.normal(keys[0], (n, d)).astype(dtype)
  weight = jax.random.normal(keys[1], (d, v)) / np.sqrt(d)
  targets = jax.random.randint(keys[2], (n,), 0, v)
  temperature = jax.random.uniform(keys[3], (n,), minval=0.5, maxval=2.0)
  return hidden, weight, targets, temperature


def naive(hidden, weight, targets, temperature, softcap=None):
  """Returns (logprobs, entropy) from the full logits."""
  logits = hidden.astype(jnp.float32) @ weight
  if softcap is not None:
    logits = softcap * jnp.tanh(logits / softcap)
  logits = logits / jnp.broadcast_to(temperature, targets.shape)[..., None]
  log_probs = jax.nn.log_softmax(logits)
  chosen = jnp.take_along_axis(log_probs, targets[..., None], axis=-1)
  return chosen[..., 0], -jnp.sum(jnp.exp(log_probs) * log_probs, axis=-1)


def test_logprobs_by_hand():
  # Logits log 2, 0, 0 under h = 1: probabilities 1/2, 1/4, 1/4.
  weight = jnp.log(jnp.array([[2.0, 1.0, 1.0]]))
  out = linear(jnp.ones((2, 1)), weight, jnp.array([0, 2]))
  np.testing.assert_allclose(out[0], np.log([0.5, 0.25]), rtol=1e-6)
  np.testing.assert_allclose(out[1], [1.5 * np.log(2)] * 2, rtol=1e-6)
  # At T = 1/2 the weights are squared: 4/6, 1/6, 1/6.
  out = linear(jnp.ones((2, 1)), weight, jnp.array([0, 2]), 0.5)
  np.testing.assert_allclose(out[0], np.log([4 / 6, 1 / 6]), rtol=1e-6)


def test_the_largest_logit_by_hand():
  """Ties count; the blocks do not matter."""
  weight = jnp.array([[1.0, 3.0, 2.0, 3.0], [0.0, -1.0, 5.0, 0.0]])
  hidden = jnp.array([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
  targets = jnp.array([1, 3, 2, 2])
  expected = [True, True, False, True]
  fn = functools.partial(logprobs.linear, reads_top=True)
  assert fn(hidden, weight, targets)[2].tolist() == expected
  for chunks in {'vocab_chunk': 3}, {'row_chunk': 3}:
    shaped = hidden.reshape(2, 2, 2), weight, targets.reshape(2, 2)
    assert fn(*shaped, **chunks)[2].reshape(-1).tolist() == expected


def test_equal_logits_give_the_uniform_distribution():
  out = linear(jnp.zeros((3, 2)), jnp.zeros((2, V)), jnp.arange(3))
  np.testing.assert_allclose(out[0], [-np.log(V)] * 3, rtol=1e-6)
  np.testing.assert_allclose(out[1], [np.log(V)] * 3, rtol=1e-6)


@functools.cache
def values_and_gradients(fn, softcap, **chunks):
  hidden, weight, targets, temperature = make_inputs()
  cotangents = tuple(jax.random.normal(jax.random.key(5), (2, T)))

  def call(h, w):
    return fn(h, w, targets, temperature, softcap=softcap, **chunks)

  @jax.jit
  def both(h, w):
    out, vjp = jax.vjp(call, h, w)
    return *out, *vjp(cotangents)

  return both(hidden, weight)


CHUNKS = [
  {},
  {'vocab_chunk': 16},
  {'row_chunk': 5},
  {'vocab_chunk': 7, 'row_chunk': 4},
  {'vocab_chunk': 99, 'row_chunk': 99},
]


@pytest.mark.parametrize('softcap', [None, 1.5])
@pytest.mark.parametrize('chunks', CHUNKS)
def test_matches_formula(chunks, softcap):
  ours = values_and_gradients(linear, softcap, **chunks)
  for a, b in zip(ours, values_and_gradients(naive, softcap), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5 * np.abs(b).max())


@pytest.mark.parametrize('chunks', [{}, {'vocab_chunk': 16, 'row_chunk': 5}])
@pytest.mark.parametrize('output', [0, 1])
def test_gradients_by_finite_differences(chunks, output):
  hidden, weight, targets, _ = make_inputs(n=7, v=20)
  check_grads(
    lambda h, w: linear(h, w, targets, 1.3, softcap=2.0, **chunks)[output],
    (hidden, weight),
    order=1,
    modes=['rev'],
    atol=1e-2,
    rtol=1e-2,
  )


def test_leading_dimensions():
  hidden, weight, targets, temperature = make_inputs(n=12)
  flat = linear(hidden, weight, targets, temperature)
  shaped = linear(
    hidden.reshape(3, 4, D),
    weight,
    targets.reshape(3, 4),
    temperature.reshape(3, 4),
  )
  for a, b in zip(shaped, flat, strict=True):
    assert a.shape == (3, 4)
    np.testing.assert_array_equal(a.reshape(12), b)


def test_temperature_gets_no_gradient():
  hidden, weight, targets, temperature = make_inputs()
  grad = jax.grad(lambda t: sum(linear(hidden, weight, targets, t)).sum())(
    temperature
  )
  assert not grad.any()


@pytest.mark.parametrize('chunks', [{}, {'vocab_chunk': 16}])
def test_bfloat16_hidden(chunks):
  hidden, weight, targets, _ = make_inputs(dtype=jnp.bfloat16)

  def grads(fn, weight, **kwargs):
    def total(h, w):
      return fn(h, w, targets, 1.0, **kwargs)[0].sum()

    return jax.jit(jax.grad(total, (0, 1)))(hidden, weight)

  out = linear(hidden, weight, targets, **chunks)
  assert out[0].dtype == out[1].dtype == jnp.float32
  rounded = weight.astype(jnp.bfloat16).astype(jnp.float32)
  for a, b in zip(out, naive(hidden, rounded, targets, 1.0), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-5)
  ours, expected = grads(linear, weight, **chunks), grads(naive, rounded)
  assert ours[0].dtype == jnp.bfloat16 and ours[1].dtype == jnp.float32
  for a, b in zip(ours, expected, strict=True):
    a, b = a.astype(np.float32), b.astype(np.float32)
    np.testing.assert_allclose(a, b, atol=2e-2 * np.abs(b).max())


def test_large_logits_stay_finite():
  hidden, weight, targets, _ = make_inputs()
  for chunks in CHUNKS[:2]:
    call = functools.partial(linear, **chunks)
    out = call(1e4 * hidden, weight, targets)
    assert jnp.isfinite(out[0]).all() and jnp.isfinite(out[1]).all()


def temp_bytes(fn, inputs):
  def loss(hidden, weight, targets):
    return fn(hidden, weight, targets, 1.0)[0].sum()

  grad = jax.jit(jax.grad(loss, (0, 1)))
  stats = grad.lower(*inputs[:3]).compile().memory_analysis()
  return stats.temp_size_in_bytes


def test_chunks_save_memory():
  n, d, v = 1024, 16, 32768
  inputs = make_inputs(n=n, d=d, v=v)
  fn = functools.partial(logprobs.linear, vocab_chunk=1024)
  chunked = temp_bytes(fn, inputs)
  plain = temp_bytes(naive, inputs)
  automatic = temp_bytes(logprobs.linear, inputs)
  assert plain >= 4 * n * v
  assert chunked < plain / 12
  assert automatic < 2 * 2**26 + 4 * d * v


def test_many_tokens_are_chunked(monkeypatch):
  n, d, v = 16384, 8, 1024
  limit, columns = 2**20, 128
  monkeypatch.setattr(logprobs, 'BLOCK_BYTES', limit)
  monkeypatch.setattr(logprobs, '_MIN_CHUNK', columns)
  inputs = make_inputs(n=n, d=d, v=v)
  fn = functools.partial(logprobs.linear, vocab_chunk=columns)
  assert temp_bytes(fn, inputs) >= 4 * n * columns == 8 * limit
  assert temp_bytes(logprobs.linear, inputs) < 5 * limit


def test_default_chunks():
  assert logprobs._default_chunks(1024, 16384) == (16384, 1024)  # 64 MiB
  assert logprobs._default_chunks(1024, 151_936) == (16384, 1024)
  assert logprobs._default_chunks(8192, 151_936) == (2048, 8192)
  assert logprobs._default_chunks(65_536, 151_936) == (2048, 8192)
  assert logprobs._default_chunks(65_536, 256) == (256, 65_536)
