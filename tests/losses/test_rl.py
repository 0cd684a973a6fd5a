"""The rl component, for every type: members, weights, aggregation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema
from posttrain.losses import combine, rl
from tests.losses import helpers
from tests.losses.helpers import CREDIT, NEW, OLD, ONES

by_type = pytest.mark.parametrize('kind', helpers.TYPES, ids=helpers.name)


@by_type
def test_values_at_non_members_have_no_effect(kind):
  ends = jnp.array([0, 4])
  weights = ONES.at[ends].set(0.0)
  (clean, wanted), wanted_grad = helpers.grad(NEW, OLD, CREDIT, weights, **kind)
  for bad in (np.nan, np.inf, -np.inf):
    dirty = (x.at[ends].set(bad) for x in (NEW, OLD, CREDIT))
    (total, metrics), grad = helpers.grad(*dirty, weights, **kind)
    np.testing.assert_array_equal(total, clean)
    np.testing.assert_array_equal(grad, wanted_grad)
    jax.tree.map(np.testing.assert_array_equal, metrics, wanted)


@by_type
@pytest.mark.parametrize('mode', ['none', 'sequence_mask'])
def test_no_members_give_0(kind, mode):
  (total, metrics), grad = helpers.grad(
    NEW,
    OLD,
    CREDIT,
    0 * ONES,
    None,
    ONES,
    **kind,
    entropy_coef=1.0,
    aggregation='sequence',
    sampler_is_mode=mode,
  )
  assert total == 0 and not grad.any()
  assert not any(combine.means(metrics).values())


@by_type
def test_masked_equals_sliced(kind):
  arrays = (*helpers.random(), jnp.arange(10))
  keep = np.asarray(arrays[3]) != 0
  whole, metrics = helpers.total(*arrays, **kind)
  sliced, expected = helpers.total(*(x[keep] for x in arrays), **kind)
  np.testing.assert_allclose(sliced, whole, rtol=1e-5)
  for name in metrics:
    np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5)


@by_type
def test_weights_scale_the_loss_but_not_its_metrics(kind):
  *arrays, weights = helpers.random()
  loss = functools.partial(helpers.total, *arrays, **kind)
  (one, metrics), (three, same) = loss(weights), loss(3 * weights)
  np.testing.assert_allclose(three, 3 * one, rtol=1e-5)
  jax.tree.map(np.testing.assert_array_equal, metrics, same)


def _aggregated(values, segments, weights, aggregation, constant=None):
  """Returns the aggregate of per-token values, by loops."""
  indices = helpers.sequences(segments, weights)
  sums = [np.sum(values[row, tokens]) for row, tokens in indices]
  sizes = [tokens.size for _, tokens in indices]
  if aggregation == 'token':
    return sum(sums) / sum(sizes)
  if aggregation == 'sequence':
    return np.mean([s / n for s, n in zip(sums, sizes, strict=True)])
  return np.mean(sums) / constant


@pytest.mark.parametrize('kind', helpers.TYPES[::3], ids=helpers.name)
@pytest.mark.parametrize('aggregation', schema.AGGREGATIONS)
def test_aggregations_equal_loops(kind, aggregation):
  """The mean includes weights and entropy bonus; counts are of members."""
  new, old, credit, weights, segments = helpers.rows()
  weights, entropy = weights * jnp.where(segments == 2, -0.5, 2.0), -0.7 * new
  each, _ = helpers.terms(
    new, old, credit, jnp.where(weights != 0, 1.0, 0.0), segments, **kind
  )
  values = np.asarray(weights * each - 0.3 * entropy, float)
  constant = 14 if aggregation == 'constant' else None
  expected = _aggregated(values, segments, weights, aggregation, constant)
  terms, _ = helpers.terms(
    new,
    old,
    credit,
    weights,
    segments,
    entropy,
    **kind,
    entropy_coef=0.3,
    aggregation=aggregation,
  )
  tokens = np.count_nonzero(weights)
  below = rl.denominator(
    jnp.float32(tokens),
    jnp.float32(5),
    aggregation=aggregation,
    constant_tokens=constant,
  )
  np.testing.assert_allclose(terms.sum() / below, expected, rtol=1e-5)
  assert not np.asarray(terms)[np.asarray(weights) == 0].any()


def test_sequences_of_one_length_make_aggregations_equal():
  new, old, credit, _ = helpers.random()
  segments = jnp.repeat(jnp.arange(2), 5)
  losses = [
    helpers.total(new, old, credit, jnp.ones(10), segments, aggregation=name)[0]
    / rl.denominator(
      jnp.float32(10), jnp.float32(2), aggregation=name, constant_tokens=5
    )
    for name in schema.AGGREGATIONS
  ]
  np.testing.assert_allclose(losses, losses[0], rtol=1e-6)


def test_packing_does_not_change_the_loss():
  """Sequences in separate rows, and several in one row."""
  *arrays, segments = helpers.rows()
  options = {
    'type': 'gspo',
    'low': 0.02,
    'high': 0.02,
    'aggregation': 'sequence',
    'sampler_is_mode': 'sequence_truncate',
  }
  whole, metrics = helpers.total(*arrays, segments, **options)
  apart, measured = 0.0, []
  for segment in range(4):
    alone = [jnp.where(segments == segment, x, 0) for x in (*arrays, segments)]
    total, some = helpers.total(*alone, **options)
    apart += total
    measured.append(some)
  np.testing.assert_allclose(apart, whole, rtol=1e-5)
  means = combine.means(functools.reduce(combine.merge, measured))
  for name, value in combine.means(metrics).items():
    np.testing.assert_allclose(means[name], value, rtol=1e-5, err_msg=name)


def test_the_entropy_bonus_is_over_members():
  new, old, credit, weights, segments = helpers.rows()
  weights *= 3.0  # no weight multiplies it
  entropy = jnp.where(weights != 0, -new, jnp.nan)

  @jax.value_and_grad
  def loss(entropy):
    return helpers.terms(
      new, old, credit, weights, segments, entropy, entropy_coef=0.25
    )[0].sum()

  total, grad = loss(entropy)
  without, _ = helpers.total(new, old, credit, weights, segments)
  member = np.asarray(weights) != 0
  expected = without + 0.25 * np.asarray(new)[member].sum()
  np.testing.assert_allclose(total, expected, rtol=1e-5)
  np.testing.assert_array_equal(grad, np.where(member, -0.25, 0.0))
