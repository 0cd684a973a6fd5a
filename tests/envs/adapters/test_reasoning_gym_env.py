"""Tasks of reasoning-gym: splits, demonstrations, scores; a missing package."""

import sys

import pytest

from posttrain import schema
from posttrain.envs import registry


def test_a_missing_package_is_named(monkeypatch):
  monkeypatch.setitem(sys.modules, 'reasoning_gym', None)
  with pytest.raises(ValueError, match=r'for envs\.e\.env.*reasoning-gym'):
    registry.make('e', schema.ReasoningGym())


def test_tasks_are_generated_and_scored():
  pytest.importorskip('reasoning_gym')
  # Sums of two digits repeat, and are shared with evaluation.
  options = {'min_terms': 2, 'max_terms': 2, 'min_digits': 1, 'max_digits': 1}
  cfg = schema.ReasoningGym(
    dataset='chain_sum', options=options, train_tasks=300, eval_tasks=50
  )
  env = registry.make('e', cfg)
  train, held_out = (env.source(x, 3) for x in ('train', 'eval'))
  assert len(train) < 300 and len(held_out) <= 50
  questions = [
    [x.prompt[0]['content'] for x in source.take(len(source))]
    for source in (train, held_out)
  ]
  assert not set(questions[0]) & set(questions[1])
  assert len(set(questions[0])) == len(questions[0])
  for task in held_out.take(5):
    for text, correct in (
      (task.demonstration[0]['content'], True),
      (f'<think><answer>1</answer></think> {task.answer}', True),
      ('<answer>no</answer>', False),
    ):
      episode = env.make(task)
      episode.step(text, False)
      assert episode.grade().correct is correct
  again = registry.make('e', cfg).source('train', 3)
  assert again.fingerprint == train.fingerprint
  assert env.source('train', 4).fingerprint != train.fingerprint


def test_unknown_tasks_are_refused():
  pytest.importorskip('reasoning_gym')
  with pytest.raises(ValueError, match=r'envs\.e\.env\.dataset must'):
    registry.make('e', schema.ReasoningGym(dataset='no_such_task'))
