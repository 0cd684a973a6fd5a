"""Policy-gradient losses: golden numbers, degenerate cases, invariances."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posttrain.losses import combine, rl

# Probabilities of policy and sampler, and credit, of five tokens.
NEW = jnp.log(jnp.array([0.9, 0.5, 0.1, 0.30, 0.05]))
OLD = jnp.log(jnp.array([0.6, 0.45, 0.35, 0.55, 0.05]))
CREDIT = jnp.array([1.0, 1.0, -1.0, 1.0, 0.0])
ONES = jnp.ones(5)
TYPES = ('dppo', 'clip')


def _grad(new, *rest, **options):
  return jax.value_and_grad(
      lambda x: rl.loss(x, *rest, **options), has_aux=True
  )(new)


def _random(n=40, seed=0, spread=0.5):
  """Half of the tokens are members."""
  rng = np.random.default_rng(seed)
  new = -rng.exponential(size=n)
  old = np.minimum(new + spread * rng.normal(size=n), -1e-3)
  credit = rng.normal(size=n)
  weights = rng.normal(size=n) * (rng.permutation(n) < n // 2)
  return tuple(jnp.asarray(x, jnp.float32) for x in (new, old, credit, weights))


def test_golden_dppo():
  (total, metrics), grad = _grad(NEW, OLD, CREDIT, ONES)
  np.testing.assert_allclose(total, -1.65445334, rtol=1e-6)
  np.testing.assert_allclose(
      grad, [8.10930e-4, -1.11090039, -2.50552594e-3, -0.546666817, 0.0],
      rtol=1e-5, atol=1e-9,
  )  # fmt: skip
  tokens, _ = jax.vmap(rl.loss)(NEW, OLD, CREDIT, ONES)
  np.testing.assert_allclose(
      tokens, [1.64401954e-4, -1.11110001, 1.56941506e-3, -0.545087145, 0.0],
      rtol=1e-5, atol=1e-9,
  )  # fmt: skip
  means = combine.means(metrics)
  expected = {
      'is_masked': 0.4, 'is_masked_low': 0.2, 'is_masked_high': 0.2,
      'masked_mismatch_kl': 0.31650607, 'unmasked_mismatch_kl': 0.05244698,
      'masked_advantage_positive': 0.5, 'masked_advantage_negative': 0.5,
      'clamped': 0.0,
  }  # fmt: skip
  assert means.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(means[name], value, rtol=1e-5, err_msg=name)


def test_golden_clip():
  """Ratios 1.5, 10/9, 2/7, 6/11, 1 within [0.8, 1.28], by hand."""
  (total, metrics), grad = _grad(NEW, OLD, CREDIT, ONES, type='clip')
  # Clipped above, inside, clipped below, free to rise, no credit.
  np.testing.assert_allclose(
      total, -(1.28 + 10 / 9 - 0.8 + 6 / 11), rtol=1e-6
  )
  np.testing.assert_allclose(
      grad, [0, -10 / 9, 0, -6 / 11, 0], rtol=1e-5, atol=1e-9
  )
  means = combine.means(metrics)
  expected = {
      'is_masked': 0.4, 'clip_low': 0.2, 'clip_high': 0.2, 'clamped': 0.0,
      'masked_mismatch_kl': 0.31650607, 'unmasked_mismatch_kl': 0.05244698,
  }  # fmt: skip
  assert means.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(means[name], value, rtol=1e-5, err_msg=name)


def _dppo_numpy(new, old, credit, low, high, adv_tau, kl_tau):
  change = np.exp(new) - np.exp(old)
  keep = change <= high if credit > 0 else change >= -low
  gain = adv_tau * credit * np.exp(new - old) if keep else 0.0
  return kl_tau * (new - old) ** 2 - gain


def _clip_numpy(new, old, credit, low, high):
  ratio = np.exp(new - old)
  return -min(ratio * credit, np.clip(ratio, 1 - low, 1 + high) * credit)


@pytest.mark.parametrize(
    ('type', 'token', 'options'),
    [
        ('dppo', _dppo_numpy,
         {'low': 0.05, 'high': 0.15, 'adv_tau': 1.5, 'kl_tau': 0.1}),
        ('clip', _clip_numpy, {'low': 0.1, 'high': 0.3}),
    ],
)  # fmt: skip
def test_equals_the_formula(type, token, options):
  new, old, credit, weights = _random()
  total, metrics = rl.loss(new, old, credit, weights, type=type, **options)
  each = [
      w * token(*map(float, x), **options)
      for *x, w in zip(new, old, credit, np.asarray(weights), strict=True)
  ]
  np.testing.assert_allclose(total, sum(each), rtol=1e-5)
  assert 0.1 < combine.means(metrics)['is_masked'] < 0.9


@pytest.mark.parametrize('type', TYPES)
def test_check_grads(type):
  new, old, credit, weights = _random(10, seed=1)
  with jax.enable_x64(True):
    arrays = (jnp.asarray(np.asarray(x), 'float64')
              for x in (new, old, credit, weights))  # fmt: skip
    new, *rest = arrays
    check_grads(
        lambda x: rl.loss(x, *rest, type=type)[0], (new,), order=1,
        modes=['rev'],
    )  # fmt: skip


OPEN = {
    'dppo': {'low': np.inf, 'high': np.inf, 'kl_tau': 0.0},
    'clip': {'low': np.inf, 'high': np.inf},
}


@pytest.mark.parametrize('type', TYPES)
def test_without_bounds_it_is_importance_weighted_policy_gradient(type):
  new, old, credit, weights = _random(10, spread=2.0)
  (total, metrics), grad = _grad(
      new, old, credit, weights, type=type, **OPEN[type]
  )
  expected = -weights * credit * jnp.exp(new - old)
  np.testing.assert_allclose(total, expected.sum(), rtol=1e-5)
  np.testing.assert_allclose(grad, expected, rtol=1e-5)
  assert metrics['is_masked'][0] == 0


@pytest.mark.parametrize('type', TYPES)
@pytest.mark.parametrize('low', [0.0, 0.2])
def test_on_policy_it_is_plain_policy_gradient(type, low):
  """Ratio exactly 1: also with bounds of 0, where a tie is not half."""
  new, _, credit, weights = _random(10)
  (total, metrics), grad = _grad(
      new, new, credit, weights, type=type, low=low, high=0.0
  )
  np.testing.assert_allclose(total, -jnp.sum(weights * credit), rtol=1e-5)
  np.testing.assert_array_equal(grad, -weights * credit)
  assert metrics['is_masked'][0] == metrics['masked_mismatch_kl'][0] == 0


@pytest.mark.parametrize('type', TYPES)
@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
def test_non_members_may_be_anything(type, bad):
  (clean, wanted), wanted_grad = _grad(
      NEW[1:4], OLD[1:4], CREDIT[1:4], ONES[1:4], type=type
  )
  dirty = [x.at[jnp.array([0, 4])].set(bad) for x in (NEW, OLD, CREDIT)]
  weights = ONES.at[jnp.array([0, 4])].set(0.0)
  (total, metrics), grad = _grad(*dirty, weights, type=type)
  np.testing.assert_allclose(total, clean, rtol=1e-6)
  np.testing.assert_array_equal(grad[jnp.array([0, 4])], 0.0)
  np.testing.assert_allclose(grad[1:4], wanted_grad, rtol=1e-6)
  for name, value in wanted.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize('type', TYPES)
def test_no_member_is_zero(type):
  (total, metrics), grad = _grad(NEW, OLD, CREDIT, 0 * ONES, type=type)
  assert total == 0 and not grad.any()
  assert not any(combine.means(metrics).values())


@pytest.mark.parametrize('type', TYPES)
def test_all_members_masked_have_no_policy_gradient(type):
  new, old = jnp.log(jnp.full(3, 0.9)), jnp.log(jnp.full(3, 0.3))
  options = {'kl_tau': 0.0} if type == 'dppo' else {}
  (_, metrics), grad = _grad(
      new, old, jnp.ones(3), jnp.ones(3), type=type, **options
  )
  assert not grad.any()
  means = combine.means(metrics)
  assert means['is_masked'] == 1 and means['unmasked_mismatch_kl'] == 0


def test_the_masks_are_one_sided():
  """What moved against its advantage is kept, however far."""
  new = jnp.log(jnp.array([0.1, 0.9, 0.5]))
  old = jnp.log(jnp.array([0.9, 0.1, 0.5]))
  for type in TYPES:
    (_, metrics), grad = _grad(
        new, old, jnp.array([1.0, -1.0, 1.0]), jnp.ones(3), type=type
    )
    assert metrics['is_masked'][0] == 0 and (jnp.abs(grad) > 0.1).all()


def test_zero_advantage_follows_the_low_rule_of_dppo():
  new = jnp.log(jnp.array([0.1, 0.9, 0.5]))
  old = jnp.log(jnp.array([0.9, 0.1, 0.5]))
  (_, metrics), grad = _grad(new, old, jnp.zeros(3), jnp.ones(3))
  assert metrics['is_masked'][0] == 1  # the one that fell
  assert metrics['is_masked_low'][0] == metrics['is_masked_high'][0] == 0
  # The squared log ratio pulls both back, masked or not.
  np.testing.assert_allclose(grad, 2e-3 * (new - old), rtol=1e-5)


@pytest.mark.parametrize('type', TYPES)
@pytest.mark.parametrize('sign', [1, -1])
@pytest.mark.parametrize('credit', [1.0, -1.0])
def test_clamp(type, sign, credit):
  """A log ratio of 200 is finite in value and gradient, and reported."""
  new = jnp.array([-1.0, -100 + 100.0 * sign, -0.5])
  old = jnp.array([-1.0, -100 - 100.0 * sign, -0.5])
  options = OPEN[type]
  (total, metrics), grad = _grad(
      new, old, jnp.full(3, credit), jnp.ones(3), type=type, **options
  )
  expected = -credit * (2 + np.exp(20.0 * sign))
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  np.testing.assert_allclose(grad, [-credit, 0.0, -credit], rtol=1e-6)
  assert metrics['clamped'] == (1.0, 3.0)
  _, metrics = rl.loss(
      new, old, new, jnp.ones(3), type=type, **options, max_log_ratio=80.0
  )
  assert all(np.isfinite(combine.means(metrics)[name]) for name in metrics)


def test_a_single_clamped_token_is_still_pulled_back_by_dppo():
  new, old = jnp.array([-300.0]), jnp.array([-1.0])
  _, grad = _grad(new, old, jnp.ones(1), jnp.ones(1))
  np.testing.assert_allclose(grad, [-2e-3 * 299], rtol=1e-5)


@pytest.mark.parametrize('type', TYPES)
def test_masked_equals_sliced_and_shape_does_not_matter(type):
  arrays = _random(10)
  keep = np.asarray(arrays[-1]) != 0
  whole, metrics = rl.loss(*arrays, type=type)
  sliced, expected = rl.loss(*(x[keep] for x in arrays), type=type)
  square, _ = rl.loss(*(x.reshape(2, 5) for x in arrays), type=type)
  np.testing.assert_allclose([sliced, square], whole, rtol=1e-5)
  for name in metrics:
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)


@pytest.mark.parametrize('type', TYPES)
def test_weights_scale_the_loss_but_not_its_metrics(type):
  *arrays, weights = _random(10)
  loss = functools.partial(rl.loss, *arrays, type=type)
  (one, metrics), (three, same) = loss(weights), loss(3 * weights)
  np.testing.assert_allclose(three, 3 * one, rtol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, metrics, same)


def test_an_unknown_constant_is_refused():
  with pytest.raises(TypeError, match='kl_tau'):
    rl.loss(NEW, OLD, CREDIT, ONES, type='clip', kl_tau=1.0)
