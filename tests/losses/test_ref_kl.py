"""KL to a reference: golden numbers, degenerate cases, invariances."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posttrain.losses import combine
from tests.losses import helpers

# Probabilities of policy, sampler and reference of five tokens.
NEW = jnp.log(jnp.array([0.9, 0.5, 0.1, 0.30, 0.05]))
OLD = jnp.log(jnp.array([0.6, 0.45, 0.35, 0.55, 0.05]))
REF = jnp.log(jnp.array([0.8, 0.6, 0.2, 0.1, 0.5]))
ONES = jnp.ones(5)
ESTIMATORS = ('reverse', 'k3')


def _total(*arrays, **options):
  terms, metrics = helpers.ref_kl_loss(*arrays, **options)
  return terms.sum(), combine.sums(metrics)


def _grad(new, *rest, **options):
  return jax.value_and_grad(
    lambda x: _total(x, *rest, **options), has_aux=True
  )(new)


def _random(n=10, seed=0):
  """Returns random inputs; half of the tokens are members."""
  rng = np.random.default_rng(seed)
  new = -rng.exponential(size=n)
  old = np.minimum(new + 0.5 * rng.normal(size=n), -1e-3)
  ref = np.minimum(new + rng.normal(size=n), -1e-3)
  weights = rng.normal(size=n) * (rng.permutation(n) < n // 2)
  return tuple(jnp.asarray(x, jnp.float32) for x in (new, old, ref, weights))


def test_golden_reverse():
  (total, metrics), grad = _grad(NEW, OLD, REF, ONES)
  np.testing.assert_allclose(total, -2.32637773, rtol=1e-6)
  np.testing.assert_allclose(
    grad,
    [0.177485484, -0.202368787, -2.50552594e-3, -1.21227161e-3, -2.30258509],
    rtol=1e-5,
  )
  tokens, _ = helpers.ref_kl_loss(NEW, OLD, REF, ONES)
  np.testing.assert_allclose(
    tokens,
    [0.176838955, -0.202568407, 1.56941506e-3, 3.67400612e-4, -2.30258509],
    rtol=1e-5,
  )
  means = combine.means(metrics)
  expected = {
    'kl': -0.39233170,
    'is_masked': 0.4,
    'masked_mismatch_kl': (0.53847725 + 0.15159035) / 2,
    'unmasked_mismatch_kl': (0.09453489 + 0.0057506) / 3,
    'clamped': 0.0,
  }
  assert means.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(means[name], value, rtol=1e-5, err_msg=name)


def test_golden_k3():
  """q/p = 8/9, 6/5, 2, 1/3, 10, by hand."""
  (total, metrics), grad = _grad(NEW, OLD, REF, ONES, estimator='k3')
  ratios = np.array([8 / 9, 6 / 5, 2, 1 / 3, 10])
  np.testing.assert_allclose(total, np.sum(ratios - np.log(ratios) - 1), 1e-5)
  np.testing.assert_allclose(grad, 1 - ratios, rtol=1e-5)
  means = combine.means(metrics)
  np.testing.assert_allclose(means['kl'], -0.39233170, rtol=1e-5)
  np.testing.assert_allclose(means['k3'], total / 5, rtol=1e-6)
  assert means['clamped'] == 0 and set(means) == {'kl', 'k3', 'clamped'}


def test_equals_the_formula():
  new, old, ref, weights = _random(40)
  total, metrics = _total(new, old, ref, weights, mask_low=0.05, kl_tau=0.1)
  expected = kept = 0.0
  arrays = map(np.asarray, (new, old, ref, weights))
  for p, m, q, w in zip(*arrays, strict=True):
    keep = float(np.exp(p) - np.exp(m) >= -0.05)
    kept += keep * (w != 0)
    expected += w * (-keep * (q - p) * np.exp(p - m) + 0.1 * (p - m) ** 2)
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  masked, count = metrics['is_masked']
  assert masked == count - kept and 0 < masked < count


def test_expected_gradients_over_a_distribution():
  """reverse: gradient of KL(pi || q), also off-policy; k3: of KL(q || pi)."""
  logits = jnp.array([0.3, -0.5, 1.0, 0.1])
  ref = jax.nn.log_softmax(jnp.array([-0.2, 0.4, 0.3, 0.9]))
  mu = jax.nn.log_softmax(jnp.array([0.0, 0.2, 0.5, -0.3]))

  def expected(sampler, **options):
    # Weights equal to the sampling probabilities give the expectation.
    return jax.grad(
      lambda z: _total(
        jax.nn.log_softmax(z), sampler, ref, jnp.exp(sampler), **options
      )[0]
    )(logits)

  def kl(a, b):
    return jnp.sum(jnp.exp(a) * (a - b))

  pi = jax.nn.log_softmax(logits)
  reverse = jax.grad(lambda z: kl(jax.nn.log_softmax(z), ref))(logits)
  forward = jax.grad(lambda z: kl(ref, jax.nn.log_softmax(z)))(logits)
  plain = {'kl_tau': 0.0, 'mask_low': 1.0}
  np.testing.assert_allclose(expected(pi, **plain), reverse, atol=1e-6)
  np.testing.assert_allclose(expected(mu, **plain), reverse, atol=1e-6)
  np.testing.assert_allclose(expected(pi, estimator='k3'), forward, atol=1e-6)
  assert jnp.max(jnp.abs(reverse - forward)) > 0.02


def test_check_grads():
  with jax.enable_x64(True):
    new, old, ref, weights = (
      jnp.asarray(np.asarray(x), 'float64') for x in _random(10, seed=1)
    )
    gap = ref - new
    # The reference moves with the policy, so the signal is constant and its
    # stop_gradient does not change the numerical derivative.
    check_grads(
      lambda x: _total(x, old, x + gap, weights)[0],
      (new,),
      order=1,
      modes=['rev'],
    )
    check_grads(
      lambda x: _total(x, old, ref, weights, estimator='k3')[0],
      (new,),
      order=1,
      modes=['rev'],
    )


@pytest.mark.parametrize('estimator', ESTIMATORS)
def test_a_reference_equal_to_the_policy_gives_0(estimator):
  (total, metrics), grad = _grad(NEW, NEW, NEW, ONES, estimator=estimator)
  assert total == 0 and not grad.any() and metrics['kl'][0] == 0
  options = {'kl_tau': 0.0} if estimator == 'reverse' else {}
  (total, _), grad = _grad(NEW, OLD, NEW, ONES, estimator=estimator, **options)
  assert total == 0 and not grad.any()  # also off-policy


@pytest.mark.parametrize('estimator', ESTIMATORS)
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_values_at_non_members_have_no_effect(estimator, bad):
  (clean, wanted), wanted_grad = _grad(
    NEW[1:4], OLD[1:4], REF[1:4], ONES[1:4], estimator=estimator
  )
  dirty = [x.at[jnp.array([0, 4])].set(bad) for x in (NEW, OLD, REF)]
  weights = ONES.at[jnp.array([0, 4])].set(0.0)
  (total, metrics), grad = _grad(*dirty, weights, estimator=estimator)
  np.testing.assert_allclose(total, clean, rtol=1e-6)
  np.testing.assert_array_equal(grad[jnp.array([0, 4])], 0.0)
  np.testing.assert_allclose(grad[1:4], wanted_grad, rtol=1e-6)
  for name, value in wanted.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize('estimator', ESTIMATORS)
def test_no_members_give_0(estimator):
  (total, metrics), grad = _grad(NEW, OLD, REF, 0 * ONES, estimator=estimator)
  assert total == 0 and not grad.any()
  assert not any(combine.means(metrics).values())


def test_all_members_masked_keep_only_the_squared_log_ratio():
  new, old = jnp.log(jnp.full(3, 0.1)), jnp.log(jnp.full(3, 0.9))
  (_, metrics), grad = _grad(new, old, jnp.zeros(3), jnp.ones(3))
  np.testing.assert_allclose(grad, 2e-3 * (new - old), rtol=1e-5)
  assert metrics['is_masked'] == (3.0, 3.0)


def test_reverse_beyond_the_clamp_is_constant():
  new, old = jnp.array([-1.0, -0.1, -3.0]), jnp.array([-1.0, -200.0, -3.0])
  ref = jnp.array([-2.0, -3.0, -3.0])
  (total, metrics), grad = _grad(new, old, ref, jnp.ones(3), kl_tau=0.0)
  np.testing.assert_allclose(total, 1.0 + 2.9 * np.exp(20.0), rtol=1e-5)
  np.testing.assert_allclose(grad, [1.0, 0.0, 0.0], rtol=1e-5)
  assert metrics['clamped'] == (1.0, 3.0)


def test_k3_beyond_the_clamp_is_constant():
  """Only for a reference far above the policy; far below, k3 is exact."""
  new, ref = jnp.array([-200.0, -0.1, -1.0]), jnp.array([-0.1, -200.0, -1.0])
  (total, metrics), grad = _grad(new, new, ref, jnp.ones(3), estimator='k3')
  np.testing.assert_allclose(total, np.exp(20.0) - 21 + 198.9, rtol=1e-5)
  np.testing.assert_allclose(grad, [0.0, 1.0, 0.0], atol=1e-6)
  assert metrics['clamped'] == (1.0, 3.0)


@pytest.mark.parametrize('estimator', ESTIMATORS)
def test_masked_equals_sliced_and_weights_scale(estimator):
  *arrays, weights = _random()
  keep = np.asarray(weights) != 0
  whole, metrics = _total(*arrays, weights, estimator=estimator)
  sliced, expected = _total(
    *(x[keep] for x in (*arrays, weights)), estimator=estimator
  )
  scaled, same = _total(*arrays, 3 * weights, estimator=estimator)
  np.testing.assert_allclose([sliced, scaled / 3], [whole, whole], rtol=1e-5)
  for name in metrics:
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)
    np.testing.assert_array_equal(metrics[name], same[name])
