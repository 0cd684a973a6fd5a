"""Rollouts of a training step as rows, and counts of a stage's rewards."""

import dataclasses
import json

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.chat import tokenizers
from posttrain.metrics import statistics, writers
from posttrain.pipeline import batches
from tests.algorithms import two_turns

TOKENIZER = tokenizers.load(schema.Tokenizer())


def played(*rewards):
  group = [
    dataclasses.replace(x, uid=uid)
    for uid, x in enumerate(two_turns.group(*rewards))
  ]
  samples = [
    dataclasses.replace(
      sample,
      advantages=np.where(sample.mask, 2.0 * i - 1, 9.0).astype(np.float32),
    )
    for i, rollout in enumerate(group)
    for sample in rollout.samples
  ]
  return batches.Played([group], [group], samples, TOKENIZER)


def test_a_row_per_rollout():
  rows = list(batches.rows({'e': played(0.0, 1.0)}))
  assert [row['reward'] for row in rows] == [0.0, 1.0]
  assert [row['advantage'] for row in rows] == [-1.0, 1.0]  # of the mask alone
  first = rows[0]
  assert (first['env'], first['task']) == ('e', two_turns.TASK.id)
  sample = played(0.0).samples[0]
  ids = sample.ids[: sample.mask.argmax()]
  assert first['rendered'] == tokenizers.show(TOKENIZER, ids) != ''
  assert first['tokens'] == sum(x.mask.sum() for x in played(0.0).samples)
  assert json.loads(writers.dumps(first)) == first


def test_failed_rollouts_and_many_groups():
  failed = types.Rollout(
    7, two_turns.TASK, (), (), types.Score(None), 'error', 'broken'
  )
  groups = [[failed]] * (batches.MAX_GROUPS + 5)
  rows = list(batches.rows({'e': batches.Played(groups, [], [], TOKENIZER)}))
  assert len(rows) == batches.MAX_GROUPS
  assert rows[0]['error'] == 'broken' and rows[0]['reward'] is None


def counted(*steps):
  """Returns the tally of steps of (environment, rollouts, rewarded, errors)."""
  total = batches.Tally(('a', 'b'))
  for name, rollouts, rewarded, failures in steps:
    total.add_env(name, rollouts, rewarded, ['x'] * failures)
    total.add_step(rewarded > 0)
  return total


def test_stage_whose_rewards_all_failed_is_refused_also_after_a_resume():
  total = counted(('a', 4, 0, 1), ('b', 4, 0, 2), ('other', 4, 4, 0))
  resumed = batches.Tally(('a', 'b'))
  resumed.set_state(json.loads(json.dumps(total.get_state())))
  resumed.add_env('b', 2, 0, ['y\n' * 1000])
  resumed.add_step(False)
  with pytest.raises(
    statistics.TooManyErrors, match='none in 4 steps, after 4'
  ) as error:
    resumed.check('grpo')
  assert error.value.exit_code == 3


@pytest.mark.parametrize(
  'steps, hint',
  [
    ([('a', 4, 0, 1), ('a', 4, 1, 0)], ''),
    ([('a', 4, 4, 0), ('b', 4, 0, 2)], 'environment b of stage s'),
    ([('a', 4, 0, 0)], 'no step of stage s'),
  ],
)
def test_other_stages_end_well_with_hints(steps, hint, caplog):
  total = counted(*steps)
  total.check('s')
  total.warn('s')
  assert hint in caplog.text and bool(hint) == bool(caplog.text)
