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
  assert again.get_state() == train.get_state()
  # Entry i of seed s is entry i - 1 of seed s + 1: neighbours are no test.
  other, state = env.source('train', 999).get_state(), train.get_state()
  assert other['fingerprint'] != state['fingerprint']


def test_a_task_without_an_answer_has_no_demonstration():
  pytest.importorskip('reasoning_gym')
  cfg = schema.ReasoningGym(dataset='rush_hour', train_tasks=2, eval_tasks=1)
  (task,) = registry.make('e', cfg).source('eval', 0).take(1)
  assert task.answer is None and task.demonstration is None


def test_unknown_tasks_are_refused():
  pytest.importorskip('reasoning_gym')
  with pytest.raises(ValueError, match=r'envs\.e\.env\.dataset must'):
    registry.make('e', schema.ReasoningGym(dataset='no_such_task'))
