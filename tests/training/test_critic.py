"""A critic in the train step: its credit, its optimizer, its invariances."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema
from posttrain.data import packing
from posttrain.models import lora, transformer
from posttrain.training import objectives
from tests import fixtures
from tests.training import test_trees as trees

pytestmark = pytest.mark.slow  # each compiles a train step
MODEL, ENVS = trees.MODEL, trees.ENVS
PLAIN = schema.Value(normalize_advantages=False, coef=0.0)


def samples():
  """Groups whose environment `a` has a critic, and `b` has none."""
  rng = np.random.default_rng(3)
  chosen = []
  for i, sample in enumerate(trees._samples()):
    if sample.env == 'a' and sample.rl_weights.any():
      ends = np.flatnonzero(sample.mask)[-1:]
      bootstraps, rewards = np.zeros((2, len(sample)), np.float32)
      rewards[ends], bootstraps[ends] = rng.normal(), i % 2
      sample = dataclasses.replace(
        sample,
        rewards=rewards,
        value_weights=sample.rl_weights,
        bootstraps=bootstraps,
      )
    chosen.append(sample)
  return chosen


def _params(kind, scale=0.1):
  params = fixtures.params(MODEL)
  params = transformer.add_critic(params, params, kind)
  kernel = scale * np.cos(np.arange(MODEL.embed_dim, dtype=np.float32))
  params['critic']['reward']['kernel'] = jnp.array(kernel)
  return params


def _objective(**value):
  return objectives.TokenComponents(
    MODEL, ENVS, schema.Loss(rl=schema.Clip(), value=schema.Value(**value))
  )


def _credit(batch, kind='head', **value):
  """The batch before the updates, and the metrics of the critic."""
  return jax.device_get(
    jax.jit(_objective(**value).before_updates)(_params(kind), batch)
  )


@pytest.mark.parametrize('kind', ['head', 'model'])
def test_a_critic_trains_alike_in_trees_and_micro_batches(kind):
  """Trees share prompts alone; one wide row equals several micro-batches."""
  objective = _objective(gamma=0.9, gae_lambda=0.8, normalize_returns=True)
  outcomes = []
  for options in ({}, {'trees': True}, {'row_tokens': 128}):
    batch = pack(samples(), **options)
    grads, metrics, total = trees._accumulate(objective, batch, _params(kind))
    outcomes.append((grads, metrics, total))
    assert metrics['value/loss'] > 0
    assert np.abs(grads['critic']['reward']['kernel']).max() > 0
  trees._equal(outcomes[0], outcomes[1])
  trees._equal(outcomes[0], outcomes[2])


def pack(samples, trees=False, row_tokens=32, rows=1):
  batch, left = packing.pack(
    samples,
    packing.Layout(rows=rows, longest=32, envs=ENVS, trees=trees, critic=True),
    micro_batches=8,
    row_tokens=row_tokens,
  )
  assert not left
  return batch


def test_the_credit_of_a_batch():
  """Values, returns and metrics, from a plain loop over the samples."""
  batch = pack(samples())
  values = dict(gamma=0.9, gae_lambda=0.8, normalize_advantages=False)
  scored, metrics = _credit(batch, **values)
  before, after = _forward(batch)
  advantages, member = batch.advantages.copy(), batch.value_weights != 0
  for i in range(int(batch.num_micro_batches)):
    for segment in range(1, batch.segment_ids[i, 0].max() + 1):
      here = np.flatnonzero(member[i, 0] & (batch.segment_ids[i, 0] == segment))
      follows, credit = 0.0, 0.0
      for j, t in enumerate(here[::-1]):
        if not j:
          follows = batch.bootstraps[i, 0, t] * after[i, 0, t]
        delta = batch.rewards[i, 0, t] + 0.9 * follows - before[i, 0, t]
        credit = delta + 0.9 * 0.8 * credit
        advantages[i, 0, t], follows = credit, before[i, 0, t]
  np.testing.assert_allclose(
    scored.advantages, advantages, rtol=1e-4, atol=1e-5
  )
  returns = (advantages + before)[member]
  np.testing.assert_allclose(
    scored.returns[member], returns, rtol=1e-4, atol=1e-5
  )
  expected = {
    'value/mean': before[member].mean(),
    'value/return_mean': returns.mean(),
    'value/explained_variance': 1 - advantages[member].var() / returns.var(),
  }
  for name, number in expected.items():
    np.testing.assert_allclose(metrics[name], number, rtol=1e-3, atol=1e-5)
  white, _ = _credit(batch, gamma=0.9, gae_lambda=0.8, normalize_returns=True)
  assert scored.return_scale == 1
  np.testing.assert_allclose(white.return_scale, returns.var(), rtol=1e-4)
  np.testing.assert_allclose(white.advantages[member].mean(), 0, atol=1e-5)
  np.testing.assert_allclose(white.advantages[member].std(), 1, rtol=1e-4)
  np.testing.assert_array_equal(
    white.advantages[~member], batch.advantages[~member]
  )


def _forward(batch):
  """Values before and after each token, by the forward pass of each row."""
  params, befores, afters = _params('head'), [], []
  for ids, positions, segments in zip(
    batch.ids, batch.positions, batch.segment_ids, strict=True
  ):
    hidden, _ = transformer.trunk(params, MODEL, ids, positions, segments)
    after = np.asarray(transformer.rewards(params['critic'], hidden))
    afters.append(after)
    befores.append(np.where(positions > 0, np.roll(after, 1, -1), 0))
  return np.stack(befores), np.stack(afters)


def _step(kind, value=PLAIN, base=None, **critic):
  lr = 0.05 if kind == 'head' else 0.005
  stage = schema.Critic(kind=kind, lr=lr, **critic)
  loss = schema.Loss(rl=schema.Clip(), value=value)
  return fixtures.make(
    objective=objectives.TokenComponents(MODEL, ENVS, loss),
    critic=stage,
    init=lambda: _params(kind, 0.0) if base is None else _adapter(base),
    base=base,
  )


def _adapter(base):
  adapter = lora.init(jax.random.key(1), schema.Lora(rank=2), base.params)
  return transformer.add_critic(adapter, base.params, 'head')


def test_without_values_ppo_is_reward_to_the_bit():
  """gamma = lambda = 1, a critic of 0 that does not count."""
  valued = samples()
  plain = [
    x
    if x.rewards is None
    else dataclasses.replace(
      x, advantages=np.where(x.mask, x.rewards.sum(), 0).astype('f4')
    )
    for x in valued
  ]
  batch = pack(valued)
  off = dataclasses.replace(batch, bootstraps=np.zeros_like(batch.bootstraps))
  other = dataclasses.replace(
    pack(plain),
    rewards=None,
    value_weights=None,
    bootstraps=None,
    value_count=None,
  )
  step, state = _step('head')
  base_step, base_state = fixtures.make(
    objective=_objective(), init=lambda: fixtures.params(MODEL)
  )
  for _ in range(3):
    state, metrics = step(state, off)
    base_state, expected = base_step(base_state, other)
    for name in expected:
      if name != 'optim/grad_norm':
        np.testing.assert_array_equal(metrics[name], expected[name], name)
  policy = transformer.split_critic(state.params)[0]
  jax.tree.map(np.testing.assert_array_equal, policy, base_state.params)


@pytest.mark.parametrize('kind', ['head', 'model'])
def test_the_policy_waits_and_the_critic_learns(kind):
  value = schema.Value(normalize_advantages=False, coef=1.0, clip=None)
  step, state = _step(kind, value, warmup_steps=20)
  batch, losses = pack(samples()), []
  for i in range(22):
    before = jax.device_get(transformer.split_critic(state.params)[0])
    state, metrics = step(state, batch)
    losses.append(float(metrics['value/loss']))
    moved = fixtures.worst(before, transformer.split_critic(state.params)[0])
    assert (moved > 0) == (i >= 20), i
  assert losses[20] < 0.7 * losses[0]


def test_a_head_trains_beside_an_adapter():
  base = lora.Base(fixtures.params(MODEL), 2.0)
  step, state = _step('head', schema.Value(), base)
  for _ in range(2):
    state, metrics = step(state, pack(samples()))
  assert np.abs(state.params['critic']['reward']['kernel']).max() > 0
  assert np.isfinite(metrics['value/explained_variance'])
