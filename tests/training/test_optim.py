"""Schedules, decay mask and clipping, against literal numbers."""

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
  rate = optim.schedule(cfg, steps=8)
  values = [float(rate(step)) for step in range(9)]
  np.testing.assert_allclose(values, expected, atol=1e-6)


@pytest.mark.parametrize(
  ('warmup', 'expected'), [(0, [1.0, 0.75, 0.5]), (1, [1.0, 1.0, 2 / 3])]
)
def test_short_warm_ups(warmup, expected):
  cfg = schema.Optim(lr=1.0, schedule='linear', warmup_steps=warmup)
  rate = optim.schedule(cfg, steps=4)
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
