"""Statistics of rollouts, against literal numbers."""

import dataclasses

import numpy as np
import pytest

from posttrain import types
from posttrain.metrics import statistics
from tests.algorithms import two_turns


def _rollout(
  reward=None,
  correct=None,
  formatted=None,
  stop_reason='eos',
  logprobs=(-1.0, -2.0),
  **score,
):
  """Two prompt tokens, then sampled ones with these logprobs."""
  mask = np.arange(2 + len(logprobs)) >= 2
  given = np.array([0, 0, *logprobs], np.float32)
  sample = two_turns.sample(ids=mask, mask=mask, sampler_logprobs=given)
  failed = stop_reason == 'error'
  return types.Rollout(
    0,
    two_turns.TASK,
    (),
    () if failed else (sample,),
    types.Score(reward, correct, formatted, **score),
    stop_reason,
    error='it broke' if failed else None,
  )


FAILED = _rollout(stop_reason='error')


@pytest.mark.parametrize('share', [0.0, 0.5, 1.0])
@pytest.mark.parametrize('episodes, faulty', [(0, 0), (0, 2), (2, 1)])
def test_a_share_of_a_steps_rollouts_may_fail(episodes, faulty, share):
  sound = _rollout()
  bad = dataclasses.replace(sound, error='f')
  rollouts = [FAILED] * episodes + [bad] * faulty + [sound] * 4
  try:
    errors = statistics.failures(rollouts[:4], share, ('a fault',))
    assert episodes + faulty <= 4 * share
  except statistics.TooManyErrors as error:
    assert episodes + faulty > 4 * share
    errors = error.errors
  assert errors == ('it broke',) * episodes + ('a fault',)


def test_samples_is_a_mean_over_rollouts_that_have_any():
  one = _rollout()
  two = dataclasses.replace(one, samples=one.samples * 2)
  assert statistics.samples([one, two, FAILED]) == {'samples': 1.5}


def test_prefix_hits_are_a_share_of_the_tokens_that_no_turn_sampled():
  turns = [types.Turn(0, 2, 2, 0.0, 'eos', cached) for cached in (1, 0)]
  rollouts = [dataclasses.replace(_rollout(), turns=(turn,)) for turn in turns]
  assert statistics.prefix_hits([*rollouts, FAILED]) == {'prefix_hits': 0.25}
  assert statistics.prefix_hits(rollouts[1:]) == {}


def test_means_leave_out_unknown_values_and_failed_rollouts():
  rollouts = [
    _rollout(1.0, True, True),
    _rollout(0.25, False, True, 'max_tokens', [-1.0] * 6),
    _rollout(None, None, False, 'overflow', [-1.0]),  # not graded
    FAILED,
  ]
  assert statistics.survivors(rollouts) == rollouts[:3]
  assert statistics.summarize(rollouts) == {
    'reward': 0.625,
    'pass_rate': 0.5,
    'format_rate': pytest.approx(2 / 3),
    'length': 3.0,
    'truncated': pytest.approx(2 / 3),
  }


def test_metrics_without_a_known_value_are_absent():
  summary = {'length': 2.0, 'truncated': 0.0}
  assert statistics.summarize([_rollout()]) == summary
  assert statistics.summarize([FAILED]) == statistics.entropy([FAILED]) == {}
  assert statistics.best_of([[FAILED] * 2], [2]) == {}
  assert statistics.mixed_groups([[], []]) == {}


def test_score_metrics_are_means_over_the_scores_that_have_them():
  rollouts = [
    _rollout(1.0, metrics={'steps': 3, 'reward': 9.0}),
    _rollout(0.0, metrics={'steps': 4, 'finished': True}),
    _rollout(),
    FAILED,
  ]
  assert statistics.summarize(rollouts) == {
    'steps': 3.5,
    'finished': 1.0,
    'reward': 0.5,
    'length': 2.0,
    'truncated': 0.0,
  }


def test_entropy_is_a_mean_over_tokens_not_over_rollouts():
  rollouts = [_rollout(logprobs=[-1.0]), _rollout(logprobs=[-3.0, -4.0, -8.0])]
  assert statistics.entropy(rollouts) == {'entropy': 4.0}


def test_advantages_are_those_of_sampled_tokens():
  none = two_turns.sample()
  credits = np.array([9, 9, 1, 1, 9, 9, 9, -3, 1], np.float32)
  samples = [none, dataclasses.replace(none, advantages=credits)]
  assert statistics.advantages(samples) == {
    'advantage/mean': 0.0,
    'advantage/std': pytest.approx(3**0.5),
    'advantage/min': -3.0,
    'advantage/max': 1.0,
  }
  assert statistics.advantages([none]) == {}


def test_mixed_groups_is_the_share_of_groups_with_different_rewards():
  rewards = [1.0, 0.0], [1.0, 1.0], [0.0, None], [None], []
  groups = [[_rollout(x) for x in group] for group in rewards]
  assert statistics.mixed_groups(groups) == {
    'mixed_groups': pytest.approx(1 / 3)
  }


def test_pass_at_k_is_the_share_of_tasks_with_a_correct_answer():
  right, wrong = _rollout(1.0, True), _rollout(0.0, False)
  groups = [[right, wrong], [wrong, wrong], [right, right], [wrong, right]]
  values = statistics.best_of(groups, [2])
  bounds = statistics.bounds('pass@2', [[1], [1], [1], [0]])
  assert values == {'pass@2': 0.75, **bounds}
  # Tasks with a failed or an ungraded answer are left out.
  groups += [[right, FAILED], [right, _rollout()]]
  assert statistics.best_of(groups, [2]) == values


def test_maj_at_k_is_absent_without_answers_and_0_with_votes():
  a, b, none = (
    _rollout(0.0, answer == 'a', answer=answer) for answer in ('a', 'b', None)
  )
  groups = [[a, a, b], [b, a, none], [none, none, none]]
  values = statistics.best_of(groups, [3, 1, 3])
  rates = [values[x] for x in ('pass@1', 'maj@1', 'pass@3', 'maj@3')]
  assert rates == pytest.approx([1 / 3, 1 / 3, 2 / 3, 1.5 / 3])  # a tie
  # No score has an answer.
  assert 'maj@3' not in statistics.best_of(groups[2:], [3])
  assert statistics.best_of(groups[2:], [3], votes=True)['maj@3'] == 0


def test_bounds_are_over_tasks_with_a_known_value():
  assert statistics.bounds('x', [[1] * 8, [0] * 8, [None], [1] * 8, []]) == {
    'x_low': pytest.approx(0.207660, abs=1e-6),
    'x_high': pytest.approx(0.938508, abs=1e-6),
  }
