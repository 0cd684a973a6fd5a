"""Schedules, decay mask and clipping, against literal numbers."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema
from posttrain.training import optim


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    ('constant', [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]),
    ('linear', [0.25, 0.5, 0.75, 1, 1, 0.8, 0.6, 0.4, 0.2]),
    # (1 + cos(pi / 4)) / 2 = 0.853553, of the way from 0.2 to 1.
    ('cosine', [0.25, 0.5, 0.75, 1, 1, 0.882843, 0.6, 0.317157, 0.2]),
  ],
)
def test_schedule_values(name, expected):
  cfg = schema.Optim(
    lr=1.0, schedule=name, warmup_steps=4, final_lr_fraction=0.2
  )
  rate = optim.schedule(name, optim.numbers(cfg, steps=8))
  values = [float(rate(step)) for step in range(9)]
  np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize(
  ('warmup', 'expected'), [(0, [1.0, 0.75, 0.5]), (1, [1.0, 1.0, 2 / 3])]
)
def test_short_warm_ups(warmup, expected):
  cfg = schema.Optim(lr=1.0, schedule='linear', warmup_steps=warmup)
  rate = optim.schedule(cfg.schedule, optim.numbers(cfg, steps=4))
  values = [float(rate(step)) for step in range(3)]
  np.testing.assert_allclose(values, expected, atol=1e-6)


def _steps(cfg, params, *gradients):
  """The updates of successive gradients, and the last state."""
  optimizer = optim.make(cfg, steps=10)
  state, all_updates = optimizer.init(params), []
  for gradient in gradients:
    updates, state = optimizer.update(gradient, state, params)
    all_updates.append(updates)
  return all_updates, state


def test_norm_scales_and_biases_are_not_decayed():
  # The first step of Adam is -lr sign(g); decay adds -lr * 0.1 * weight.
  cfg = schema.Optim(lr=0.01, schedule='constant', weight_decay=0.1)
  params = {
    'mlp': {'kernel': jnp.full((1, 2), 3.0), 'bias': jnp.full(2, 3.0)},
    'norm': {'scale': jnp.full(2, 3.0)},
  }
  gradient = {
    'mlp': {'kernel': jnp.array([[0.1, -0.1]]), 'bias': jnp.full(2, 0.1)},
    'norm': {'scale': jnp.full(2, -0.1)},
  }
  (updates,), state = _steps(cfg, params, gradient)
  np.testing.assert_allclose(
    updates['mlp']['kernel'], [[-0.013, 0.007]], rtol=1e-5
  )
  np.testing.assert_allclose(updates['mlp']['bias'], [-0.01] * 2, rtol=1e-5)
  np.testing.assert_allclose(updates['norm']['scale'], [0.01] * 2, rtol=1e-5)
  np.testing.assert_allclose(optim.learning_rate(state), 0.01)


def test_second_update_by_hand():
  # m = 0.9 * 0.05 + 0.1 * 1 = 0.145, over 1 - 0.9^2 = 0.19:     0.763158
  # v = 0.95 * 0.0125 + 0.05 * 1 = 0.061875, over 0.0975:        0.634615
  cfg = schema.Optim(lr=0.1, schedule='constant', weight_decay=0.0)
  (_, second), _ = _steps(
    cfg,
    {'kernel': jnp.zeros(1)},
    {'kernel': jnp.array([0.5])},
    {'kernel': jnp.array([1.0])},
  )
  expected = -0.1 * 0.763158 / np.sqrt(0.634615)
  np.testing.assert_allclose(second['kernel'], [expected], rtol=1e-5)


@pytest.mark.parametrize(
  ('scale', 'expected'), [(1.0, [0.3, 0.4]), (0.05, [0.15, 0.2])]
)
def test_clips_by_the_norm_of_all_gradients(scale, expected):
  # (3, 4) has norm 5: above the limit 0.5 it shrinks tenfold, below not.
  cfg = schema.Optim(schedule='constant', clip_norm=0.5)
  params = {'a': jnp.zeros(1), 'b': jnp.zeros(1)}
  gradient = {'a': jnp.array([3.0 * scale]), 'b': jnp.array([4.0 * scale])}
  _, state = _steps(cfg, params, gradient)
  mean = state[1].inner_state[0].mu  # 1 - beta1 of what was clipped
  seen = [float(mean['a'][0]) / 0.1, float(mean['b'][0]) / 0.1]
  np.testing.assert_allclose(seen, expected, rtol=1e-5)


def test_a_critic_has_a_schedule_and_a_clipping_of_its_own():
  """The policy waits for 2 updates, then begins its own schedule."""
  cfg = schema.Optim(lr=0.1, schedule='constant', weight_decay=0.0)
  critic = schema.Critic(
    kind='head', lr=0.2, lr_warmup_steps=4, clip_norm=0.5, warmup_steps=2
  )
  optimizer = optim.make_all(cfg, critic, steps=10)
  params = {'kernel': jnp.zeros(1), 'critic': {'reward': jnp.zeros(1)}}
  gradient = {'kernel': jnp.ones(1), 'critic': {'reward': jnp.full(1, 5.0)}}
  state, moved = optimizer.init(params), []
  for _ in range(4):
    update, state = optimizer.update(gradient, state, params)
    moved.append((update['kernel'][0], update['critic']['reward'][0]))
  expected = [(0, -0.05), (0, -0.1), (-0.1, -0.15), (-0.1, -0.2)]
  np.testing.assert_allclose(moved, expected, rtol=1e-5)
  # Of equal gradients the mean is (1 - beta1^4) times the clipped one.
  mean = _moments(state['critic'])[0]['reward'][0]
  np.testing.assert_allclose(mean, 0.5 * (1 - 0.9**4), rtol=1e-5)


def _moments(state):
  adam = state[1].inner_state[0]
  return adam.mu, adam.nu


def test_bfloat16_moments_are_the_float32_ones_rounded_after_each_update():
  cfg = schema.Optim(schedule='constant', moments_dtype='bfloat16')
  params = {'kernel': jnp.linspace(-1.0, 1.0, 5)}
  gradients = [{'kernel': jnp.sin(jnp.arange(5.0) + 0.1 * i)} for i in range(4)]
  exact = optim.make(dataclasses.replace(cfg, moments_dtype='float32'), 10)
  optimizer = optim.make(cfg, 10)
  state, wide = optimizer.init(params), exact.init(params)
  assert all(x['kernel'].dtype == jnp.bfloat16 for x in _moments(state))
  for gradient in gradients:
    change, state = optimizer.update(gradient, state, params)
    expected, wide = exact.update(gradient, wide, params)
    np.testing.assert_array_equal(change['kernel'], expected['kernel'])
    rounded = [x['kernel'].astype(jnp.bfloat16) for x in _moments(wide)]
    for moment, value in zip(_moments(state), rounded, strict=True):
      np.testing.assert_array_equal(moment['kernel'], value)
    # The next update starts from the rounded moments.
    adam = wide[1].inner_state[0]
    mu, nu = ({'kernel': x.astype(jnp.float32)} for x in rounded)
    inner = (adam._replace(mu=mu, nu=nu), *wide[1].inner_state[1:])
    wide = (wide[0], wide[1]._replace(inner_state=inner))


def test_bfloat16_moments_follow_the_float32_trajectory():
  """A regression, 300 updates: as good in the end, and close to it."""
  rng = np.random.default_rng(0)
  inputs = jnp.asarray(rng.normal(size=(256, 32)), jnp.float32)
  truth = jnp.asarray(rng.normal(size=32), jnp.float32)
  draws = jnp.asarray(rng.integers(0, 256, (300, 16)))

  def train(dtype):
    cfg = schema.Optim(lr=0.05, weight_decay=0.0, moments_dtype=dtype)
    optimizer = optim.make(cfg, steps=300)

    def update(carry, rows):
      params, state = carry
      error, gradient = jax.value_and_grad(
        lambda w: jnp.mean((inputs[rows] @ (w - truth)) ** 2)
      )(params)
      change, state = optimizer.update(gradient, state, params)
      return (params + change, state), error

    start = jnp.zeros(32), optimizer.init(jnp.zeros(32))
    (params, _), errors = jax.jit(lambda: jax.lax.scan(update, start, draws))()
    return np.asarray(params), np.asarray(errors)

  exact, errors = train('float32')
  rounded, rounded_errors = train('bfloat16')
  assert errors[0] > 10 and errors[-1] < 1e-4 and rounded_errors[-1] < 1e-4
  np.testing.assert_allclose(rounded_errors[:50], errors[:50], rtol=0.1)
  np.testing.assert_allclose(rounded, exact, atol=2e-3)


@pytest.mark.parametrize(
  ('dtype', 'lowest', 'highest'),
  [('float32', 0.9999, 1.0), ('bfloat16', 0.61, 0.81)],
)
def test_small_changes_of_bfloat16_moments_are_lost(dtype, lowest, highest):
  """With b = 0.99 the mean of a constant 1 stays 2^-8 / 0.01 m below it."""
  cfg = schema.Optim(beta1=0.99, clip_norm=1e6, moments_dtype=dtype)
  optimizer = optim.make(cfg, steps=10)
  params, gradient = {'kernel': jnp.zeros(1)}, {'kernel': jnp.ones(1)}
  state = jax.lax.fori_loop(
    0,
    2000,
    lambda _, state: optimizer.update(gradient, state, params)[1],
    optimizer.init(params),
  )
  assert lowest < float(_moments(state)[0]['kernel'][0]) <= highest


def test_bfloat16_moments_halve_the_state():
  params = {'kernel': jnp.zeros((8, 16)), 'bias': jnp.zeros(16)}

  def size(dtype):
    cfg = schema.Optim(moments_dtype=dtype)
    moments = _moments(optim.make(cfg, steps=10).init(params))
    return sum(x.nbytes for x in jax.tree.leaves(moments))

  assert size('float32') == 2 * 4 * 144 and size('bfloat16') == 2 * 2 * 144


@pytest.mark.parametrize('field', ['beta1', 'beta2'])
def test_decays_that_bfloat16_rounds_away_are_refused(field):
  assert schema.Optim(**{field: 0.99}, moments_dtype='bfloat16')
  assert schema.Optim(**{field: 0.999})
  with pytest.raises(schema.FieldError, match=f'{field} must be at most 0.99'):
    schema.Optim(**{field: 0.999}, moments_dtype='bfloat16')
