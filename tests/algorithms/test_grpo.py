"""GRPO: advantages by hand, scales by numpy, reference KL and pruning."""

import itertools
import subprocess
import sys

import numpy as np
import pytest

from posttrain import algorithms, schema, types
from tests.algorithms import two_turns

MASK = [False, True, True, False, True]


def _sample(row):
  n = len(MASK)
  return types.Sample(
    env='e',
    row=row,
    ids=np.arange(n, dtype=np.int32),
    mask=np.array(MASK),
    roles=np.zeros(n, np.int8),
    is_content=np.ones(n, bool),
    sampler_logprobs=np.zeros(n, np.float32),
    temperatures=np.ones(n, np.float32),
    versions=np.zeros(n, np.int32),
  )


def _group(rewards, samples=1, stop_reason='eos'):
  task = types.Task('t', 'e', ())
  return [
    types.Rollout(
      i,
      task,
      (),
      tuple(_sample(f'{i}.{j}') for j in range(samples)),
      types.Score(reward),
      stop_reason,
    )
    for i, reward in enumerate(rewards)
  ]


def _finalize(*rewards, scorer=None, samples=1, **options):
  algorithm = algorithms.make(schema.Grpo(**options))
  groups = [_group(group, samples) for group in rewards]
  return two_turns.finalize(algorithm, groups, scorer)


def _advantages(*rewards, **options):
  """Returns each rollout's advantage, the same on all its mask tokens."""
  advantages = []
  for sample in _finalize(*rewards, **options):
    values = np.unique(sample.advantages[sample.mask])
    assert len(values) == 1 and not sample.advantages[~sample.mask].any()
    assert sample.advantages.dtype == np.float32
    advantages.append(float(values[0]))
  return advantages


@pytest.mark.parametrize(
  ('rewards', 'expected'),
  [
    ([1, 0.5, 0.8], [0.233333, -0.266667, 0.033333]),
    ([1, 0, 0, 0], [0.75, -0.25, -0.25, -0.25]),
    ([0.3, -0.7], [0.5, -0.5]),
    ([1], [0]),
    ([1, 1], [0, 0]),
    ([0, 0], [0, 0]),
  ],
)
def test_golden(rewards, expected):
  np.testing.assert_allclose(_advantages(rewards), expected, atol=1e-6)


@pytest.mark.parametrize('scale', ['none', 'group', 'batch'])
@pytest.mark.parametrize(
  'rewards', [[0.7], [0.1] * 3, [0.7] * 7, [1 / 3] * 11, [1e-3] * 6]
)
def test_equal_rewards_give_exactly_zero_and_are_pruned(scale, rewards):
  """Also if rounding makes the mean of equal floats another float."""
  samples = _finalize(rewards, scale_rewards=scale)
  for sample in samples:
    assert not sample.advantages.any() and not sample.rl_weights.any()
  samples = _finalize(rewards, scale_rewards=scale, prune_zero_advantage=False)
  for sample in samples:
    np.testing.assert_array_equal(sample.rl_weights, MASK)


def test_group_scale_is_the_deviation_of_the_group():
  groups = [1.0, 0.5, 0.8], [0.0, 1.0], [2.0]
  expected = []
  for group in groups:
    mean = sum(group) / len(group)
    squares = sum((r - mean) ** 2 for r in group)
    sigma = (squares / max(len(group) - 1, 1)) ** 0.5
    expected += [(r - mean) / (sigma + 1e-4) for r in group]
  np.testing.assert_allclose(
    _advantages(*groups, scale_rewards='group'), expected, rtol=1e-5
  )


def test_batch_scale_is_the_deviation_of_all_groups():
  groups = [1.0, 0.5, 0.8], [0.0, 1.0], [2.0]
  sigma = np.std(np.concatenate(groups), ddof=1)
  expected = np.concatenate([np.array(g) - np.mean(g) for g in groups])
  np.testing.assert_allclose(
    _advantages(*groups, scale_rewards='batch'),
    expected / (sigma + 1e-4),
    rtol=1e-5,
  )
  # Equal within groups, and different between them: no credit.
  assert _advantages([1, 1], [0, 0], scale_rewards='batch') == [0] * 4
  assert _advantages([1], scale_rewards='batch') == [0]


