"""A reward model as a reward: at the last sampled token, in a weighted sum."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from posttrain import schema, scoring
from posttrain.models import transformer
from posttrain.rollout import frozen_models, grading
from posttrain.stage import preflight
from tests import fixtures, qwen3
from tests.algorithms import two_turns


@pytest.fixture(scope='module')
def params():
  tree = transformer.add_reward(fixtures.params())
  return {**tree, 'reward': fixtures.normal(tree['reward'], 1.0)}


@pytest.fixture(scope='module')
def scorer():
  return scoring.Scorer(fixtures.MODEL, 2, 16, reads='rewards')


def _rollouts():
  """Returns two rollouts of nine tokens, one cut after its first turn."""
  long = two_turns.rollout(1.0, 0)
  (whole,) = long.samples
  names = ('ids', 'mask', 'sampler_logprobs')
  short = two_turns.sample(**{x: getattr(whole, x)[:4] for x in names})
  return [long, dataclasses.replace(long, uid=1, samples=(short,))]


def _reward(params, ids):
  """Returns a sequence's reward by the formula: last hidden state times w."""
  n = len(ids)
  hidden, _ = transformer.trunk(
    params,
    fixtures.MODEL,
    jnp.asarray(ids)[None],
    jnp.arange(n)[None],
    jnp.ones((1, n), jnp.int32),
  )
  return float(hidden[0, -1].astype(jnp.float32) @ params['reward']['kernel'])


def test_reward_is_read_at_the_last_sampled_token(params, scorer):
  rollouts = _rollouts()
  result = frozen_models.RewardModel('m', params, scorer)(rollouts)
  expected = [_reward(params, x.samples[-1].ids) for x in rollouts]
  np.testing.assert_allclose(result.rewards, expected, rtol=1e-5)
  assert result.rewards[0] != result.rewards[1]
  assert not result.failed and result.metrics == {'faults': 0.0}


def test_non_finite_value_is_a_fault_without_reward(params, scorer):
  kernel = params['reward']['kernel'] * jnp.inf
  broken = {**params, 'reward': {'kernel': kernel}}
  total = grading.Rewards(
    'e',
    {'env': schema.RewardFn(), 'learned': schema.RewardFn(model='stage:rm')},
    reward_model=lambda name: frozen_models.RewardModel(name, broken, scorer),
  )
  scored, metrics, _ = total(_rollouts())
  assert [rollout.score.reward for rollout in scored] == [None, None]
  assert metrics['rewards/learned/faults'] == 1


def test_a_huggingface_directory_is_no_reward_model(tmp_path):
  (tmp_path / 'config.json').write_text(json.dumps(qwen3.CONFIG))
  with pytest.raises(ValueError, match='must hold a reward model'):
    folder = str(tmp_path)
    preflight.check_reward_model(folder, fixtures.MODEL, fixtures.RENDERER)
