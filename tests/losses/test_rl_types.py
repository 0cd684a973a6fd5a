"""The types of the rl component: golden numbers and formulas by numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posttrain.losses import combine
from tests.losses import helpers
from tests.losses.helpers import CREDIT, NEW, OLD, ONES

OPEN = {
  'dppo': {'low': np.inf, 'high': np.inf, 'kl_tau': 0.0},
  'ipo': {'threshold': np.inf, 'kl_tau': 0.0},
  'clip': {'low': np.inf, 'high': np.inf},
  'gspo': {'low': np.inf, 'high': np.inf},
  'cispo': {'high': np.inf},
  'custom': {},
}
LOG = 'cispo', 'dro'  # whose value has log pi in place of the ratio


def _check(metrics, expected):
  means = combine.means(metrics)
  assert means.keys() == expected.keys()
  for name, value in expected.items():
    np.testing.assert_allclose(
      means[name], value, rtol=1e-5, atol=1e-7, err_msg=name
    )


def test_golden_dppo():
  (total, metrics), grad = helpers.grad(NEW, OLD, CREDIT, ONES)
  np.testing.assert_allclose(total, -1.65445334, rtol=1e-6)
  np.testing.assert_allclose(
    grad,
    [8.10930e-4, -1.11090039, -2.50552594e-3, -0.546666817, 0.0],
    rtol=1e-5,
    atol=1e-9,
  )
  tokens, _ = helpers.terms(NEW, OLD, CREDIT, ONES)
  np.testing.assert_allclose(
    tokens,
    [1.64401954e-4, -1.11110001, 1.56941506e-3, -0.545087145, 0.0],
    rtol=1e-5,
    atol=1e-9,
  )
  _check(
    metrics,
    {
      'is_masked': 0.4,
      'is_masked_low': 0.2,
      'is_masked_high': 0.2,
      'masked_mismatch_kl': 0.31650607,
      'unmasked_mismatch_kl': 0.05244698,
      'masked_advantage_positive': 0.5,
      'masked_advantage_negative': 0.5,
      'clamped': 0.0,
    },
  )


def test_golden_ipo():
  (total, metrics), _ = helpers.grad(NEW, OLD, CREDIT, ONES, type='ipo')
  np.testing.assert_allclose(total, -1.10899879, rtol=1e-6)
  mismatch = np.array([0.09453489, 0.0057506, 0.53847725, 0.15159035, 0])
  _check(
    metrics,
    {
      'is_masked': 0.6,
      'clamped': 0.0,
      'masked_mismatch_kl': mismatch[[0, 2, 3]].mean(),
      'unmasked_mismatch_kl': mismatch[[1, 4]].mean(),
    },
  )


def test_golden_clip():
  """Ratios 1.5, 10/9, 2/7, 6/11, 1 within [0.8, 1.28], by hand."""
  (total, metrics), grad = helpers.grad(NEW, OLD, CREDIT, ONES, type='clip')
  # Clipped above, inside, clipped below, free to rise, no credit.
  np.testing.assert_allclose(total, -(1.28 + 10 / 9 - 0.8 + 6 / 11), rtol=1e-6)
  np.testing.assert_allclose(
    grad, [0, -10 / 9, 0, -6 / 11, 0], rtol=1e-5, atol=1e-9
  )
  _check(
    metrics,
    {
      'is_masked': 0.4,
      'clip_low': 0.2,
      'clip_high': 0.2,
      'clamped': 0.0,
      'masked_mismatch_kl': 0.31650607,
      'unmasked_mismatch_kl': 0.05244698,
    },
  )


def test_golden_delta():
  """Ratios 4, 4, 1.4, 1.4, 1/4; delta 2 clips only the first."""
  new = jnp.log(jnp.array([0.8, 0.8, 0.7, 0.7, 0.2]))
  old = jnp.log(jnp.array([0.2, 0.2, 0.5, 0.5, 0.8]))
  credit = jnp.array([-1.0, 1.0, -1.0, 1.0, -1.0])
  (total, metrics), grad = helpers.grad(
    new, old, credit, ONES, type='clip', delta=2.0
  )
  np.testing.assert_allclose(total, 2 - 1.28 + 1.4 - 1.28 + 0.8, rtol=1e-6)
  np.testing.assert_allclose(grad, [0, 0, 1.4, 0, 0], rtol=1e-5)
  means = combine.means(metrics)
  np.testing.assert_allclose(
    [means[f'clip_{name}'] for name in ('delta', 'high', 'low')],
    [0.2, 0.4, 0.2],
    rtol=1e-6,
  )
  np.testing.assert_allclose(means['is_masked'], 0.8, rtol=1e-6)


def test_golden_cispo():
  """Weights 1.5, 10/9, 2/7 -> 0.5, 6/11, 1 within [0.5, 1.4]."""
  (total, metrics), grad = helpers.grad(
    NEW, OLD, CREDIT, ONES, type='cispo', low=0.5, high=0.4
  )
  weights = np.array([1.4, 10 / 9, 0.5, 6 / 11, 1.0])
  np.testing.assert_allclose(grad, -weights * CREDIT, rtol=1e-5)
  log = np.log([0.9, 0.5, 0.1, 0.3, 0.05])
  np.testing.assert_allclose(total, -(weights * CREDIT * log).sum(), rtol=1e-5)
  means = combine.means(metrics)
  np.testing.assert_allclose(
    [means['clip_low'], means['clip_high'], means['is_masked']],
    [0.2, 0.2, 0.0],
    rtol=1e-6,
  )


def _dppo_numpy(new, old, credit, low, high, adv_tau, kl_tau):
  change = np.exp(new) - np.exp(old)
  keep = change <= high if credit > 0 else change >= -low
  gain = adv_tau * credit * np.exp(new - old) if keep else 0.0
  return kl_tau * (new - old) ** 2 - gain


def _ipo_numpy(new, old, credit, threshold, adv_tau, kl_tau):
  keep = abs(np.exp(new) - np.exp(old)) <= threshold
  gain = adv_tau * credit * np.exp(new - old) if keep else 0.0
  return kl_tau * (new - old) ** 2 - gain


def _clip_numpy(new, old, credit, low, high, delta=np.inf):
  ratio = np.exp(new - old)
  return -min(
    min(ratio, delta) * credit, np.clip(ratio, 1 - low, 1 + high) * credit
  )


def _cispo_numpy(new, old, credit, low, high):
  return -np.clip(np.exp(new - old), 1 - low, 1 + high) * credit * new


@pytest.mark.parametrize(
  ('type', 'token', 'options'),
  [
    (
      'dppo',
      _dppo_numpy,
      {'low': 0.05, 'high': 0.15, 'adv_tau': 1.5, 'kl_tau': 0.1},
    ),
    ('ipo', _ipo_numpy, {'threshold': 0.05, 'adv_tau': 1.5, 'kl_tau': 0.1}),
    ('clip', _clip_numpy, {'low': 0.1, 'high': 0.3}),
    ('clip', _clip_numpy, {'low': 0.1, 'high': 0.2, 'delta': 1.3}),
    ('cispo', _cispo_numpy, {'low': 0.1, 'high': 0.2}),
  ],
)
def test_equals_the_formula(type, token, options):
  new, old, credit, weights = helpers.random(n=40)
  total, metrics = helpers.total(
    new, old, credit, weights, type=type, **options
  )
  each = [
    w * token(*map(float, x), **options)
    for *x, w in zip(new, old, credit, np.asarray(weights), strict=True)
  ]
  np.testing.assert_allclose(total, sum(each), rtol=1e-5)
  means = combine.means(metrics)
  gone = 'clip_high' if type == 'cispo' else 'is_masked'
  assert 0 < means[gone] < 1 and means.get('clip_delta', 1) > 0


def _gspo_numpy(new, old, credit, weights, segments, low, high):
  """Returns the paper's mean of -min(s A, clip(s) A), and its gradient."""
  new, old, credit = (np.asarray(x, float) for x in (new, old, credit))
  values, grad, clipped = [], np.zeros(new.shape), 0
  indices = helpers.sequences(segments, weights)
  for row, tokens in indices:
    s = np.exp(np.mean(new[row, tokens] - old[row, tokens]))
    a = credit[row, tokens[0]]
    values.append(-min(s * a, np.clip(s, 1 - low, 1 + high) * a))
    if (s <= 1 + high) if a > 0 else (s >= 1 - low):
      grad[row, tokens] = -s * a / tokens.size / len(indices)
    else:
      clipped += tokens.size
  return np.mean(values), grad, clipped


