"""Tasksets of `verifiers` v1 as environments."""

import pytest

from posttrain import schema
from posttrain.envs import registry

SETS = 'tests.envs.adapters.tasksets'


def needs_verifiers():
  pytest.importorskip('verifiers.v1', reason='verifiers is not installed')


def make(taskset='Sums', **options):
  needs_verifiers()
  options = {'train_tasks': 5, 'eval_tasks': 3, **options}
  return registry.make(
    'v', schema.Verifiers(taskset=f'{SETS}:{taskset}', **options)
  )


def play(env, text, truncated=False):
  episode = env.make(next(env.source('train', 0)))
  episode.reset()
  out = episode.step(text, truncated)
  assert out.done and out.reward == (episode.grade().reward or 0)
  episode.close()
  return episode.grade()


def test_tasks_of_an_endless_taskset():
  env = make()
  assert env.max_turns == 1 and not env.blocking
  (first, *_), held = env.source('train', 7).take(9), env.source('eval', 7)
  assert first.prompt == (
    {'role': 'system', 'content': 'Add.'},
    {'role': 'user', 'content': '3 + 1 = ?'},
  )
  assert first.info['answer'] == '4' and first.id == 'train:0'
  assert [t.answer for t in held.take(9)] == list('123')
  assert [t.answer for t in env.source('train', 0).take(9)] == list('45678')


def test_options_of_the_taskset():
  env = make(options={'last': 24, 'first': 20}, eval_options={'first': 23})
  assert len(env.source('train', 0)) == 4
  assert [t.answer for t in env.source('eval', 0).take(9)] == ['24']
  with pytest.raises(ValueError, match=r'env\.options must be those of Config'):
    make(options={'nope': 1}).source('train', 0)


def test_scores_of_answers():
  score = play(make(correct_at=1.5), '4')
  assert (score.reward, score.correct) == (1.5, True)
  assert score.metrics == {'right': 1.0, 'brief': 1.0, 'cut': 0.0, 'turns': 1.0}
  score = play(make(correct_at=1.5), 'It may be 4, or 5.')
  assert (score.reward, score.correct) == (0.0, False)
  score = play(make(), '5', truncated=True)
  assert (score.reward, score.correct) == (0.5, None)
  assert score.metrics['cut'] == 1.0


@pytest.mark.parametrize(
  ('taskset', 'words'),
  [
    ('NeedsRuntimes', "'runtime' of tests_pass"),
    ('Listening', 'needs a first message from the user'),
  ],
)
def test_tasks_with_more_than_one_turn_are_refused(taskset, words):
  with pytest.raises(ValueError, match=f'environment v, task.*{words}'):
    make(taskset).source('train', 0)


def test_a_comparison_of_a_group_is_refused():
  needs_verifiers()
  cfg = schema.Verifiers(taskset='tests.envs.adapters.compared:Compared')
  with pytest.raises(ValueError, match='which has Tournament'):
    registry.make('v', cfg).source('train', 0)
