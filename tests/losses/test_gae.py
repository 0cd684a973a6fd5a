"""GAE and the critic's loss: numbers by hand, a plain loop, torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.losses import gae, value


def _loop(rewards, values, last_value, gamma, gae_lambda):
  """GAE of one sequence of actions, from the sum over later deltas."""
  after = [*values[1:], last_value]
  deltas = [
    r + gamma * n - v for r, v, n in zip(rewards, values, after, strict=True)
  ]
  return [
    sum((gamma * gae_lambda) ** k * x for k, x in enumerate(deltas[t:]))
    for t in range(len(deltas))
  ]


def _advantages(*arrays, gamma=0.5, gae_lambda=0.5):
  return gae.advantages(
    *map(jnp.asarray, arrays), gamma=gamma, gae_lambda=gae_lambda
  )


# A row of an episode of two turns with a reply of a tool between them, an
# episode that a budget cut off, and a pad. The second row holds the same two
# the other way round.
MEMBER = np.array([0, 1, 1, 0, 1, 0, 1, 1, 0], bool)
SEGMENTS = np.array([1, 1, 1, 1, 1, 2, 2, 2, 0], np.int32)
REWARDS = np.array([9, 0, 1, 9, 2, 9, 0, 1, 9], np.float32)
VALUES = np.array([9, 4, 2, 9, 8, 9, 1, 2, 9], np.float32)
LAST = np.array([9, 9, 9, 9, 0, 9, 9, 4, 9], np.float32)
# gamma = lambda = 1/2, by hand. First: deltas 0 + 2/2 - 4 = -3,
# 1 + 8/2 - 2 = 3, 2 - 8 = -6; A = -6, 3 - 6/4 = 1.5, -3 + 1.5/4 = -2.625.
# Second: deltas 0 + 2/2 - 1 = 0, 1 + 4/2 - 2 = 1; A = 1, 0 + 1/4.
EXPECTED = np.array([0, -2.625, 1.5, 0, -6, 0, 0.25, 1, 0], np.float32)


def test_gae_of_turns_and_of_a_truncated_episode():
  arrays = REWARDS, VALUES, LAST, MEMBER, SEGMENTS
  np.testing.assert_array_equal(_advantages(*arrays), EXPECTED)
  order = np.r_[5:8, 0:5, 8]  # packed otherwise
  batch = [np.stack([x, x[order]])[None] for x in arrays]
  expected = np.stack([EXPECTED, EXPECTED[order]])[None]
  np.testing.assert_array_equal(_advantages(*batch), expected)


@pytest.mark.parametrize('gamma, gae_lambda', [(1, 1), (0.9, 0.95), (1, 0)])
def test_gae_equals_the_sum_of_later_deltas(gamma, gae_lambda):
  """Packed equals each sequence by itself; tokens between them take no time."""
  rng = np.random.default_rng(0)
  segments = np.repeat(np.arange(1, 6), 20).astype(np.int32)
  member = rng.random(100) < 0.6
  rewards, values, last = rng.normal(size=(3, 100)).astype(np.float32)
  actual = _advantages(
    rewards, values, last, member, segments, gamma=gamma, gae_lambda=gae_lambda
  )
  for segment in range(1, 6):
    here = np.flatnonzero(member & (segments == segment))
    expected = _loop(
      rewards[here], values[here], last[here[-1]], gamma, gae_lambda
    )
    np.testing.assert_allclose(actual[here], expected, rtol=2e-5, atol=1e-6)
  assert not np.asarray(actual)[~member].any()


def test_gae_without_values_is_the_reward_to_go_to_the_bit():
  rng = np.random.default_rng(1)
  rewards = (rng.random((4, 30)) < 0.2) * rng.normal(size=(4, 1))
  rewards = np.where(np.arange(30) == 29, rewards, 0).astype(np.float32)
  ones, zeros = np.ones_like(rewards, np.int32), np.zeros_like(rewards)
  actual = _advantages(
    rewards, zeros, zeros, ones > 0, ones, gamma=1.0, gae_lambda=1.0
  )
  np.testing.assert_array_equal(actual, np.repeat(rewards[:, -1:], 30, 1))


# By hand, with R = 1, clip 0.2: V = V_old = 0: 1/2. V_old = 0, V = 0.5: the
# clipped value is 0.2, (0.8)^2 / 2. V_old = 0, V = -1: 4/2 is larger. Weight 0.
V = np.array([0, 0.5, -1, np.nan], np.float32)
OLD = np.array([0, 0, 0, np.inf], np.float32)
WEIGHTS = np.array([1, 1, 2, 0], np.float32)


def test_value_loss():
  terms, metrics = value.loss(V, OLD, np.ones(4, 'f4'), WEIGHTS, clip=0.2)
  np.testing.assert_allclose(terms, [0.5, 0.32, 4, 0], rtol=1e-6)
  assert metrics['clip_fraction'][0].tolist() == [0, 1, 0, 0]
  terms, _ = value.loss(V, OLD, np.ones(4, 'f4'), WEIGHTS, clip=None)
  np.testing.assert_allclose(terms, [0.5, 0.125, 4, 0], rtol=1e-6)

  def total(v):
    return value.loss(v, OLD, jnp.ones(4), WEIGHTS, clip=0.2)[0].sum()

  # w (V - R); beyond the bound on the way to the return none.
  np.testing.assert_allclose(jax.grad(total)(V), [-1, 0, -4, 0])
  jax.test_util.check_grads(total, (jnp.array([0.1, 0.4, -1, 0.0]),), 1)


def test_value_loss_equals_torch():
  torch = pytest.importorskip('torch')
  rng = np.random.default_rng(2)
  v, old, returns = rng.normal(size=(3, 50)).astype(np.float32)
  x = torch.tensor(v, requires_grad=True)
  near = torch.clamp(x, torch.tensor(old) - 0.2, torch.tensor(old) + 0.2)
  errors = [(y - torch.tensor(returns)) ** 2 for y in (x, near)]
  expected = 0.5 * torch.max(*errors).sum()
  expected.backward()

  def total(v):
    return value.loss(v, old, returns, np.ones(50, 'f4'), clip=0.2)[0].sum()

  actual, grad = jax.value_and_grad(total)(v)
  np.testing.assert_allclose(actual, expected.item(), rtol=1e-5)
  np.testing.assert_allclose(grad, x.grad, rtol=1e-5, atol=1e-6)
