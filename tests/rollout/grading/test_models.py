"""A reward model as a reward: at the last sampled token, in a weighted sum."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, scoring
from posttrain.models import reward_head, transformer
from posttrain.rollout.grading import models as reward_models
from posttrain.rollout.grading import rewards
from tests import fixtures
from tests.algorithms import two_turns


@pytest.fixture(scope='module')
def params():
  made = reward_head.add(transformer.init(jax.random.key(0), fixtures.MODEL))
  kernel = jax.random.normal(jax.random.key(1), made['reward']['kernel'].shape)
  return {**made, 'reward': {'kernel': kernel}}


@pytest.fixture(scope='module')
def scorer():
  return scoring.Scorer(fixtures.MODEL, 2, 16, reward=True)


def _rollouts():
  """Two of nine tokens, of which the second is cut behind its first turn."""
  long = two_turns.rollout(1.0, 0)
  short = dataclasses.replace(
    two_turns.sample(),
    **{
      name: getattr(two_turns.sample(), name)[:4]
      for name in ('ids', 'mask', 'sampler_logprobs')
    },
  )
  return [long, dataclasses.replace(long, uid=1, samples=(short,))]


def _worth(params, ids):
  """Of a sequence alone, by the formula: the last hidden state times w."""
  n = len(ids)
  hidden, _ = transformer.trunk(
    params,
    fixtures.MODEL,
    jnp.asarray(ids)[None],
    jnp.arange(n)[None],
    jnp.ones((1, n), jnp.int32),
  )
  return float(hidden[0, -1].astype(jnp.float32) @ params['reward']['kernel'])


def test_it_is_read_where_the_answer_ends(params, scorer):
  rollouts = _rollouts()
  found = reward_models.RewardModel('m', params, scorer)(rollouts)
  wanted = [_worth(params, x.samples[-1].ids) for x in rollouts]
  np.testing.assert_allclose(found.rewards, wanted, rtol=1e-5)
  assert found.rewards[0] != found.rewards[1]
  assert not found.failed and found.metrics == {'faults': 0.0}
  # What follows the last sampled token is not read.
  more = two_turns.sample()
  more = dataclasses.replace(
    more,
    ids=np.append(more.ids, 7).astype(np.int32),
    mask=np.append(more.mask, False),
  )
  rollout = dataclasses.replace(rollouts[0], samples=(more,))
  again = reward_models.RewardModel('m', params, scorer)([rollout])
  np.testing.assert_allclose(again.rewards, wanted[:1], rtol=1e-5)


def test_it_adds_up_with_the_rest(params, scorer):
  made = rewards.Rewards(
    'e',
    {
      'env': schema.RewardFn(weight=2.0),
      'learned': schema.RewardFn(model='stage:rm', weight=0.5),
    },
  )
  asked = []

  def model(name):
    asked.append(name)
    return reward_models.RewardModel(name, params, scorer)

  made.connect(None, model)
  rollouts = _rollouts()
  done, metrics, errors = made(rollouts)
  told = reward_models.RewardModel('m', params, scorer)(rollouts).rewards
  assert asked == ['stage:rm'] and errors == ()
  for rollout, value in zip(done, told, strict=True):
    assert rollout.score.reward == pytest.approx(2 * 1.0 + 0.5 * value)
  assert metrics['rewards/learned'] == pytest.approx(np.mean(told))


def test_what_is_not_finite_is_no_reward(params, scorer):
  kernel = params['reward']['kernel'] * jnp.inf
  broken = {**params, 'reward': {'kernel': kernel}}
  made = rewards.Rewards(
    'e',
    {'env': schema.RewardFn(), 'learned': schema.RewardFn(model='stage:rm')},
  )
  made.connect(
    None, lambda name: reward_models.RewardModel(name, broken, scorer)
  )
  done, metrics, errors = made(_rollouts())
  assert [rollout.score.reward for rollout in done] == [None, None]
  assert metrics['rewards/learned/faults'] == 1
  assert 'reward model stage:rm must return finite rewards' in errors[0]
  made(_rollouts())
  made(_rollouts())
  with pytest.raises(rewards.TooManyFaults, match='max_faults=3 times in a'):
    made(_rollouts())