def test_gspo_equals_the_papers_sequence_objective():
  """Value and gradient, as a mean over sequences."""
  new, old, credit, weights, segments = helpers.rows()
  options = {'low': 0.02, 'high': 0.03}
  value, expected, clipped = _gspo_numpy(
    new, old, credit, weights, segments, **options
  )
  (total, metrics), grad = helpers.grad(
    new,
    old,
    credit,
    weights,
    segments,
    type='gspo',
    aggregation='sequence',
    **options,
  )
  np.testing.assert_allclose(total / 5, value, rtol=1e-5)
  np.testing.assert_allclose(grad / 5, expected, rtol=1e-5, atol=1e-7)
  assert metrics['is_masked'] == (clipped, weights.sum())
  assert 0 < clipped < weights.sum()


def test_gspo_of_single_tokens_equals_clip():
  arrays = helpers.random()
  options = {'low': 0.1, 'high': 0.3}
  gspo, grad = helpers.grad(*arrays, jnp.arange(10), type='gspo', **options)
  clip, expected = helpers.grad(*arrays, type='clip', **options)
  np.testing.assert_allclose(gspo[0], clip[0], rtol=1e-6)
  np.testing.assert_allclose(grad, expected, rtol=1e-6)


@pytest.mark.parametrize('kind', helpers.TYPES, ids=helpers.name)
def test_check_grads(kind):
  new, old, credit, weights, segments = helpers.rows(seed=1)
  with jax.enable_x64(True):
    new, *rest = (
      jnp.asarray(np.asarray(x), 'float64') for x in (new, old, credit, weights)
    )
    gap = new - rest[0]

    def loss(x):
      # The sampler moves with the policy, so the ratio is constant and the
      # stop_gradient of cispo does not change the numerical derivative.
      old = x - gap if kind['type'] == 'cispo' else rest[0]
      return helpers.total(x, old, *rest[1:], segments, **kind)[0]

    check_grads(loss, (new,), order=1, modes=['rev'])