def test_the_baseline_is_the_mean_of_the_group():
  both = _advantages([1, 0], [5, 3])
  assert both == [*_advantages([1, 0]), *_advantages([5, 3])]
  # A shift of the rewards changes nothing.
  assert _advantages([4.0, 2.0]) == _advantages([5.0, 3.0]) == [1.0, -1.0]


@pytest.mark.parametrize('size', [1, 2, 4])
def test_expected_gradient_equals_that_of_the_pass_rate(size):
  """Up to a factor (N - 1) / N: a rollout is part of its own baseline.

  All outcomes of a Bernoulli policy, whose score function in the logit is
  y - p, and d p / d logit = p (1 - p): 0.09 at p = 0.1, so 0.0675 for N = 4.
  """
  algorithm, p, expected = algorithms.make(schema.Grpo()), 0.1, 0.0
  for outcome in itertools.product([0.0, 1.0], repeat=size):
    chance = np.prod([p if y else 1 - p for y in outcome])
    credit = algorithm.assign(_group(outcome))
    scores = [y - p for y in outcome]
    expected += chance * np.dot(credit, scores) / size
  np.testing.assert_allclose(expected, (size - 1) / size * 0.09, rtol=1e-5)


def test_all_samples_of_a_rollout_have_its_credit():
  first, second, *rest = _finalize([1, 0], samples=2)
  assert len(rest) == 2 and first.row != second.row
  for sample in (first, second):
    np.testing.assert_array_equal(
      sample.advantages, np.where(MASK, np.float32(0.5), np.float32(0))
    )
    np.testing.assert_array_equal(sample.rl_weights, MASK)
    assert not sample.ref_kl_weights.any() and not sample.ref_logprobs.any()


def test_pruned_tokens_keep_the_reference_kl():
  calls = []

  def scorer(reference, samples):
    calls.append((reference, len(samples)))
    return [np.full(len(s), -0.25) for s in samples]

  samples = _finalize(
    [1, 1], [1, 0], scorer=scorer, kl_beta=0.01, reference='some/path'
  )
  assert calls == [('some/path', 4)]
  for sample, weight in zip(samples, [0, 0, 1, 1], strict=True):
    np.testing.assert_array_equal(sample.rl_weights, weight * np.float32(MASK))
    np.testing.assert_array_equal(
      sample.ref_kl_weights, np.float32(0.01) * np.float32(MASK)
    )
    assert (sample.ref_logprobs == -0.25).all()


def test_rollouts_without_a_reward_assert():
  for group in (_group([None, 1.0]), _group([1.0], stop_reason='error')):
    with pytest.raises(AssertionError):
      two_turns.finalize(algorithms.make(schema.Grpo()), [group])


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'scale_rewards': 'std'}, 'scale_rewards must be one of'),
    ({'kl_beta': -0.1}, 'kl_beta must be >= 0'),
    ({'kl_beta': float('inf')}, 'kl_beta must be finite'),
    ({'kl_beta': 0.1, 'reference': ''}, "reference must be 'init', 'pol"),
    ({'kl_beta': 0.1, 'reference': 'stage:'}, 'reference must be'),
  ],
)
def test_invalid_options_raise(options, message):
  with pytest.raises(schema.FieldError, match=message):
    schema.Grpo(**options)


@pytest.mark.parametrize('reference', ['init', 'policy', 'stage:a', 'a/path'])
def test_reference_is_that_of_the_options(reference):
  cfg = schema.Grpo(kl_beta=0.1, reference=reference)
  assert algorithms.make(cfg).reference == reference


def test_algorithms_never_import_jax():
  code = 'import sys, posttrain.algorithms; assert "jax" not in sys.modules'
  subprocess.run([sys.executable, '-c', code], check=True)
