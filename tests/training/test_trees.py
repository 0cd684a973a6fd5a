"""Trees: gradients and metrics are those of whole samples, to rounding."""

import dataclasses

import jax
import numpy as np
import pytest

from posttrain import schema, types
from posttrain.data import packing, preferences
from posttrain.losses import combine
from posttrain.models import lora, transformer
from posttrain.training import objectives, pair_objectives
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


def _pack(samples, trees, row_tokens=64, rows=1):
  batch, left = packing.pack(
    samples,
    row_tokens=row_tokens,
    rows=rows,
    micro_batches=4,
    envs=ENVS,
    longest=32,
    trees=trees,
  )
  assert not left
  return batch


def _accumulate(objective, batch, params, base=None):
  def run(params, batch):
    whole = lora.whole(params, base)
    batch = objective.before_updates(whole, batch)
    batch = objective.prepare(whole, batch)
    return train_step.accumulate(
      lambda params, micro: objective(lora.whole(params, base), micro),
      params,
      batch,
    )

  grads, metrics, total = jax.jit(run)(params, batch)
  return jax.device_get((grads, combine.means(metrics), total))


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
  tokens = [int((x.segment_ids > 0).sum()) for x in (whole, trees)]
  assert tokens[1] < tokens[0] - 30
  assert trees.num_micro_batches == (3 if rows == 32 else 1)
  for count in ('rl_count', 'ce_count', 'ref_kl_count', 'rl_sequences'):
    assert getattr(whole, count) == getattr(trees, count) > 0
  _equal(*(_accumulate(objective, x, params, base) for x in (whole, trees)))


def test_tokens_that_train_alike_count_once_for_each_sample():
  """Two samples that differ in one advantage share less than two equal ones."""
  (first, *others), rng = _samples(), np.random.default_rng(2)
  turned = np.append(first.advantages[:12], -first.advantages[12:])
  longer = _sample(rng, first.ids, 4)
  for name in types.TOKEN_FIELDS:
    getattr(longer, name)[: len(first)] = getattr(first, name)
  changed = dataclasses.replace(first, advantages=turned)
  samples = [first, first, changed, longer]
  samples += [dataclasses.replace(others[0], env='b'), *others]
  loss = schema.Loss(rl=schema.Clip(entropy_coef=0.1))
  objective = objectives.TokenComponents(MODEL, ENVS, loss)
  whole, trees = (_pack(samples, x, 256) for x in (False, 'trained'))
  untrained = _pack(samples, True, 256)
  # Of five tokens all but the last one, which is each sample's own, twice; and
  # those before the advantage that differs.
  tokens = [int((x.segment_ids > 0).sum()) for x in (trees, untrained)]
  assert tokens[0] == tokens[1] - 4 - 4 - 3
  for count in ('rl_count', 'ce_count', 'ref_kl_count', 'rl_sequences'):
    assert getattr(whole, count) == getattr(trees, count) > 0
  _equal(
    *(_accumulate(objective, x, fixtures.params(MODEL)) for x in (whole, trees))
  )


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
  tokens = [int((x.segment_ids > 0).sum()) for x in (whole, trees)]
  assert tokens[1] == tokens[0] - 8 - 5 - 6
  _equal(*(_accumulate(objective, x, params) for x in (whole, trees)))