@pytest.mark.parametrize(
  'kind', [x for x in helpers.TYPES if x['type'] in OPEN], ids=helpers.name
)
def test_no_bounds_give_importance_weighted_policy_gradient(kind):
  new, old, credit, weights = helpers.random(spread=2.0)
  (total, metrics), grad = helpers.grad(
    new, old, credit, weights, jnp.arange(10), **kind, **OPEN[kind['type']]
  )
  expected = -weights * credit * jnp.exp(new - old)
  np.testing.assert_allclose(grad, expected, rtol=1e-5)
  if kind['type'] != 'cispo':
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-5)
  assert metrics.get('is_masked', (0,))[0] == 0


@pytest.mark.parametrize('kind', helpers.TYPES, ids=helpers.name)
@pytest.mark.parametrize('bounded', [True, False])
def test_on_policy_gives_plain_policy_gradient(kind, bounded):
  """Ratio 1, also with bounds of 0: a tie has the full gradient."""
  new, _, credit, weights = helpers.random()
  zero = {'ipo': {'threshold': 0.0}, 'dro': {}, 'custom': {}}.get(
    kind['type'], {'low': 0.0, 'high': 0.0}
  )
  (total, metrics), grad = helpers.grad(
    new, new, credit, weights, **kind, **(zero if bounded else {})
  )
  np.testing.assert_array_equal(grad, -weights * credit)
  if kind['type'] not in LOG:
    np.testing.assert_allclose(total, -jnp.sum(weights * credit), rtol=1e-5)
  if kind['type'] != 'custom':
    assert metrics['is_masked'][0] == metrics['masked_mismatch_kl'][0] == 0


