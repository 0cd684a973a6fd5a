"""Importance weights: TRL's formulas by numpy, and degenerate cases."""

import jax.numpy as jnp
import numpy as np
import pytest

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
  if kind['type'] != 'cispo':  # its value differs
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
