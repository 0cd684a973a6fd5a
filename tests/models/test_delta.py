"""Gated DeltaNet: each form against a loop over tokens in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posttrain.models import delta

KEYS, HEADS, SIZE, WIDTH = 2, 4, 8, 6
TAPS = 4


def make_inputs(rows=2, tokens=40, seed=0):
  """Returns q, k, v, g and beta, with correlated keys and strong decays."""
  rng = np.random.default_rng(seed)
  q, k = rng.normal(size=(2, rows, tokens, KEYS, SIZE)) + 0.7
  v = rng.normal(size=(rows, tokens, HEADS, WIDTH))
  g = -np.exp(rng.normal(size=(rows, tokens, HEADS)) * 2 - 2)
  beta = rng.uniform(size=(rows, tokens, HEADS))
  q, k = delta.normalize(jnp.asarray(q), jnp.asarray(k))
  return tuple(np.asarray(x, np.float32) for x in (q, k, v, g, beta))


def make_state(rows=2, seed=1):
  rng = np.random.default_rng(seed)
  return rng.normal(size=(rows, HEADS, SIZE, WIDTH)).astype(np.float32)


def loop(q, k, v, g, beta, state, xp=np):
  """The recurrence as it is written in the paper, in the inputs' dtype."""
  count = v.shape[2] // k.shape[2]
  q, k = xp.repeat(q, count, axis=2), xp.repeat(k, count, axis=2)
  out = []
  for t in range(q.shape[1]):
    state = xp.exp(g[:, t, :, None, None]) * state
    old = xp.einsum('bnk,bnkv->bnv', k[:, t], state)
    x = beta[:, t, :, None] * (v[:, t] - old)
    state = state + xp.einsum('bnk,bnv->bnkv', k[:, t], x)
    out.append(xp.einsum('bnk,bnkv->bnv', q[:, t], state))
  return xp.stack(out, axis=1), state


def exact(*args):
  return loop(*(np.asarray(x, np.float64) for x in args))


chunked = jax.jit(functools.partial(delta.chunked, chunk=16))
recurrent = jax.jit(delta.recurrent)
convolve = jax.jit(delta.convolve)


def test_recurrent_and_chunked_are_the_loop():
  *inputs, state = *make_inputs(), make_state()
  out, last = exact(*inputs, state)
  outputs, now = [], state
  for t in range(out.shape[1]):
    y, now = recurrent(*(x[:, t] for x in inputs), now)
    outputs.append(y)
  np.testing.assert_allclose(np.stack(outputs, 1), out, atol=3e-6)
  np.testing.assert_allclose(now, last, atol=3e-6)
  for function in (chunked, jax.jit(delta.chunked)):
    y, now = function(*inputs, state)
    np.testing.assert_allclose(y, out, atol=3e-6)
    np.testing.assert_allclose(now, last, atol=3e-6)


def test_strong_decays_lose_no_digits():
  """A difference of sums from the chunk's start would lose four of them."""
  q, k, v, g, beta = make_inputs()
  g = np.where(np.arange(40)[None, :, None] % 8 == 1, -1000, g * 0.01)
  inputs = q, k, v, g.astype(np.float32), beta, make_state()
  np.testing.assert_allclose(chunked(*inputs)[0], exact(*inputs)[0], atol=3e-6)


def test_equal_keys_that_are_overwritten():
  """The triangular system's inverse by powers alone would be 1e10 off."""
  q, k, v, g, beta = make_inputs(tokens=64)
  inputs = q, k[:, :1].repeat(64, 1), v, 0 * g, 0 * beta + 1
  out, _ = exact(*inputs, 0 * make_state())
  got = jax.jit(delta.chunked)(*inputs)[0]
  np.testing.assert_allclose(got, out, atol=3e-5)


def test_gradients():
  """Against differences of the loop in float64, of each input in turn."""
  args, rng = (*make_inputs(), make_state()), np.random.default_rng(3)
  weights = rng.normal(size=args[2].shape), make_state(seed=4)

  def total(function, *args):
    out, state = function(*args)
    return (weights[0] * out).sum() + (weights[1] * state).sum()

  function = jax.jit(functools.partial(total, chunked))
  gradient = jax.jit(jax.grad(function, tuple(range(6))))(*args)
  for i, x in enumerate(args):
    step = np.zeros_like(x, np.float64)
    step[...] = 1e-4 * rng.normal(size=x.shape)
    ends = [
      total(exact, *args[:i], x + sign * step, *args[i + 1 :])
      for sign in (1, -1)
    ]
    want = (ends[0] - ends[1]) / 2
    size = np.linalg.norm(gradient[i]) * np.linalg.norm(step)
    assert abs((gradient[i] * step).sum() - want) < 1e-5 * size, i
  check_grads(function, args, 1, ('rev',), 0.02, 0.02, 0.01)


