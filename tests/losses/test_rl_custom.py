"""A user's loss: what it sees, and that its shapes are held to."""

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain.losses import combine
from tests.losses import helpers


def _custom(function, **kwargs):
  return {'type': 'custom', 'function': function, 'kwargs': kwargs}


def test_it_may_be_clip():
  """The formula of `clip` from outside, weights and mean left to us."""
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
    found, grad = helpers.grad(
      *arrays, **_custom(clip, low=0.1, high=0.2), aggregation=aggregation
    )
    clean, wanted = helpers.grad(
      *arrays, type='clip', low=0.1, high=0.2, aggregation=aggregation
    )
    np.testing.assert_allclose(found[0], clean[0], rtol=1e-5)
    np.testing.assert_allclose(grad, wanted, rtol=1e-5, atol=1e-7)
  member = np.asarray(weights) != 0
  rose = np.asarray(new > old)[member].mean()
  assert found[1].keys() == {'rose'}
  np.testing.assert_allclose(combine.means(found[1])['rose'], rose, rtol=1e-6)


def test_it_sees_nothing_of_non_members():
  new, old, credit, weights, segments = helpers.rows()
  seen = []

  def look(inputs):
    seen.append(inputs)
    return jnp.where(inputs.weights == 0, jnp.nan, inputs.logprobs)

  bad = (jnp.where(weights != 0, x, jnp.nan) for x in (new, old, credit))
  terms, _ = helpers.terms(*bad, weights, segments, **_custom(look))
  np.testing.assert_allclose(terms.sum(), jnp.sum(weights * new), rtol=1e-5)
  (inputs,) = seen
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
def test_what_it_returns_is_checked(function, message):
  arrays = (helpers.NEW, helpers.OLD, helpers.CREDIT, helpers.ONES)
  with pytest.raises(ValueError, match=message) as error:
    helpers.terms(*arrays, **_custom(function))
  assert '\n' not in str(error.value)
  assert 'config.<stage>.loss.rl.import_path' in str(error.value)
