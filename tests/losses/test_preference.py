"""Preference losses: golden numbers, identities, limits, finite differences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posttrain.losses import preference
from tests.losses import helpers

# h of three pairs.
CHOSEN = jnp.array([1.0, -2.0, 0.5])
REJECTED = jnp.array([-1.0, -1.0, 0.5])
PAIRED = {
  'sigmoid': functools.partial(helpers.sigmoid, beta=0.5),
  'smoothed': functools.partial(helpers.sigmoid, beta=0.5, label_smoothing=0.2),
  'ipo': functools.partial(preference.ipo, beta=0.5),
  'simpo': functools.partial(helpers.simpo, beta=0.5, gamma=0.3),
}


def log_sigmoid(x):
  return -np.log1p(np.exp(-np.asarray(x, np.float64)))


@pytest.mark.parametrize(
  ('name', 'expected'),
  [
    # d = 1, -0.5, 0
    ('sigmoid', [0.31326169, 0.97407698, 0.69314718]),
    (
      'smoothed',
      [
        0.8 * 0.31326169 + 0.2 * 1.31326169,
        0.8 * 0.97407698 + 0.2 * 0.47407698,
        0.69314718,
      ],
    ),
    ('ipo', [1.0, 4.0, 1.0]),  # 2 - 1, -1 - 1, 0 - 1, squared
    ('simpo', [0.40318605, 1.17110067, 0.85435524]),  # d = 0.7, -0.8, -0.3
  ],
)
def test_golden(name, expected):
  np.testing.assert_allclose(
    PAIRED[name](CHOSEN, REJECTED), expected, rtol=1e-6
  )


def test_golden_kto():
  """Gains -0.5, 0.5, 0.25 around z = 1, in the middle one undesirable."""
  h, desirable = jnp.array([0.0, 2.0, 1.5]), jnp.array([True, False, True])
  np.testing.assert_allclose(
    helpers.kto(
      h, desirable, 1.0, beta=0.5, desirable_weight=2.0, undesirable_weight=3.0
    ),
    [2 * 0.62245933, 3 * 0.62245933, 2 * 0.43782350],
    rtol=1e-6,
  )


@pytest.mark.parametrize('name', PAIRED)
def test_gradients_by_finite_differences(name):
  check_grads(
    lambda c, r: PAIRED[name](c, r).sum(),
    (CHOSEN, REJECTED),
    order=1,
    modes=('rev',),
    eps=1e-2,
    atol=2e-3,
    rtol=2e-3,
  )


def test_gradients_of_kto_by_finite_differences():
  desirable = jnp.array([True, False, True])
  mask = jnp.array([[1, 1, 0], [0, 1, 1], [1, 1, 1]], bool)
  logprobs = -jnp.arange(1.0, 10.0).reshape(3, 3) / 4

  def loss(x):
    h = jnp.sum(jnp.where(mask, x, 0.0), axis=-1)
    return helpers.kto(h, desirable, 0.1, beta=0.5).sum()

  check_grads(
    loss, (logprobs,), order=1, modes=('rev',), eps=1e-2, atol=2e-3, rtol=2e-3
  )


def test_losses_of_a_policy_equal_to_the_reference():
  """d = 0: log 2, with gradients of +-beta / 2; KTO: half of the weight."""
  zero = jnp.zeros(4)
  for smoothing in (0.0, 0.3):
    losses = helpers.sigmoid(zero, zero, label_smoothing=smoothing)
    np.testing.assert_allclose(losses, np.log(2), rtol=1e-6)
  grads = jax.grad(
    lambda c, r: helpers.sigmoid(c, r, beta=0.4).sum(), argnums=(0, 1)
  )(zero, zero)
  np.testing.assert_allclose(grads[0], -0.2, rtol=1e-6)
  np.testing.assert_allclose(grads[1], 0.2, rtol=1e-6)
  baseline = preference.kto_baseline(zero, zero == 0)
  halves = helpers.kto(zero, jnp.array([1, 0, 1, 0], bool), baseline)
  np.testing.assert_allclose(halves, 0.5)


@pytest.mark.parametrize('beta', [1e-3, 1e-6])
@pytest.mark.parametrize('function', [helpers.sigmoid, helpers.simpo])
def test_the_gradient_vanishes_with_beta(function, beta):
  grad = jax.grad(lambda c: function(c, REJECTED, beta=beta).sum())(CHOSEN)
  assert 0 < np.abs(grad).max() < beta


def test_smoothing_is_the_mean_of_both_labels():
  both = [
    helpers.sigmoid(*pair, beta=0.5)
    for pair in ((CHOSEN, REJECTED), (REJECTED, CHOSEN))
  ]
  np.testing.assert_allclose(
    PAIRED['smoothed'](CHOSEN, REJECTED),
    0.8 * both[0] + 0.2 * both[1],
    rtol=1e-6,
  )


def test_ipo_has_no_gradient_at_its_margin():
  beta = 0.25  # the margin is 2
  grad = jax.grad(lambda c: preference.ipo(c, jnp.zeros(3), beta=beta).sum())
  np.testing.assert_allclose(grad(jnp.array([1.0, 2.0, 3.0])), [-2, 0, 2])


def test_limits_of_kto():
  """h far above z: 0 for a desirable answer; far below z: the weight."""
  far = jnp.array([1e4, -1e4, 1e4, -1e4])
  desirable = jnp.array([True, True, False, False])
  options = dict(desirable_weight=2.0, undesirable_weight=3.0)
  np.testing.assert_allclose(
    helpers.kto(far, desirable, 0.0, **options), [0, 2, 3, 0], atol=1e-6
  )
  grad = jax.grad(lambda h: helpers.kto(h, desirable, 0.0, **options).sum())
  np.testing.assert_array_equal(grad(far), np.zeros(4))  # saturated
  near = grad(jnp.zeros(4))
  assert (np.sign(near) == [-1, -1, 1, 1]).all()
  # The baseline has no gradient, and is not below 0.
  h, where = jnp.array([1.0, 2.0, jnp.nan]), jnp.array([True, True, False])
  assert preference.kto_baseline(h, where) == 1.5
  assert preference.kto_baseline(-h, where) == 0
  assert preference.kto_baseline(h, jnp.zeros(3, bool)) == 0
  assert jax.grad(lambda z: helpers.kto(CHOSEN, CHOSEN > 0, z).sum())(0.3) == 0


@pytest.mark.parametrize('name', ['sigmoid', 'smoothed', 'simpo'])
def test_large_log_ratios_stay_finite(name):
  far = jnp.array([1e6, -1e6])
  value, grad = jax.value_and_grad(lambda c: PAIRED[name](c, -c).sum())(far)
  assert np.isfinite(value) and np.isfinite(grad).all()