def resets(g, positions):
  return np.where(positions[..., None] == 0, -np.inf, g).astype(np.float32)


def test_packed_segments_are_as_alone():
  """Whatever is before a segment, its outputs and gradients are the same."""
  q, k, v, g, beta = make_inputs()
  lengths = (5, 1, 19, 8, 7)
  positions = np.concatenate([np.arange(n) for n in lengths])[None]
  inputs = q, k, v, resets(g, positions), beta
  out, last = chunked(*inputs, make_state())
  start = 0
  for length in lengths:
    part = [x[:, start : start + length] for x in (q, k, v, g, beta)]
    alone, state = exact(*part, 0 * make_state())
    np.testing.assert_allclose(out[:, start : start + length], alone, atol=3e-6)
    start += length
  np.testing.assert_allclose(last, state, atol=3e-6)

  def tail(*args):
    out = chunked(*args)[0][:, 25:]
    return jnp.sum(out**2), out

  tail = jax.jit(jax.value_and_grad(tail, tuple(range(6)), has_aux=True))
  (_, want), gradients = tail(*inputs, make_state())
  for x in gradients:
    assert np.isfinite(x).all()
  for x in gradients[:5]:
    assert not np.any(x[:, :25]) and np.any(x[:, 26:])
  assert not np.any(gradients[5])
  changed = [x.copy() for x in inputs]
  for x in changed:
    x[:, 6:24] *= 0.5
  (_, out), _ = tail(*changed, 100 * make_state())
  np.testing.assert_array_equal(out, want)


def test_extended_in_two_calls_is_one_and_pads_change_nothing():
  inputs, zeros = make_inputs(), 0 * make_state()
  out, last = chunked(*inputs, zeros)
  state, pieces = zeros, []
  for start, stop in ((0, 13), (13, 40)):
    parts = []
    for x, fill in zip(inputs, (7.0, 7.0, 7.0, 0.0, 0.0), strict=True):
      part = np.full_like(x, fill)
      part[:, : stop - start] = x[:, start:stop]
      parts.append(part)
    y, state = chunked(*parts, state)
    pieces.append(y[:, : stop - start])
  np.testing.assert_allclose(np.concatenate(pieces, 1), out, atol=3e-6)
  np.testing.assert_allclose(state, last, atol=3e-6)


def make_channels(rows=2, tokens=11, seed=2):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(rows, tokens, 5)).astype(np.float32)
  return x, rng.normal(size=(TAPS, 5)).astype(np.float32)


def test_the_convolution_resets_and_extends():
  x, weight = make_channels()
  lengths = (2, 1, 4, 4)
  positions = np.tile(np.concatenate([np.arange(n) for n in lengths]), (2, 1))
  valid = np.ones_like(positions, bool)
  y, buffer = convolve(x, weight, positions, valid)
  want = np.zeros(x.shape)
  for t, lag in np.ndindex(11, TAPS):
    if lag <= positions[0, t]:
      want[:, t] += x[:, t - lag].astype(np.float64) * weight[TAPS - 1 - lag]
  np.testing.assert_allclose(y, want / (1 + np.exp(-want)), atol=1e-6)
  np.testing.assert_array_equal(buffer, x[:, -3:].swapaxes(1, 2))
  # In three calls, the second with a pad, the third of one token.
  pieces, buffer = [], None
  for start, stop, pads in ((0, 5, 0), (5, 10, 1), (10, 11, 0)):
    part, place, keep = (
      np.array(a[:, start:stop]) for a in (x, positions, valid)
    )
    part = np.pad(part, ((0, 0), (0, pads), (0, 0)), constant_values=9.0)
    place, keep = (np.pad(a, ((0, 0), (0, pads))) for a in (place, keep))
    out, buffer = convolve(part, weight, place, keep, buffer)
    pieces.append(out[:, : stop - start])
  np.testing.assert_array_equal(np.concatenate(pieces, 1), y)
  np.testing.assert_array_equal(buffer, x[:, -3:].swapaxes(1, 2))


