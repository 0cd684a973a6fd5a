"""Streams: routing per component, credit aligned with tokens."""

import dataclasses

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.algorithms import base, sft
from tests.algorithms import two_turns

MASK = [False, False, True, True, False, True]


class Writer(base.Algorithm):
  """Returns the credits and weights of its constructor."""

  def __init__(self, component, credits=None, observed=None, **options):
    self.component = component
    self._credits, self._observed = credits, observed
    for name, value in options.items():
      setattr(self, name, value)

  def assign(self, group):
    return self._credits or super().assign(group)

  def observation_weights(self, rollout):
    return self._observed


def _sample(mask=MASK, start=1):
  n = len(mask)
  return types.Sample(
    env='e',
    row='r',
    ids=np.arange(start, start + n, dtype=np.int32),
    mask=np.array(mask),
    roles=np.zeros(n, np.int8),
    is_content=np.ones(n, bool),
    sampler_logprobs=np.zeros(n, np.float32),
    temperatures=np.ones(n, np.float32),
    versions=np.zeros(n, np.int32),
  )


def _rollout(*samples):
  task = types.Task('t', 'e', ())
  return types.Rollout(0, task, (), samples, types.Score(1.0), 'eos')


class Scorer:
  """Returns -0.5 for each token (or `answer`), and records its calls."""

  def __init__(self, answer=lambda s: np.full(len(s), -0.5)):
    self.calls = []
    self._answer = answer

  def __call__(self, reference, samples):
    self.calls.append((reference, [s.row for s in samples]))
    return [self._answer(sample) for sample in samples]


def _one(algorithm, sample=None):
  (sample,) = two_turns.finalize(
    algorithm, [[_rollout(sample or _sample())]], Scorer()
  )
  return sample


@pytest.mark.parametrize(
  ('component', 'rl', 'ce', 'ref_kl'),
  [
    ('rl', [0, 0, 1, 1, 0, 1], [0] * 6, [0] * 6),
    ('ce', [0] * 6, [0, 0, 1, 1, 0, 1], [0] * 6),
    ('ref_kl', [0] * 6, [0] * 6, [0, 0, 1, 1, 0, 1]),
  ],
)
def test_the_component_has_weight_1_on_the_mask(component, rl, ce, ref_kl):
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


def test_scalar_credit_is_repeated_over_the_mask():
  sample = _one(Writer('rl', credits=[0.7]))
  expected = np.float32([0, 0, 0.7, 0.7, 0, 0.7])
  np.testing.assert_array_equal(sample.advantages, expected)
  assert _one(Writer('rl', credits=[0.0])).advantages is not None


def test_token_credit_is_split_at_the_samples():
  rollout = _rollout(_sample(), _sample(start=7))
  credit = np.arange(12, dtype=np.float32)
  first, second = two_turns.finalize(
    Writer('rl', credits=[credit]), [[rollout]]
  )
  np.testing.assert_array_equal(first.advantages, credit[:6])
  np.testing.assert_array_equal(second.advantages, credit[6:])


def test_misaligned_credit_and_weights_raise():
  groups = [[_rollout(_sample())]]
  with pytest.raises(ValueError, match='align with the tokens of task t: got'):
    two_turns.finalize(Writer('rl', credits=[np.ones(1)]), groups)
  with pytest.raises(ValueError, match='one credit per rollout: got 2'):
    two_turns.finalize(Writer('rl', credits=[1.0, 2.0]), groups)
  with pytest.raises(ValueError, match='must span the tokens of each sample'):
    two_turns.finalize(Writer('rl', observed=[[0.0] * 5]), groups)
  with pytest.raises(ValueError, match='must span the tokens of each sample'):
    two_turns.finalize(Writer('rl', observed=[]), groups)


def test_the_first_token_has_no_weight():
  sample = _sample([True, True, False])
  done = _one(Writer('ce', observed=[[0.5, 0.0, 0.5]]), sample)
  np.testing.assert_array_equal(done.ce_weights, np.float32([0, 1, 0.5]))
  done = _one(Writer('rl'), sample)
  np.testing.assert_array_equal(done.rl_weights, np.float32([0, 1, 0]))


def test_sft_is_cross_entropy_on_the_completion():
  sample = _one(sft.Sft(schema.Sft()))
  np.testing.assert_array_equal(sample.ce_weights, np.float32(MASK))
  assert not sample.rl_weights.any() and not sample.ref_kl_weights.any()


