"""The objective: components add, diagnostics are over the right tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import arrays, objectives, schema, scoring, train_step, types
from posttrain.losses import combine
from posttrain.models import transformer
from tests import fixtures

ENVS = ('a', 'b')
PARAMS = jax.jit(lambda: transformer.init(jax.random.key(0), fixtures.MODEL))()


def _batch(seed=0, micro_batches=2, rows=2, tokens=16):
  """Every stream is live somewhere; two segments and padding in a row."""
  rng = np.random.default_rng(seed)
  shape = (micro_batches, rows, tokens)
  where = np.arange(tokens)
  segments = np.where(where < 7, 1, np.where(where < 13, 2, 0))
  positions = np.where(where < 7, where, np.where(where < 13, where - 7, 0))
  segments, positions = (
      np.broadcast_to(x, shape).astype(np.int32) for x in (segments, positions)
  )
  live = positions > 0
  mask = live & (rng.random(shape) < 0.7)

  def weights(part, where):
    member = where & (rng.random(shape) < part)
    return np.float32(rng.normal(size=shape) * member)

  streams = {
      'rl_weights': weights(0.6, mask),
      'ce_weights': weights(0.4, live),
      'ref_kl_weights': weights(0.5, mask),
  }
  return arrays.Batch(
      ids=rng.integers(0, fixtures.MODEL.vocab_size, shape, np.int32),
      mask=mask,
      sampler_logprobs=np.float32(-4 + 0.3 * rng.normal(size=shape)) * mask,
      temperatures=np.full(shape, 0.8, np.float32),
      versions=np.where(mask & (rng.random(shape) < 0.8), 3, -1).astype('i4'),
      advantages=np.float32(rng.normal(size=shape)),
      ref_logprobs=np.float32(-4 + 0.3 * rng.normal(size=shape)),
      segment_ids=segments, positions=positions,
      env_ids=np.where(segments > 0, segments - 1, -1).astype(np.int32),
      live=np.int32(micro_batches), **streams,
      **{name.replace('weights', 'count'): np.float32(np.count_nonzero(x))
         for name, x in streams.items()},
  )  # fmt: skip


@functools.cache
def _accumulate(loss):
  objective = objectives.TokenComponents(fixtures.MODEL, ENVS, loss)
  return jax.jit(functools.partial(train_step.accumulate, objective))


def _measure(batch, loss=None):
  grads, metrics, total = _accumulate(loss)(PARAMS, batch)
  return jax.device_get((grads, combine.means(metrics), total))


@jax.jit
def _score(params, batch):
  return jax.vmap(
      lambda *x: scoring.score(params, fixtures.MODEL, *x)[0]
  )(batch.ids, batch.positions, batch.segment_ids, batch.temperatures)


def _logprobs(batch):
  return np.asarray(_score(PARAMS, batch))


def _only(batch, component):
  """The batch with one component alone."""
  changes = {}
  for name in set(types.COMPONENTS) - {component}:
    changes[f'{name}_weights'] = np.zeros_like(batch.rl_weights)
    changes[f'{name}_count'] = np.float32(0)
  return dataclasses.replace(batch, **changes)


def test_components_add_each_over_its_own_count():
  batch = _batch()
  grads, metrics, total = _measure(batch)
  parts = [_measure(_only(batch, name)) for name in types.COMPONENTS]
  np.testing.assert_allclose(total, sum(p[2] for p in parts), rtol=1e-5)
  added = jax.tree.map(lambda *x: sum(x), *(p[0] for p in parts))
  assert fixtures.worst(grads, added) < 1e-5
  for name, (_, alone, value) in zip(types.COMPONENTS, parts, strict=True):
    np.testing.assert_allclose(metrics[f'loss/{name}'], value, rtol=1e-5)
    assert value and alone['loss/total'] == alone[f'loss/{name}']
  # By numpy, from the logprobs.
  logprobs = _logprobs(batch)
  ratio = np.exp(logprobs - batch.sampler_logprobs)
  change = np.exp(logprobs) - np.exp(batch.sampler_logprobs)
  members = (batch.rl_weights != 0) | (batch.ref_kl_weights != 0)
  assert (np.abs(change[members]) < 0.2).all()  # nothing is masked
  squared = 1e-3 * (logprobs - batch.sampler_logprobs) ** 2
  rl = batch.rl_weights * (squared - batch.advantages * ratio)
  ref_kl = batch.ref_kl_weights * (
      squared - (batch.ref_logprobs - logprobs) * ratio
  )
  ce = -batch.ce_weights * logprobs
  expected = {'rl': rl, 'ce': ce, 'ref_kl': ref_kl}
  for name, values in expected.items():
    count = np.count_nonzero(getattr(batch, f'{name}_weights'))
    np.testing.assert_allclose(
        metrics[f'loss/{name}'], values.sum() / count, rtol=1e-4
    )


def test_options_reach_the_components():
  batch = _batch()
  _, default, _ = _measure(batch)
  loss = schema.Loss(
      rl=schema.Clip(low=0.0, high=0.0),
      ref_kl=schema.RefKl(estimator='k3'),
  )
  _, other, _ = _measure(batch, loss)
  assert 'rl/clip_high' in other and 'rl/clip_high' not in default
  assert 'ref_kl/k3' in other and 'ref_kl/is_masked' not in other
  assert other['rl/is_masked'] > 0 == default['rl/is_masked']
  gap = (batch.ref_logprobs - _logprobs(batch))[batch.ref_kl_weights != 0]
  k3 = np.exp(gap) - gap - 1
  np.testing.assert_allclose(other['ref_kl/k3'], k3.mean(), rtol=1e-4)
  for metrics in (default, other):
    np.testing.assert_allclose(metrics['ref_kl/kl'], -gap.mean(), rtol=1e-4)


def test_mismatch_is_over_what_a_policy_sampled():
  """Whatever its weights; largest over all micro-batches, not their sum."""
  batch = _batch()
  distance = _logprobs(batch) - batch.sampler_logprobs
  here = batch.mask & (batch.versions >= 0)
  assert 0 < here.sum() < batch.mask.sum()
  distance = distance[here]
  expected = {
      'mismatch/abs_mean': np.abs(distance).mean(),
      'mismatch/max': np.abs(distance).max(),
      'mismatch/k3': np.mean(np.exp(distance) - distance - 1),
  }
  for component in ('rl', 'ce'):
    _, metrics, _ = _measure(_only(batch, component))
    for name, value in expected.items():
      np.testing.assert_allclose(metrics[name], value, rtol=1e-4)
  # Another order, so another micro-batch holds the largest.
  flipped = jax.tree.map(lambda x: x[::-1] if x.ndim else x, batch)
  _, metrics, _ = _measure(flipped)
  for name, value in expected.items():
    np.testing.assert_allclose(metrics[name], value, rtol=1e-4)


def test_on_policy_there_is_no_mismatch_and_no_kl():
  batch = _batch()
  logprobs = _logprobs(batch)
  batch = dataclasses.replace(
      batch, sampler_logprobs=logprobs, ref_logprobs=logprobs
  )
  grads, metrics, _ = _measure(_only(batch, 'ref_kl'))
  for name in ('mismatch/max', 'mismatch/k3', 'ref_kl/kl', 'loss/ref_kl'):
    np.testing.assert_allclose(metrics[name], 0.0, atol=1e-5)
  assert max(np.abs(g).max() for g in jax.tree.leaves(grads)) < 1e-5


def test_ce_alone_is_unchanged_by_the_others():
  """Supervised batches: nothing of rl and ref_kl, in value and gradient."""
  batch = _only(_batch(), 'ce')
  batch = dataclasses.replace(batch, versions=np.full_like(batch.versions, -1))
  grads, metrics, total = _measure(batch)

  def plain(params):
    return -jnp.sum(batch.ce_weights * _score(params, batch)) / batch.ce_count

  value, expected = jax.jit(jax.value_and_grad(plain))(PARAMS)
  np.testing.assert_allclose(total, value, rtol=1e-5)
  assert fixtures.worst(grads, expected) < 1e-5
  for name, value in metrics.items():
    if name.startswith(('rl/', 'ref_kl/', 'mismatch/', 'loss/r')):
      assert value == 0, name


def test_entropy_and_nll_are_per_environment():
  _, metrics, _ = _measure(_batch())
  batch = _batch()
  logprobs = _logprobs(batch)
  for i, name in enumerate(ENVS):
    here = batch.mask & (batch.env_ids == i)
    np.testing.assert_allclose(
        metrics[f'nll/{name}'], -logprobs[here].mean(), rtol=1e-5
    )
    assert 0 < metrics[f'entropy/{name}'] <= np.log(fixtures.MODEL.vocab_size)


@pytest.mark.parametrize(
    ('node', 'options', 'message'),
    [
        (schema.Dppo, {'low': -0.1}, 'low must be >= 0'),
        (schema.Dppo, {'kl_tau': float('nan')}, 'kl_tau must be >= 0'),
        (schema.Dppo, {'max_log_ratio': 89.0}, r'max_log_ratio must be in \(0'),
        (schema.Clip, {'high': float('inf')}, 'high must be finite'),
        (schema.Clip, {'max_log_ratio': 0.0}, r'max_log_ratio must be in \(0'),
        (schema.RefKl, {'estimator': 'k1'}, 'estimator must be one of'),
        (schema.RefKl, {'estimator': 'k3', 'kl_tau': 0.0},
         r"kl_tau must be left at 0.001: got 0.0; nothing reads it where"),
    ],
)  # fmt: skip
def test_bad_options(node, options, message):
  with pytest.raises(schema.FieldError, match=message):
    node(**options)
