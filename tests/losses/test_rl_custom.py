"""A user's loss: its inputs, and the checks of its outputs."""

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.losses import combine
from tests.losses import helpers


def _custom(function, **kwargs):
  return {'type': 'custom', 'function': function, 'kwargs': kwargs}


def test_a_custom_clip_equals_clip():
  """The formula of `clip`; `rl.loss` applies weights and mean."""
  new, old, credit, weights, segments = helpers.rows()
  weights = 2.5 * weights

  def clip(inputs, low, high):
    ratio = jnp.exp(inputs.logprobs - inputs.sampler_logprobs)
    gain = jnp.minimum(
      ratio * inputs.advantages,
      jnp.clip(ratio, 1 - low, 1 + high) * inputs.advantages,
    )
    return -gain, {'rose': ratio > 1}

  for aggregation in ('token', 'sequence'):
    arrays = (new, old, credit, weights, segments)
    custom, grad = helpers.grad(
      *arrays, **_custom(clip, low=0.1, high=0.2), aggregation=aggregation
    )
    builtin, builtin_grad = helpers.grad(
      *arrays, type='clip', low=0.1, high=0.2, aggregation=aggregation
    )
    np.testing.assert_allclose(custom[0], builtin[0], rtol=1e-5)
    np.testing.assert_allclose(grad, builtin_grad, rtol=1e-5, atol=1e-7)
  member = np.asarray(weights) != 0
  rose = np.asarray(new > old)[member].mean()
  assert custom[1].keys() == {'rose'}
  np.testing.assert_allclose(combine.means(custom[1])['rose'], rose, rtol=1e-6)


def test_inputs_are_0_at_non_members():
  new, old, credit, weights, segments = helpers.rows()
  calls = []

  def record(inputs):
    calls.append(inputs)
    return jnp.where(inputs.weights == 0, jnp.nan, inputs.logprobs)

  bad = (jnp.where(weights != 0, x, jnp.nan) for x in (new, old, credit))
  terms, _ = helpers.terms(*bad, weights, segments, **_custom(record))
  np.testing.assert_allclose(terms.sum(), jnp.sum(weights * new), rtol=1e-5)
  (inputs,) = calls
  for value in inputs[:-1]:
    assert np.isfinite(value).all() and not value[weights == 0].any()
  np.testing.assert_array_equal(inputs.segment_ids, segments)


@pytest.mark.parametrize(
  ('function', 'message'),
  [
    (
      lambda x: x.logprobs.sum(),
      r'must return a loss per token: got shape \(\), expected shape \(5,\)'
      '; do not sum or average',
    ),
    (lambda x: x.logprobs[:3], r'got shape \(3,\)'),
    (lambda x: 0.0, 'must return a loss per token: got float'),
    (lambda x: None, 'a loss per token: got NoneType'),
    (
      lambda x: (x.logprobs, {'a': x.logprobs.mean()}),
      r"must return a metric 'a' per token: got shape \(\)",
    ),
    (lambda x: (x.logprobs, x.logprobs), 'as a dict of arrays: got'),
  ],
)
def test_outputs_of_another_shape_raise(function, message):
  arrays = (helpers.NEW, helpers.OLD, helpers.CREDIT, helpers.ONES)
  with pytest.raises(ValueError, match=message) as error:
    helpers.terms(*arrays, **_custom(function))
  assert '\n' not in str(error.value)
  assert 'config.<stage>.loss.rl.import_path' in str(error.value)
