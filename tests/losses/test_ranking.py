"""The reward model's loss: golden numbers, symmetry, finite differences."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.test_util import check_grads

from tests.losses import helpers

CHOSEN = jnp.array([1.0, -0.5, 0.5])
REJECTED = jnp.array([0.0, 0.5, 0.5])


def test_golden():
  np.testing.assert_allclose(
    helpers.ranking(CHOSEN, REJECTED),
    [0.31326169, 1.31326169, 0.69314718],
    rtol=1e-6,
  )
  np.testing.assert_allclose(
    helpers.ranking(
      CHOSEN, REJECTED, margins=jnp.array([1.0, -1.0, 0.0]), center_coef=0.1
    ),
    np.log(2) + 0.1 * np.array([1.0, 0.0, 1.0]),
    rtol=1e-6,
  )


def test_swapping_the_answers_is_antisymmetric():
  """L(c, r) - L(r, c) = -(c - r), with opposite gradients."""
  forward, backward = (
    helpers.ranking(*pair) for pair in ((CHOSEN, REJECTED), (REJECTED, CHOSEN))
  )
  np.testing.assert_allclose(forward - backward, REJECTED - CHOSEN, atol=1e-6)
  grads = jax.grad(lambda c, r: helpers.ranking(c, r).sum(), argnums=(0, 1))
  chosen, rejected = grads(CHOSEN, REJECTED)
  np.testing.assert_allclose(chosen, -rejected, rtol=1e-6)


def test_only_center_coef_has_a_gradient_in_a_common_shift():
  np.testing.assert_allclose(
    helpers.ranking(CHOSEN + 7, REJECTED + 7),
    helpers.ranking(CHOSEN, REJECTED),
    rtol=1e-5,
  )
  shift = jax.grad(
    lambda k: helpers.ranking(CHOSEN + k, REJECTED + k, center_coef=0.1).sum()
  )
  assert shift(7.0) > 0 > shift(-7.0)


def test_gradients_by_finite_differences():
  check_grads(
    lambda c, r: helpers.ranking(c, r, margins=0.3, center_coef=0.1).sum(),
    (CHOSEN, REJECTED),
    order=1,
    modes=('rev',),
    eps=1e-2,
    atol=2e-3,
    rtol=2e-3,
  )
