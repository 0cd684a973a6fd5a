import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posttrain.losses import ce, combine

LOGPROBS = jnp.array([-0.1, -0.5, -0.2])


@pytest.mark.parametrize(
  'weights, total, nll',
  [
    ((1.0, 0.0, 1.0), 0.3, (0.3, 2.0)),
    ((0.1, 0.0, 0.1), 0.03, (0.3, 2.0)),
    ((-1.0, 2.0, 0.0), 0.9, (0.6, 2.0)),
    ((0.0, 0.0, 0.0), 0.0, (0.0, 0.0)),
  ],
)
def test_terms_and_metric_by_hand(weights, total, nll):
  value, metrics = ce.loss(LOGPROBS, jnp.array(weights))
  np.testing.assert_allclose(value.sum(), total, rtol=1e-6)
  assert list(metrics) == ['nll']
  np.testing.assert_allclose(combine.sums(metrics)['nll'], nll, rtol=1e-6)


def test_gradient_is_minus_the_weight():
  weights = jnp.array([1.0, 0.0, -0.5])
  grad = jax.grad(lambda x: ce.loss(x, weights)[0].sum())(LOGPROBS)
  np.testing.assert_array_equal(grad, [-1.0, 0.0, 0.5])
  check_grads(
    lambda x: ce.loss(x, weights)[0].sum(),
    (LOGPROBS,),
    order=1,
    modes=['rev'],
    atol=1e-3,
    rtol=1e-3,
  )


@pytest.mark.parametrize('bad', [np.nan, -np.inf, np.inf])
def test_values_at_non_members_have_no_effect(bad):
  logprobs = jnp.array([-0.1, bad, -0.2])
  weights = jnp.array([1.0, 0.0, 1.0])

  def loss(x):
    terms, metrics = ce.loss(x, weights)
    return terms.sum(), combine.sums(metrics)

  (value, metrics), grad = jax.value_and_grad(loss, has_aux=True)(logprobs)
  np.testing.assert_allclose(value, 0.3, rtol=1e-6)
  np.testing.assert_allclose(metrics['nll'][0], 0.3, rtol=1e-6)
  np.testing.assert_array_equal(grad, [-1.0, 0.0, -1.0])


def test_no_member_has_gradient_zero():
  def loss(x):
    return ce.loss(x, jnp.zeros(3))[0].sum()

  value, grad = jax.value_and_grad(loss)(LOGPROBS)
  assert value == 0.0 and not grad.any()


def test_masked_equals_sliced():
  rng = np.random.default_rng(0)
  logprobs = jnp.asarray(-rng.random(20), jnp.float32)
  weights = jnp.asarray(rng.random(20) * (rng.random(20) < 0.5), jnp.float32)
  keep = np.asarray(weights) != 0
  masked, metrics = ce.loss(logprobs, weights)
  sliced, expected = ce.loss(logprobs[keep], weights[keep])
  np.testing.assert_allclose(masked.sum(), sliced.sum(), rtol=1e-6)
  np.testing.assert_allclose(
    combine.means(metrics)['nll'], combine.means(expected)['nll'], rtol=1e-6
  )
