"""The suite: prompts of a config as tasks without grades."""

from posttrain import types
from posttrain.envs import suite


def test_prompts_are_tasks_in_their_order():
  env = suite.Suite(('What is 1 + 2?', 'Say hello.'))
  assert [task.prompt for task in env.tasks] == [
    ({'role': 'user', 'content': 'What is 1 + 2?'},),
    ({'role': 'user', 'content': 'Say hello.'},),
  ]
  assert [task.id for task in env.tasks] == ['eval.suite[0]', 'eval.suite[1]']
  assert env.source('eval', 3).take(9) == env.tasks
  assert env.source('train', 0).take(9) == ()
  assert suite.Suite(()).tasks == ()


def test_an_answer_is_one_turn_and_has_no_grade():
  env = suite.Suite(('Hi.',))
  episode = env.make(env.tasks[0])
  assert env.max_turns == 1 and episode.reset() == env.tasks[0].prompt
  assert episode.step('Hello.', False).done
  assert episode.grade() == types.Score(reward=None)
  episode.close()
