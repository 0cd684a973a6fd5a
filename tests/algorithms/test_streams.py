"""Streams: routing per component, credit aligned with tokens."""

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.algorithms import base, sft, streams

MASK = [False, False, True, True, False, True]


class Writer(base.Algorithm):
  """Returns what it is told to."""

  def __init__(self, component, credits=None, observed=None):
    self.component = component
    self._credits, self._observed = credits, observed

  def assign(self, group):
    return self._credits or super().assign(group)

  def observation_weights(self, rollout):
    return self._observed


def _sample(mask=MASK, start=1):
  n = len(mask)
  return types.Sample(
      env='e', row='r', ids=np.arange(start, start + n, dtype=np.int32),
      mask=np.array(mask), roles=np.zeros(n, np.int8),
      is_content=np.ones(n, bool), sampler_logprobs=np.zeros(n, np.float32),
      temperatures=np.ones(n, np.float32), versions=np.zeros(n, np.int32),
  )  # fmt: skip


def _rollout(*samples):
  task = types.Task('t', 'e', ())
  return types.Rollout(0, task, (), samples, types.Score(1.0), 'eos')


def _one(algorithm, sample=None):
  (sample,) = streams.finalize(algorithm, [_rollout(sample or _sample())])
  return sample


@pytest.mark.parametrize(
    ('component', 'rl', 'ce', 'ref_kl'),
    [
        ('rl', [0, 0, 1, 1, 0, 1], [0] * 6, [0] * 6),
        ('ce', [0] * 6, [0, 0, 1, 1, 0, 1], [0] * 6),
        ('ref_kl', [0] * 6, [0] * 6, [0, 0, 1, 1, 0, 1]),
    ],
)
def test_a_component_weighs_the_mask(component, rl, ce, ref_kl):
  sample = _one(Writer(component))
  np.testing.assert_array_equal(sample.rl_weights, np.float32(rl))
  np.testing.assert_array_equal(sample.ce_weights, np.float32(ce))
  np.testing.assert_array_equal(sample.ref_kl_weights, np.float32(ref_kl))
  assert sample.advantages is None  # no credit, which is not all zero


@pytest.mark.parametrize(
    ('component', 'ce'),
    [('rl', [0, 0, 0, 0, 0.1, 0]), ('ce', [0, 0, 1, 1, 0.1, 1])],
)
def test_observation_weights_are_merged_into_ce(component, ce):
  observed = [[0, 0, 0, 0, 0.1, 0]]
  sample = _one(Writer(component, observed=observed))
  np.testing.assert_array_equal(sample.ce_weights, np.float32(ce))


def test_scalar_credit_covers_the_mask():
  sample = _one(Writer('rl', credits=[0.7]))
  expected = np.float32([0, 0, 0.7, 0.7, 0, 0.7])
  np.testing.assert_array_equal(sample.advantages, expected)
  assert _one(Writer('rl', credits=[0.0])).advantages is not None


def test_token_credit_is_cut_at_the_samples():
  rollout = _rollout(_sample(), _sample(start=7))
  credit = np.arange(12, dtype=np.float32)
  first, second = streams.finalize(Writer('rl', credits=[credit]), [rollout])
  np.testing.assert_array_equal(first.advantages, credit[:6])
  np.testing.assert_array_equal(second.advantages, credit[6:])


def test_misaligned_words_are_refused():
  rollout = _rollout(_sample())
  with pytest.raises(ValueError, match='align with the tokens of task t: got'):
    streams.finalize(Writer('rl', credits=[np.ones(1)]), [rollout])
  with pytest.raises(ValueError, match='one credit per rollout: got 2'):
    streams.finalize(Writer('rl', credits=[1.0, 2.0]), [rollout])
  with pytest.raises(ValueError, match='must span the tokens of each sample'):
    streams.finalize(Writer('rl', observed=[[0.0] * 5]), [rollout])
  with pytest.raises(ValueError, match='must span the tokens of each sample'):
    streams.finalize(Writer('rl', observed=[]), [rollout])


def test_the_first_token_is_a_member_of_nothing():
  sample = _sample([True, True, False])
  done = _one(Writer('ce', observed=[[0.5, 0.0, 0.5]]), sample)
  np.testing.assert_array_equal(done.ce_weights, np.float32([0, 1, 0.5]))
  done = _one(Writer('rl'), sample)
  np.testing.assert_array_equal(done.rl_weights, np.float32([0, 1, 0]))


def test_sft_is_cross_entropy_on_the_completion():
  sample = _one(sft.Sft(schema.Sft()))
  np.testing.assert_array_equal(sample.ce_weights, np.float32(MASK))
  assert not sample.rl_weights.any() and not sample.ref_kl_weights.any()
