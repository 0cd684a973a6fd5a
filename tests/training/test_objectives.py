"""The objective: components add, diagnostics are over the right tokens."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, scoring, sharding, types
from posttrain.losses import combine
from posttrain.training import arrays, objectives, optim
from posttrain.training import step as train_step
from tests import fixtures

ENVS = ('a', 'b')
PARAMS = fixtures.params()


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
    segment_ids=segments,
    positions=positions,
    env_ids=np.where(segments > 0, segments - 1, -1).astype(np.int32),
    rl_sequences=fixtures.sequences(segments, streams['rl_weights']),
    num_micro_batches=np.int32(micro_batches),
    **streams,
    **{
      name.replace('weights', 'count'): np.float32(np.count_nonzero(x))
      for name, x in streams.items()
    },
  )


@functools.cache
def _accumulate(loss):
  objective = objectives.TokenComponents(fixtures.MODEL, ENVS, loss)
  return jax.jit(functools.partial(train_step.accumulate, objective))


def _measure(batch, loss=None):
  grads, metrics, total = _accumulate(loss)(PARAMS, batch)
  return jax.device_get((grads, combine.means(metrics), total))


@jax.jit
def _score(params, batch):
  return jax.vmap(lambda *x: scoring.score(params, fixtures.MODEL, *x)[0])(
    batch.ids, batch.positions, batch.segment_ids, batch.temperatures
  )


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
    rl=schema.Clip(low=0.0, high=0.0), ref_kl=schema.RefKl(estimator='k3')
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


def _scored(monkeypatch):
  """A model that is quick to compile: a table of logprobs, and of entropies."""

  def score(self, params, micro):
    predicted = (micro.positions > 0) & (micro.segment_ids != 0)
    tables = params['policy'], params['entropy']
    return None, *(jnp.where(predicted, x[micro.ids], 0.0) for x in tables)

  monkeypatch.setattr(objectives.TokenComponents, '_score', score)
  rng = np.random.default_rng(3)
  shape = (2, fixtures.MODEL.vocab_size)
  tables = np.float32(-4 + 0.3 * rng.normal(size=shape))
  return dict(zip(('policy', 'entropy'), tables, strict=True))


@pytest.mark.parametrize('aggregation', ['token', 'sequence', 'constant'])
def test_the_cut_does_not_matter(monkeypatch, aggregation):
  """As 4 micro-batches of a row, and as one; and as the mean by a loop."""
  params = _scored(monkeypatch)
  constant = 11 if aggregation == 'constant' else None
  node = schema.Gspo(
    low=0.05,
    high=0.05,
    aggregation=aggregation,
    constant_tokens=constant,
    entropy_coef=0.2,
  )
  objective = objectives.TokenComponents(
    fixtures.MODEL, ENVS, schema.Loss(rl=node)
  )
  accumulate = jax.jit(functools.partial(train_step.accumulate, objective))
  batch, results = _only(_batch(), 'rl'), []
  batch = dataclasses.replace(
    batch, advantages=np.float32(batch.segment_ids - 1.5)
  )
  for count in (4, 1) if aggregation == 'sequence' else (4,):
    cut = jax.tree.map(
      lambda x: x.reshape(count, 4 // count, 16) if x.ndim else x,  # noqa: B023
      dataclasses.replace(batch, num_micro_batches=np.int32(count)),
    )
    grads, metrics, total = accumulate(params, cut)
    results.append((grads, combine.means(metrics), total))
  for whole in results[1:]:
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-6),
      results[0],
      whole,
    )
  values, entropies = (x[batch.ids] for x in params.values())
  weights = batch.rl_weights
  means, sums, sizes = [], [], []
  for place in np.ndindex(2, 2, 2):
    *row, segment = place
    here = batch.segment_ids[tuple(row)] == segment + 1
    here &= weights[tuple(row)] != 0
    if not here.any():
      continue
    new, old, w, h = (
      x[tuple(row)][here]
      for x in (values, batch.sampler_logprobs, weights, entropies)
    )
    s, a = np.exp(np.mean(new - old)), segment - 0.5
    each = -w * min(s * a, np.clip(s, 0.95, 1.05) * a) - 0.2 * h
    means.append(each.mean())
    sums.append(each.sum())
    sizes.append(each.size)
  expected = {
    'token': np.sum(sums) / np.sum(sizes),
    'sequence': np.mean(means),
    'constant': np.mean(sums) / 11,
  }[aggregation]
  assert len(sizes) == batch.rl_sequences and min(sizes) < max(sizes)
  np.testing.assert_allclose(results[0][2], expected, rtol=1e-4)


def test_several_updates_are_relative_to_the_policy_before_them(monkeypatch):
  """Against passes that get the first parameters' logprobs from outside."""
  params, batch = _scored(monkeypatch), _only(_batch(), 'rl')
  node = schema.Clip(low=0.02, high=0.02, sampler_is_mode='token_truncate')
  objective = objectives.TokenComponents(
    fixtures.MODEL, ENVS, schema.Loss(rl=node)
  )
  optimizer = optim.make(schema.Optim(lr=0.03, warmup_steps=0), 4)

  def train(batch, updates):
    step = train_step.make_train_step(
      objective,
      optimizer,
      mesh=sharding.make_mesh(schema.Mesh()),
      rules=(('.*', ()),),
      updates=updates,
    )
    state = train_step.init_state(
      jax.tree.map(jnp.asarray, params), optimizer, average=False
    )
    measured = []
    for _ in range(2 // updates):
      state, metrics = step(state, batch)
      measured.append(jax.device_get(metrics))
    return jax.device_get(state.params), measured

  logprobs = np.where(batch.positions > 0, params['policy'][batch.ids], 0.0)
  outside = arrays.ScoredBatch(**vars(batch), proximal_logprobs=logprobs)
  both, (metrics,) = train(batch, updates=2)
  expected, (first, second) = train(outside, updates=1)
  assert fixtures.worst(expected, both) < 1e-6
  assert first['rl/is_masked'] == 0 < second['rl/is_masked']
  for name in ('rl/is_masked', 'rl/sampler_is_mean', 'loss/rl'):
    mean = (first[name] + second[name]) / 2
    np.testing.assert_allclose(metrics[name], mean, rtol=1e-5)
  assert first['rl/sampler_is_mean'] == second['rl/sampler_is_mean']


def test_every_type_reads_its_options(monkeypatch):
  """Traced, so that a constant that no function takes is an error."""
  params, batch = _scored(monkeypatch), _batch()
  for node in (
    schema.Dppo(),
    schema.Ipo(),
    schema.Clip(delta=3.0),
    schema.Gspo(),
    schema.Cispo(sampler_is_mode='token_mask', off_policy_mask=0.1),
    schema.Dro(),
    schema.CustomRl(
      import_path='tests.losses.helpers:mirror', entropy_coef=0.1
    ),
  ):
    objective = objectives.TokenComponents(
      fixtures.MODEL, ENVS, schema.Loss(rl=node)
    )
    _, metrics, _ = jax.eval_shape(
      functools.partial(train_step.accumulate, objective), params, batch
    )
    corrected = node.sampler_is_mode != 'none'
    assert ('rl/sampler_is_cut' in metrics) is corrected
    assert ('rl/is_off_policy' in metrics) is corrected
    assert ('rl/ratio' in metrics) is (node.type == 'custom')


def test_shares_of_environments_add_up():
  batch = _batch()
  _, metrics, _ = _measure(batch)
  for component in types.COMPONENTS:
    shares = [metrics[f'loss/{component}/{name}'] for name in ENVS]
    np.testing.assert_allclose(
      sum(shares), metrics[f'loss/{component}'], rtol=1e-5
    )
    assert all(shares)
    weights = getattr(batch, f'{component}_weights')
    for i, name in enumerate(ENVS):
      count = np.count_nonzero(weights[batch.env_ids == i])
      # A sum and no mean, so also over several micro-batches.
      assert metrics[f'tokens/{component}/{name}'] == count > 0
  logprobs = _logprobs(batch)
  ce = np.where(batch.env_ids == 1, -batch.ce_weights * logprobs, 0.0)
  np.testing.assert_allclose(
    metrics['loss/ce/b'], ce.sum() / batch.ce_count, rtol=1e-4
  )


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
    if name.startswith(('rl/', 'ref_kl/', 'mismatch/', 'loss/r', 'tokens/r')):
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
    (schema.Ipo, {'threshold': -1.0}, 'threshold must be >= 0'),
    (
      schema.Clip,
      {'high': 0.5, 'delta': 1.5},
      r'delta must be None or > 1 \+ high=1.5: got 1.5',
    ),
    (schema.Dppo, {'aggregation': 'mean'}, 'aggregation must be one of'),
    (
      schema.Clip,
      {'aggregation': 'constant'},
      "constant_tokens must be > 0 where aggregation is 'constant': got No",
    ),
    (schema.Dppo, {'entropy_coef': -1.0}, 'entropy_coef must be >= 0'),
    (schema.Dppo, {'sampler_is_mode': 'tis'}, 'sampler_is_mode must be on'),
    (
      schema.Dppo,
      {'sampler_is_clip_min': 4.0, 'sampler_is_mode': 'token_mask'},
      r'sampler_is_clip_min must be None or in \[0, sampler_is_clip_max=3',
    ),
    (schema.Dppo, {'off_policy_mask': -0.1}, 'off_policy_mask must be None or'),
    (schema.CustomRl, {}, 'import_path must be an import path'),
    (schema.RefKl, {'estimator': 'k1'}, 'estimator must be one of'),
  ],
)
def test_bad_options(node, options, message):
  with pytest.raises(schema.FieldError, match=message):
    node(**options)


def test_experts_are_balanced_by_option():
  sizes = schema.Experts(count=3, per_token=1, mlp_dim=8)
  model = dataclasses.replace(fixtures.MODEL, experts=sizes)
  params, batch = fixtures.params(model), _batch()

  def measure(balance):
    loss = schema.Loss(balance=balance)
    objective = objectives.TokenComponents(model, ENVS, loss)
    grads, metrics, total = jax.jit(
      functools.partial(train_step.accumulate, objective)
    )(params, batch)
    return grads, combine.means(metrics), total

  plain, metrics, total = measure(0.0)
  grads, balanced, more = measure(2.0)
  assert 1 < metrics['router/balance'] <= 3
  assert 1 < metrics['router/max_load'] <= 3
  assert 0 < metrics['router/entropy'] < np.log(3)
  assert 'loss/balance' not in metrics
  np.testing.assert_allclose(more - total, balanced['loss/balance'], rtol=1e-4)
  # The micro-batches have about as many tokens.
  expected = 2 * metrics['router/balance']
  np.testing.assert_allclose(balanced['loss/balance'], expected, rtol=0.1)
  router = [x['layers']['experts']['router']['kernel'] for x in (plain, grads)]
  assert np.abs(router[0] - router[1]).max() > 1e-4