def test_a_pad_leaves_buffer_and_state():
  x, weight = make_channels(tokens=1)
  positions, pad = np.full((2, 1), 3), np.zeros((2, 1), bool)
  old = make_channels(tokens=3, seed=3)[0].swapaxes(1, 2)
  np.testing.assert_array_equal(
    convolve(x, weight, positions, pad, old)[1], old
  )
  q, k, v, _, _ = (y[:, :1] for y in make_inputs())
  a = np.ones((2, 1, HEADS), np.float32)
  g, beta = delta.gates(a, a, a[0, 0], a[0, 0], positions, pad)
  state = make_state()
  for function in (
    lambda: recurrent(*(y[:, 0] for y in (q, k, v, g, beta)), state),
    lambda: jax.jit(delta.chunked)(q, k, v, g, beta, state),
  ):
    np.testing.assert_array_equal(function()[1], state)


def test_a_first_token_drops_the_old_state():
  q, k, v, _, _ = (y[:, 0] for y in make_inputs())
  a, first = np.ones((2, 1, HEADS), np.float32), np.zeros((2, 1), np.int32)
  g, beta = delta.gates(a, a, a[0, 0], a[0, 0], first, first == 0)
  g, beta = g[:, 0], beta[:, 0]
  state = make_state()
  out, new = recurrent(q, k, v, g, beta, state)
  clean, fresh = recurrent(q, k, v, g, beta, 0 * state)
  np.testing.assert_array_equal(out, clean)
  np.testing.assert_array_equal(new, fresh)


@pytest.mark.slow
@pytest.mark.parametrize('seed', range(3))
def test_functions_are_those_of_transformers(seed):
  """Norms, gates, convolution and both forms, of Qwen3.5's modules."""
  torch = pytest.importorskip('torch')
  module = pytest.importorskip('transformers.models.qwen3_5.modeling_qwen3_5')
  rng = np.random.default_rng(seed)

  def draw(*shape):
    return rng.normal(size=shape).astype(np.float32)

  x, weight, z = draw(2, 70, 5), draw(TAPS, 5), draw(2, 70, HEADS, WIDTH)
  positions = np.tile(np.arange(70), (2, 1))
  valid = np.ones_like(positions, bool)
  got, _ = convolve(x, weight, positions, valid)
  want = module.causal_conv1d_fn(
    torch.tensor(x.swapaxes(1, 2)), torch.tensor(weight.T), activation='silu'
  )
  np.testing.assert_allclose(got, want.numpy().swapaxes(1, 2), atol=2e-6)
  q, k, v = draw(2, 70, KEYS, SIZE), draw(2, 70, KEYS, SIZE), z + 1
  a, b, rate, bias = draw(2, 70, HEADS), draw(2, 70, HEADS), draw(4), draw(4)
  g, beta = delta.gates(a, b, rate, bias, positions, valid)
  tensors = [torch.tensor(y) for y in (q, k, v)]
  softplus = torch.nn.functional.softplus(torch.tensor(a + bias))
  their_g = -torch.tensor(rate).exp() * softplus
  np.testing.assert_allclose(g[:, 1:], their_g[:, 1:].numpy(), rtol=2e-6)
  for function in (
    module.torch_chunk_gated_delta_rule,
    module.torch_recurrent_gated_delta_rule,
  ):
    want, state = function(
      *tensors,
      their_g,
      torch.tensor(b).sigmoid(),
      output_final_state=True,
      use_qk_l2norm_in_kernel=True,
    )
    got, last = jax.jit(delta.chunked)(*delta.normalize(q, k), v, g, beta)
    np.testing.assert_allclose(got, want.numpy(), atol=3e-6)
    np.testing.assert_allclose(last, state.numpy(), atol=3e-6)
  norm = module.Qwen3_5RMSNormGated(WIDTH, 1e-5)
  scale = draw(WIDTH)
  norm.weight.data = torch.tensor(scale)
  want = norm(torch.tensor(v), torch.tensor(z)).detach().numpy()
  np.testing.assert_allclose(
    delta.gated_norm(v, z, scale, 1e-5), want, atol=3e-6
  )
