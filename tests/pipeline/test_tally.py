"""Counts of a stage's rewards, over a resume, and what its end says."""

import json

import pytest

from posttrain.pipeline import tally


def counted(*steps, names=('a', 'b')):
  """Returns the tally of steps of (environment, rollouts, rewarded, errors)."""
  total = tally.Tally(names)
  for name, rollouts, rewarded, failures in steps:
    total.add_env(name, rollouts, rewarded, ['x'] * failures)
    total.add_step(rewarded > 0)
  return total


def test_stage_whose_rewards_all_failed_is_refused_also_after_a_resume():
  total = counted(('a', 4, 0, 1), ('b', 4, 0, 2), ('other', 4, 4, 0))
  resumed = tally.Tally(('a', 'b'))
  resumed.set_state(json.loads(json.dumps(total.get_state())))
  resumed.add_env('b', 2, 0, ['y\n' * 1000])
  resumed.add_step(False)
  with pytest.raises(tally.NoReward, match='none for its 10 rollouts in 4 ste'):
    resumed.check('grpo')
  host = {'stage': 'grpo', 'pipeline': {'tally': resumed.get_state()}}
  with pytest.raises(tally.NoReward) as error:
    tally.check_saved('grpo', host)
  assert error.value.exit_code == 3
  tally.check_saved('sft', host)  # the counts of a later stage


@pytest.mark.parametrize(
  'steps, hint',
  [
    ([('a', 4, 0, 1), ('a', 4, 1, 0)], ''),
    ([('a', 4, 4, 0), ('b', 4, 0, 2)], 'environment b of stage s had no rew'),
    ([('a', 4, 0, 0)], 'no step of stage s had an advantage'),
  ],
)
def test_other_stages_end_well_with_hints(steps, hint, caplog):
  total = counted(*steps)
  total.check('s')
  total.warn('s')
  assert hint in caplog.text and bool(hint) == bool(caplog.text)