def test_pruned_tokens_leave_rl_and_keep_their_other_weights():
  credit = np.float32([0, 0, 0.5, 0, 0, -1])
  options = {
    'credits': [credit],
    'observed': [[0, 0, 0, 0.3, 0.1, 0]],
    'kl_beta': 0.05,
  }
  pruned = _one(Writer('rl', **options))
  np.testing.assert_array_equal(pruned.rl_weights, [0, 0, 1, 0, 0, 1])
  kept = _one(Writer('rl', prune_zero_advantage=False, **options))
  np.testing.assert_array_equal(kept.rl_weights, MASK)
  for sample in (pruned, kept):
    np.testing.assert_array_equal(sample.advantages, credit)
    np.testing.assert_array_equal(
      sample.ce_weights, np.float32([0, 0, 0, 0.3, 0.1, 0])
    )
    np.testing.assert_array_equal(
      sample.ref_kl_weights, np.float32(0.05) * np.float32(MASK)
    )


def test_no_credit_is_not_pruned():
  """`packing` raises for a missing advantage."""
  sample = _one(Writer('rl'))
  assert sample.advantages is None
  np.testing.assert_array_equal(sample.rl_weights, MASK)


def _rows(*names, mask=MASK):
  return [
    _rollout(dataclasses.replace(_sample(mask), row=name)) for name in names
  ]


def test_the_scorer_is_called_once_with_the_ref_kl_members():
  groups = [_rows('a', 'b'), _rows('c', mask=[False] * 6), _rows('d')]
  algorithm = Writer('rl', kl_beta=0.1, reference='stage:sft')
  algorithm.assign = lambda group: [0.0] * len(group)
  scorer = Scorer()
  samples = two_turns.finalize(algorithm, groups, scorer)
  assert scorer.calls == [('stage:sft', ['a', 'b', 'd'])]
  assert [s.row for s in samples] == ['a', 'b', 'c', 'd']
  for sample in samples:
    expected = 0.0 if sample.row == 'c' else -0.5
    np.testing.assert_array_equal(sample.ref_logprobs, [expected] * 6)
    assert sample.ref_logprobs.dtype == np.float32
  algorithm = Writer('rl', credits=[1.0])
  two_turns.finalize(algorithm, [_rows('a'), _rows('b')], scorer)
  two_turns.finalize(algorithm, [], scorer)
  assert len(scorer.calls) == 1  # no ref_kl member, no call


@pytest.mark.parametrize(
  ('answer', 'message'),
  [
    (lambda s: np.zeros(5), "tokens of row 'a' of environment 'e': got"),
    (lambda s: np.zeros((6, 1)), r'got \(6, 1\), expected \(6,\)'),
    (lambda s: np.where(s.ids == 3, np.nan, 0), 'got nan at token 2'),
  ],
)
def test_invalid_reference_logprobs_raise(answer, message):
  with pytest.raises(ValueError, match=message):
    two_turns.finalize(Writer('ref_kl'), [_rows('a')], Scorer(answer))


@pytest.mark.parametrize('scores', [None, [], [np.zeros(6)] * 2])
def test_a_wrong_number_of_reference_logprobs_raises(scores):
  algorithm = Writer('ref_kl', score=lambda samples, scorer: scores)
  with pytest.raises(ValueError, match='one array per sample: got .*cted 1'):
    two_turns.finalize(algorithm, [_rows('a')], Scorer())


def test_rescale_gets_all_groups_and_its_result_is_checked():
  calls = []

  def rescale(groups, credits):
    calls.append(([len(group) for group in groups], credits))
    return [[10 * c for c in group] for group in credits]

  algorithm = Writer('rl', rescale=rescale)
  algorithm.assign = lambda group: [float(len(group))] * len(group)
  groups = [_rows('a', 'b'), _rows('c')]
  samples = two_turns.finalize(algorithm, groups)
  assert calls == [([2, 1], [[2.0, 2.0], [1.0]])]
  assert [s.advantages.max() for s in samples] == [20.0, 20.0, 10.0]
  algorithm.rescale = lambda groups, credits: credits[:1]
  with pytest.raises(ValueError, match='each group: got 1, expected 2'):
    two_turns.finalize(algorithm, groups)
  algorithm.rescale = lambda groups, credits: [[1.0], [1.0]]
  with pytest.raises(ValueError, match='per rollout: got 1, expected 2'):
    two_turns.finalize(algorithm, groups)
