"""Trees: gradients and metrics are those of whole samples, to rounding."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, types
from posttrain.data import packing, preferences
from posttrain.losses import combine
from posttrain.models import lora, transformer
from posttrain.pipeline import batches
from posttrain.training import objectives, pair_objectives, token_export
from posttrain.training import step as train_step
from tests import fixtures

ENVS = ('a', 'b')
MODEL = dataclasses.replace(fixtures.MODEL, layers=2, embed_dim=32, mlp_dim=48)
LOSSES = {
  'gspo': schema.Gspo(aggregation='sequence', entropy_coef=0.1),
  'dppo': schema.Dppo(sampler_is_mode='sequence_truncate', off_policy_mask=0.1),
}


def _sample(
  rng, prompt, length, env='a', streams=('rl', 'ref_kl'), turns=False
):
  """Returns an answer to a prompt; with turns, an observation is within it."""
  size = len(prompt) + length
  mask = np.arange(size) >= len(prompt)
  if turns:
    mask &= (np.arange(size) - len(prompt)) // 2 != 1
  weights = {
    f'{name}_weights': np.float32(mask & (name in streams))
    for name in types.COMPONENTS
  }
  if 'ce' in streams and turns:  # ECHO: the observation
    weights['ce_weights'] = np.float32(~mask & (np.arange(size) >= len(prompt)))
  ids = rng.integers(0, MODEL.vocab_size, length)

  def normal(mean, sigma):
    return np.float32(rng.normal(mean, sigma, size))

  return types.Sample(
    env=env,
    row='',
    ids=np.append(prompt, ids).astype(np.int32),
    mask=mask,
    roles=np.zeros(size, np.int8),
    is_content=mask,
    sampler_logprobs=normal(-4, 0.3) * mask,
    temperatures=np.where(mask & ('ce' not in streams), 0.8, 1).astype('f4'),
    versions=np.where(mask, 3, -1).astype(np.int32),
    advantages=normal(0, 1),
    ref_logprobs=normal(-4, 0.3),
    **weights,
  )


def _samples():
  """Groups of two environments, one of several turns; a prompt within another;
  and a demonstration that begins as a group does."""
  rng = np.random.default_rng(0)
  first, second = rng.integers(0, 250, 9), rng.integers(0, 250, 6)
  samples = [_sample(rng, first, n) for n in (5, 3, 6)]
  samples += [
    _sample(rng, np.append(first, [7, 8]), n, 'b', ('rl', 'ce'), turns=True)
    for n in (6, 7)
  ]
  samples += [_sample(rng, second, n, 'b') for n in (4, 2)]
  return [*samples, _sample(rng, second[:4], 5, 'a', ('ce',))]


def _pack(samples, trees, row_tokens=64, rows=1, trained=False):
  batch, left = packing.pack(
    samples,
    packing.Layout(
      rows=rows, longest=32, envs=ENVS, trees=trees, trained=trained
    ),
    micro_batches=4,
    row_tokens=row_tokens,
  )
  assert not left
  return batch


def _accumulate(objective, batch, params, base=None):
  def run(params, batch):
    whole = lora.whole(params, base)
    batch, _ = objective.before_updates(whole, batch)
    batch = objective.prepare(whole, batch)
    return train_step.accumulate(
      lambda params, micro: objective(lora.whole(params, base), micro),
      params,
      batch,
    )

  grads, metrics, total = jax.jit(run)(params, batch)
  return jax.device_get((grads, combine.means(metrics), total))


def _sizes(whole, trees):
  """Returns the tokens that trees share; checks what is counted of a batch."""
  counts = [batches.metrics(x) for x in (whole, trees)]
  shared = counts[1]['batch/shared_tokens']
  assert counts[0]['batch/tokens'] == counts[1]['batch/tokens'] + shared
  sampled = [x['batch/completion_tokens'] for x in counts]
  mask = whole.mask[: int(whole.num_micro_batches)]
  assert sampled[0] == sampled[1] == mask.sum() > 0
  return shared


def _equal(one, other):
  assert fixtures.worst(one[0], other[0]) < 1e-4
  assert one[1].keys() == other[1].keys()
  for name in one[1]:
    np.testing.assert_allclose(
      one[1][name], other[1][name], rtol=1e-4, atol=1e-5, err_msg=name
    )


@pytest.mark.parametrize(
  'name', ['gspo', pytest.param('dppo', marks=pytest.mark.slow)]
)
def test_a_tree_trains_as_whole_samples_do(name):
  """In one row; and, with LoRA, cut into two of which each repeats a prompt."""
  objective = objectives.TokenComponents(
    MODEL, ENVS, schema.Loss(rl=LOSSES[name])
  )
  samples, rows, base = _samples(), 128, None
  params = weights = fixtures.params(MODEL)
  if name == 'dppo':
    rows, options = 32, schema.Lora(rank=4)
    params = lora.init(jax.random.key(1), options, weights)
    params = jax.tree.map(lambda x: x + 0.01, params)
    base = lora.Base(weights, lora.scale(options))
  whole, trees = _pack(samples, False, 128), _pack(samples, True, rows)
  assert _sizes(whole, trees) > 30
  assert trees.num_micro_batches == (3 if rows == 32 else 1)
  for count in ('rl_count', 'ce_count', 'ref_kl_count', 'rl_sequences'):
    assert getattr(whole, count) == getattr(trees, count) > 0
  _equal(*(_accumulate(objective, x, params, base) for x in (whole, trees)))


class _Table(objectives.TokenComponents):
  """Scores tokens by a table, which compiles at once."""

  def _score(self, params, micro):
    scores = params[micro.ids, micro.positions % 5]
    return None, -jax.nn.softplus(scores), jnp.square(scores)


@functools.cache
def _alike(echo):
  """Returns whole samples and trees of those that train alike.

  Some have an advantage or version of their own, or another environment.

  Args:
    echo: whether observations are ce members, else all have ref_kl.
  """
  rng, samples = np.random.default_rng(5), []
  streams = ('rl', 'ce' if echo else 'ref_kl')
  for env, other in (ENVS, ENVS[::-1]):
    first = _sample(rng, rng.integers(0, 250, 7), 6, env, streams, turns=echo)
    longer = _sample(rng, first.ids, 4, env, streams)
    for name in types.TOKEN_FIELDS:
      getattr(longer, name)[:13] = getattr(first, name)
    turned = np.append(first.advantages[:11], -first.advantages[11:])
    versions = np.append(first.versions[:10], first.versions[10:] + 1)
    samples += [first, first, longer, longer]
    samples += [
      dataclasses.replace(first, env=other),
      dataclasses.replace(first, advantages=turned),
      dataclasses.replace(first, versions=versions),
    ]
  whole, trees = (_pack(samples, x, 256, trained=x) for x in (False, True))
  untrained = _sizes(whole, _pack(samples, True, 256))
  assert _sizes(whole, trees) > untrained + 30 and trees.copies.max() > 3
  return whole, trees


@pytest.mark.parametrize(
  'rl, estimator',
  [
    (schema.Dppo(low=1e-3, high=1e-3, entropy_coef=0.1), 'reverse'),
    (schema.Ipo(threshold=1e-3), 'k3'),
    (
      schema.Clip(
        low=0.01,
        high=0.01,
        delta=1.05,
        aggregation='constant',
        constant_tokens=9,
      ),
      'reverse',
    ),
    (schema.Cispo(low=0.5, high=0.1, entropy_coef=0.2), 'echo'),
    pytest.param(schema.Dppo(), 'model', marks=pytest.mark.slow),
  ],
  ids=lambda x: getattr(x, 'type', x),
)
def test_tokens_that_train_alike_count_once_for_each_sample(rl, estimator):
  ref_kl = schema.RefKl(estimator='k3' if estimator == 'k3' else 'reverse')
  kind = objectives.TokenComponents if estimator == 'model' else _Table
  objective = kind(MODEL, ENVS, schema.Loss(rl=rl, ref_kl=ref_kl))
  both = _alike(estimator == 'echo')
  params = fixtures.params(MODEL)
  if kind is _Table:
    params = np.random.default_rng(0).normal(3, 1, (256, 5)).astype('f4')
  grad = jax.grad(objective, has_aux=True)
  results = []
  for batch in both:
    assert batch.num_micro_batches == 1
    micro = jax.tree.map(lambda x: x[0] if x.ndim else x, batch)
    grads, metrics = jax.device_get(grad(params, micro))
    results.append((grads, combine.means(metrics)))
  _equal(*results)


@pytest.mark.parametrize('echo', [False, True])
def test_a_token_export_has_every_sample_whole(echo):
  exports = []
  for batch in _alike(echo):
    records = []
    for micro, ids in enumerate(batch.ids):
      values = -ids / np.float32(50), ids / np.float32(7)
      for record in token_export.records(batch, micro, *values, ENVS):
        place = [record.pop(x) for x in ('micro_batch', 'row', 'segment')]
        assert len(place) == 3
        records.append(json.dumps(record))
    exports.append(sorted(records))
  assert len(exports[0]) == 14 and exports[0] == exports[1]


@pytest.mark.parametrize(
  'kind',
  [
    'sigmoid',
    *(pytest.param(x, marks=pytest.mark.slow) for x in ('kto', 'ranking')),
  ],
)
def test_answers_share_the_prompt_of_their_pair(kind):
  rng, pairs = np.random.default_rng(1), []
  for size in (8, 5, 6):
    prompt = rng.integers(0, 250, size)
    answers = [_sample(rng, prompt, n) for n in (4, 6)]
    pairs.append(types.Pair(*answers, np.float32(rng.normal(-25, 3, 2))))
  pairs.append(dataclasses.replace(pairs[0], rejected=None))
  params = fixtures.params(MODEL)
  if kind == 'ranking':
    loss = schema.Loss(ranking=schema.Ranking(lm_coef=0.1))
    objective = pair_objectives.Ranking(MODEL, (), loss)
    params = transformer.add_reward(params, keep_lm_head=True)
    params['reward'] = {'kernel': np.cos(np.arange(32, dtype='f'))}
  else:
    loss = {'sigmoid': schema.Sigmoid, 'kto': schema.Kto}[kind]()
    objective = pair_objectives.Preference(
      MODEL, (), schema.Loss(preference=loss)
    )
  whole, trees = (
    preferences.pack(
      pairs, pairs[3:], rows=1, row_tokens=64, per_row=4, trees=trees
    )
    for trees in (False, True)
  )
  assert _sizes(whole, trees) == 8 + 5 + 6
  _equal(*(_accumulate(objective, x, params) for x in (whole, trees)))
