"""Importance weights and masks: formulas by numpy, and degenerate cases."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from posttrain import schema
from posttrain.losses import combine
from tests.losses import helpers

MODES = schema.SAMPLER_IS_MODES[1:]


def _weights_numpy(new, old, weights, segments, mode, low, high, norm):
  """Returns (weight, unbounded ratio) of every member, by loops."""
  level, action = mode.split('_')
  new, old = np.asarray(new, float), np.asarray(old, float)
  ratios = np.ones(new.shape)
  for row, at in helpers.sequences(segments, weights):
    gap = new[row, at] - old[row, at]
    if level == 'sequence':
      gap = np.full(at.size, gap.sum() if norm == 'sum' else gap.mean())
    ratios[row, at] = np.exp(gap)
  inside = (ratios >= low) & (ratios <= high)
  if action == 'mask':
    return np.where(inside, ratios, 0.0), ratios
  return np.clip(ratios, low, high), ratios


CASES = [({'type': 'dppo'}, mode, 'sum') for mode in MODES]
CASES += [({'type': 'clip'}, mode, 'mean') for mode in MODES[2:]]
CASES += [(kind, 'token_mask', 'sum') for kind in helpers.TYPES[1:]]


@pytest.mark.parametrize(('kind', 'mode', 'norm'), CASES)
def test_the_gradient_is_weighted_policy_gradient(kind, mode, norm):
  """-c A d log pi for every type, with c in [0.9, 1.1]."""
  new, old, credit, weights, segments = helpers.rows()
  (total, metrics), grad = helpers.grad(
    new,
    old,
    credit,
    weights,
    segments,
    **kind,
    sampler_is_mode=mode,
    sampler_is_clip_min=0.9,
    sampler_is_clip_max=1.1,
    sampler_is_norm=norm,
  )
  c, raw = _weights_numpy(new, old, weights, segments, mode, 0.9, 1.1, norm)
  expected = -c * np.asarray(credit * weights)
  np.testing.assert_allclose(grad, expected, rtol=2e-4, atol=1e-7)
  if kind['type'] not in ('cispo', 'dro'):  # their value differs
    np.testing.assert_allclose(total, expected.sum(), rtol=1e-4)
  member = np.asarray(weights) != 0
  cut = (raw < 0.9) | (raw > 1.1)
  means = combine.means(metrics)
  assert 0 < cut[member].mean() < 1
  np.testing.assert_allclose(means['sampler_is_cut'], cut[member].mean(), 1e-6)
  np.testing.assert_allclose(means['sampler_is_mean'], raw[member].mean(), 1e-4)
  np.testing.assert_allclose(means['sampler_is_max'], raw[member].max(), 1e-4)
  gaps = [
    np.asarray(new - old, float)[row, at]
    for row, at in helpers.sequences(segments, weights)
  ]
  assert metrics['sampler_is_sum_norm'][1] == len(gaps) == 5
  for name, log in (('sum', np.sum), ('mean', np.mean)):
    mean = np.mean([np.exp(log(gap)) for gap in gaps])
    np.testing.assert_allclose(means[f'sampler_is_{name}_norm'], mean, 1e-4)


@pytest.mark.parametrize('mode', MODES)
def test_on_policy_weights_are_1(mode):
  new, _, credit, weights, segments = helpers.rows()
  (_, metrics), grad = helpers.grad(
    new, new, credit, weights, segments, sampler_is_mode=mode
  )
  np.testing.assert_array_equal(grad, -weights * credit)
  means = combine.means(metrics)
  assert means['sampler_is_mean'] == means['sampler_is_max'] == 1
  assert means['sampler_is_cut'] == 0


def test_sequences_of_one_token_equal_tokens():
  new, old, credit, weights = helpers.random()
  segments = jnp.arange(10)
  for action in ('truncate', 'mask'):
    grads = [
      helpers.grad(
        new,
        old,
        credit,
        weights,
        segments,
        sampler_is_mode=f'{level}_{action}',
        sampler_is_clip_max=1.2,
        sampler_is_norm=norm,
      )[1]
      for level, norm in (
        ('token', 'sum'),
        ('sequence', 'sum'),
        ('sequence', 'mean'),
      )
    ]
    np.testing.assert_allclose(grads[1], grads[0], rtol=1e-6)
    np.testing.assert_allclose(grads[2], grads[0], rtol=1e-6)
    assert grads[0].any()


def test_no_lower_bound_keeps_small_ratios():
  low, high = jnp.log(0.01 * helpers.ONES), jnp.log(0.5 * helpers.ONES)
  new, old = low.at[1].set(high[1]), high.at[1].set(low[1])
  for mode, second in (('token_mask', 0.0), ('token_truncate', 3.0)):
    _, grad = helpers.grad(
      new, old, helpers.ONES, helpers.ONES, sampler_is_mode=mode
    )
    np.testing.assert_allclose(grad[:2], [-0.02, -second], rtol=1e-5)


@pytest.mark.parametrize('mode', MODES)
def test_values_at_non_members_have_no_effect(mode):
  new, old, credit, weights, segments = helpers.rows()
  clean, wanted = helpers.grad(
    new, old, credit, weights, segments, sampler_is_mode=mode
  )
  for bad in (np.nan, np.inf, -np.inf):
    dirty = (jnp.where(weights != 0, x, bad) for x in (new, old, credit))
    outputs, grad = helpers.grad(
      *dirty, weights, segments, sampler_is_mode=mode
    )
    np.testing.assert_array_equal(grad, wanted)
    np.testing.assert_array_equal(outputs[0], clean[0])
    for name, value in combine.means(clean[1]).items():
      assert combine.means(outputs[1])[name] == value, name


def test_a_large_sequence_log_ratio_is_bounded():
  """A sum of log ratios of 95: truncated, or 0 if masked."""
  ones = helpers.ONES
  for mode, expected in (('sequence_truncate', -3.0), ('sequence_mask', 0.0)):
    (_, metrics), grad = helpers.grad(
      -ones, -20 * ones, ones, ones, sampler_is_mode=mode
    )
    np.testing.assert_array_equal(grad, expected * ones)
    assert np.isfinite(combine.means(metrics)['sampler_is_mean'])


# Three logprob sets: decoupled PPO.


def test_decoupled_clip_equals_literals():
  """-min(prox / mu, 2) min(rho A, clip(rho, 0.8, 1.28) A), rho = pi / prox.

  pi    prox  mu    A    prox/mu  rho    term
  0.30  0.20  0.16   1   1.25     1.5    -1.25 * 1.28, clipped
  0.45  0.50  0.20   1   2.5: 2   0.9    -2 * 0.9
  0.12  0.20  0.25  -1   0.8      0.6     0.8 * 0.8, clipped
  0.36  0.30  0.30  -1   1        1.2     1.2
  0.50  0.50  0.50   2   1        1      -2
  """
  new = jnp.log(jnp.array([0.30, 0.45, 0.12, 0.36, 0.50]))
  proximal = jnp.log(jnp.array([0.20, 0.50, 0.20, 0.30, 0.50]))
  old = jnp.log(jnp.array([0.16, 0.20, 0.25, 0.30, 0.50]))
  credit = jnp.array([1.0, 1.0, -1.0, -1.0, 2.0])
  arrays = new, old, credit, helpers.ONES
  options = {
    'type': 'clip',
    'sampler_is_mode': 'token_truncate',
    'sampler_is_clip_max': 2.0,
    'proximal': proximal,
  }
  terms, metrics = helpers.terms(*arrays, **options)
  expected = [-1.6, -1.8, 0.64, 1.2, -2.0]
  np.testing.assert_allclose(terms, expected, rtol=1e-6)
  _, grad = helpers.grad(*arrays, **options)
  np.testing.assert_allclose(grad, [0, -1.8, 0, 1.2, -2.0], rtol=1e-6)
  means = combine.means(metrics)
  np.testing.assert_allclose(means['sampler_is_mean'], 6.55 / 5, rtol=1e-6)
  np.testing.assert_allclose(means['sampler_is_cut'], 0.2, rtol=1e-6)
  for name in ('clip_low', 'clip_high'):
    np.testing.assert_allclose(means[name], 0.2, rtol=1e-6)


@pytest.mark.parametrize('kind', helpers.TYPES, ids=helpers.name)
def test_a_proximal_policy_that_sampled_equals_no_correction(kind):
  new, old, *rest = helpers.rows()
  (total, metrics), grad = helpers.grad(new, old, *rest, **kind)
  (same, more), grad_same = helpers.grad(
    new, old, *rest, **kind, sampler_is_mode='token_mask', proximal=old
  )
  np.testing.assert_array_equal(same, total)
  np.testing.assert_array_equal(grad_same, grad)
  for name, value in metrics.items():
    np.testing.assert_array_equal(more[name], value, err_msg=name)


def test_the_proximal_policy_of_the_first_update_is_the_policy():
  new, old, *rest = helpers.rows()
  options = {'type': 'clip', 'sampler_is_mode': 'sequence_truncate'}
  one = helpers.grad(new, old, *rest, **options)
  same = helpers.grad(new, old, *rest, **options, proximal=new)
  jax.tree.map(np.testing.assert_array_equal, one, same)


# The mask of sequences.

MASK = {'type': 'clip', 'low': 9.0, 'high': 9.0}


def test_off_policy_mask_equals_literals():
  """Mean log(mu / pi): 0.3 with A < 0 (masked at 0.2), 0.3 with A > 0, 0.1."""
  segments = jnp.array([[1, 1, 1, 2, 2, 3, 3, 0]])
  gap = jnp.array([[0.5, 9.0, 0.1, 0.1, 0.5, 0.3, -0.1, 9.0]])
  credit = jnp.array([[-1.0, -1, -2, 1, 1, -1, -1, -1]])
  weights = jnp.array([[1.0, 0, 1, 1, 1, 1, 1, 0]])
  new = jnp.full((1, 8), -2.0)
  arrays = new, new + gap, credit, weights, segments
  (_, metrics), grad = helpers.grad(*arrays, **MASK, off_policy_mask=0.2)
  # exp of -0.1, -0.5, -0.3, 0.1.
  expected = [0, 0, 0, -0.904837, -0.606531, 0.740818, 1.105171, 0]
  np.testing.assert_allclose(grad[0], expected, rtol=1e-5)
  assert metrics['is_off_policy'] == (2.0, 6.0)
  # With the squared log ratio of dppo, which stays.
  _, grad = helpers.grad(*arrays, off_policy_mask=0.2)
  np.testing.assert_allclose(grad[0, [0, 2]], [-1e-3, -2e-4], rtol=1e-4)
  # The weight of TIS is of other tokens.
  (_, metrics), grad = helpers.grad(
    *arrays, **MASK, off_policy_mask=0.2, sampler_is_mode='token_truncate'
  )
  np.testing.assert_allclose(grad[0], expected, rtol=1e-5)
  assert metrics['is_off_policy'] == (2.0, 6.0)


@pytest.mark.parametrize('kind', helpers.TYPES, ids=helpers.name)
def test_an_infinite_delta_masks_nothing(kind):
  arrays = helpers.rows()
  plain = helpers.grad(*arrays, **kind)
  (total, metrics), grad = helpers.grad(*arrays, **kind, off_policy_mask=np.inf)
  assert metrics.pop('is_off_policy')[0] == 0
  jax.tree.map(np.testing.assert_array_equal, plain, ((total, metrics), grad))


BOTH = {
  'type': 'clip',
  'sampler_is_mode': 'token_truncate',
  'off_policy_mask': 0.05,
}


def _three(seed):
  """Inputs with a proximal policy between policy and sampler."""
  new, old, *rest = helpers.rows(seed)
  return (new, old, *rest), 0.7 * new + 0.3 * old


def test_masked_equals_sliced_with_three_sets():
  """Masked sequences among them, and tokens that have no weight."""
  (*arrays, weights, segments), proximal = _three(0)
  keep = weights[0] != 0
  row = [x[0] for x in (*arrays, weights, segments, 0 * weights, proximal)]
  whole, sliced = (
    helpers.total(*x[:-1], proximal=x[-1], **BOTH)
    for x in (row, [x[keep] for x in row])
  )
  np.testing.assert_allclose(sliced[0], whole[0], rtol=1e-5)
  assert 0 < whole[1]['is_off_policy'][0] < keep.sum()
  for name, value in whole[1].items():
    np.testing.assert_allclose(sliced[1][name], value, rtol=1e-5, err_msg=name)


def test_check_grads_with_three_sets():
  arrays, proximal = _three(1)
  with jax.enable_x64(True):
    new, *rest, segments = map(np.asarray, arrays)
    new, *rest = (np.float64(x) for x in (new, *rest))

    def loss(x):
      return helpers.total(
        x, *rest, segments, proximal=np.float64(proximal), **BOTH
      )[0]

    check_grads(loss, (jnp.asarray(new),), order=1, modes=['rev'])
