"""Classes of TRL's `environment_factory` as environments."""

import json

import pytest

from posttrain import schema
from posttrain.chat import tool_calls
from posttrain.envs import registry
from posttrain.rollout import env_calls

GAMES = 'tests.envs.adapters.games'
PLAIN = tool_calls.Style('plain', 'tool')
ROWS = [
  {'prompt': 'A number. ', 'secret': 3, 'says': 'Go.', 'answer': '3'},
  {
    'prompt': [
      {'role': 'system', 'content': 'Be brief.'},
      {'role': 'user', 'content': 'Guess.'},
    ]
  },
]


def make(**options):
  options = {'factory': f'{GAMES}:Guess', **options}
  return registry.make('g', schema.Trl(**options))


@pytest.fixture
def path(tmp_path):
  file = tmp_path / 'rows.jsonl'
  file.write_text(''.join(json.dumps(row) + '\n' for row in ROWS))
  return str(file)


def begin(env):
  """Returns the calls into a new episode, and its prompt."""
  calls = env_calls.Calls(env, next(env.source('train', 0)))
  return calls, calls.open()


def test_a_row_becomes_a_prompt(path):
  env = make(path=path)
  tasks = env.source('train', 0).take(2)
  prompts = [env.make(task).reset() for task in tasks]
  assert prompts[0] == ({'role': 'user', 'content': 'A number. Go.'},)
  assert prompts[1] == tuple(ROWS[1]['prompt'])
  assert tasks[0].id == f'{path}:1' and tasks[0].answer == '3'
  assert len(env.source('eval', 0)) == 0
  assert len(make(path=path, eval_path=path).source('eval', 0)) == 2


def test_an_episode_of_calls():
  episode, _ = begin(make(correct_at=0.5))
  (message,), reward, done = episode.step('guess({"number": 9})', False, PLAIN)
  assert message['content'] == 'too large, good' and not done and reward == 0
  messages, _, done = episode.step(
    'So: guess({"number": 5}). And wait()', False, PLAIN
  )
  assert not done and messages == (
    {'role': 'tool', 'name': 'guess', 'content': 'right'},
    {'role': 'tool', 'name': 'wait', 'content': '2'},
  )
  messages, _, done = episode.step('It is 5.', False, PLAIN)
  assert done and messages == ()
  score = episode.end(True)
  assert (score.reward, score.correct) == (0.5, True)
  assert score.metrics == {'calls': 3, 'failures': 0, 'malformed': 0}


def test_an_episode_without_a_reward_is_not_scorable():
  env = make(factory=f'{GAMES}:Judged')
  assert next(env.source('train', 0)).tools is None
  episode, _ = begin(env)
  messages, _, done = episode.step('hello', False)
  assert done and not messages
  score = episode.end(True)
  assert score.reward is None and score.correct is None


def test_a_bad_row_is_named(tmp_path):
  file = tmp_path / 'rows.jsonl'
  file.write_text('{"prompt": 3}')
  with pytest.raises(ValueError, match='rows.jsonl:1: prompt must be'):
    make(path=str(file)).source('train', 0)


@pytest.mark.parametrize(
  ('options', 'words'),
  [
    ({'factory': f'{GAMES}:Nobody'}, r'envs\.g\.env\.factory must'),
    (
      {'factory': f'{GAMES}:no_environment'},
      r'envs\.g\.env\.factory must build an object with a method reset: .*int',
    ),
  ],
)
def test_options_are_checked(options, words):
  with pytest.raises(ValueError, match=words):
    make(**options)