@pytest.mark.parametrize('kind', helpers.TYPES[:4], ids=helpers.name)
def test_all_members_masked_have_no_policy_gradient(kind):
  new, old = jnp.log(jnp.full(5, 0.9)), jnp.log(jnp.full(5, 0.3))
  options = {'kl_tau': 0.0} if kind['type'] in ('dppo', 'ipo') else {}
  (_, metrics), grad = helpers.grad(new, old, ONES, ONES, **kind, **options)
  assert not grad.any()
  means = combine.means(metrics)
  assert means['is_masked'] == 1 and means['unmasked_mismatch_kl'] == 0


@pytest.mark.parametrize('type', ['dppo', 'clip'])
def test_dppo_and_clip_masks_are_one_sided(type):
  """A token that moved against its advantage is masked by ipo only."""
  new = jnp.log(jnp.array([0.1, 0.9, 0.5, 0.5, 0.5]))
  old = jnp.log(jnp.array([0.9, 0.1, 0.5, 0.5, 0.5]))
  arrays = (new, old, jnp.array([1.0, -1.0, 1.0, 1.0, -1.0]), ONES)
  (_, metrics), grad = helpers.grad(*arrays, type=type)
  assert metrics['is_masked'][0] == 0 and (jnp.abs(grad) > 0.1).all()
  assert helpers.total(*arrays, type='ipo')[1]['is_masked'][0] == 2


def test_dppo_masks_zero_advantage_by_low():
  new = jnp.log(jnp.array([0.1, 0.9, 0.5, 0.5, 0.5]))
  old = jnp.log(jnp.array([0.9, 0.1, 0.5, 0.5, 0.5]))
  (_, metrics), grad = helpers.grad(new, old, 0 * ONES, ONES)
  assert metrics['is_masked'][0] == 1  # the decrease
  assert metrics['is_masked_low'][0] == metrics['is_masked_high'][0] == 0
  # Masked or not, both have the gradient of the squared log ratio.
  np.testing.assert_allclose(grad, 2e-3 * (new - old), rtol=1e-5)


@pytest.mark.parametrize('kind', helpers.TYPES[:4], ids=helpers.name)
@pytest.mark.parametrize(('sign', 'credit'), [(1, 1.0), (-1, 1.0), (1, -1.0)])
def test_a_large_log_ratio_is_clamped(kind, sign, credit):
  """A log ratio of 200 has a finite value and gradient, and is counted."""
  new = jnp.array([-1.0, -100 + 100.0 * sign, -0.5, -0.5, -0.5])
  old = jnp.array([-1.0, -100 - 100.0 * sign, -0.5, -0.5, -0.5])
  options = {**kind, **OPEN[kind['type']]}
  (total, metrics), grad = helpers.grad(
    new, old, credit * ONES, ONES, jnp.arange(5), **options
  )
  expected = -credit * (4 + np.exp(20.0 * sign))
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  np.testing.assert_allclose(
    grad, -credit * np.array([1, 0, 1, 1, 1]), rtol=1e-6
  )
  assert metrics['clamped'] == (1.0, 5.0)
  _, metrics = helpers.terms(new, old, new, ONES, **options, max_log_ratio=80.0)
  assert all(np.isfinite(combine.means(metrics)[name]) for name in metrics)


def test_clamped_tokens_keep_the_squared_log_ratio_of_dppo():
  _, grad = helpers.grad(-300 * ONES, -ONES, ONES, ONES)
  np.testing.assert_allclose(grad, np.full(5, -2e-3 * 299), rtol=1e-5)
