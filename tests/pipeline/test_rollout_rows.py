"""Rollouts of a training step as rows."""

import dataclasses
import json

import numpy as np

from posttrain import schema, types
from posttrain.chat import tokenizers
from posttrain.metrics import writers
from posttrain.pipeline import rollout_rows
from tests.algorithms import two_turns

TOKENIZER = tokenizers.load(schema.Tokenizer())


def played(*rewards, trained=True):
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
  return rollout_rows.Played(
    [group], [group] if trained else [], samples, TOKENIZER
  )


def test_a_row_per_rollout():
  rows = list(rollout_rows.rows({'e': played(0.0, 1.0)}))
  assert [row['reward'] for row in rows] == [0.0, 1.0]
  assert [row['advantage'] for row in rows] == [-1.0, 1.0]  # of the mask alone
  first = rows[0]
  assert (first['env'], first['task']) == ('e', two_turns.TASK.id)
  assert first['prompt'] and first['completion']
  sample = played(0.0).samples[0]
  ids = sample.ids[: sample.mask.argmax()]
  assert first['rendered'] == tokenizers.show(TOKENIZER, ids) != ''
  assert first['tokens'] == sum(x.mask.sum() for x in played(0.0).samples)
  assert json.loads(writers.dumps(first)) == first


def test_failed_rollouts_and_many_groups():
  failed = types.Rollout(
    7, two_turns.TASK, (), (), types.Score(None), 'error', 'broken'
  )
  groups = [[failed]] * (rollout_rows.MAX_GROUPS + 5)
  played = rollout_rows.Played(groups, [], [], TOKENIZER)
  rows = list(rollout_rows.rows({'e': played}))
  assert len(rows) == rollout_rows.MAX_GROUPS
  assert rows[0]['error'] == 'broken' and rows[0]['reward'] is None
