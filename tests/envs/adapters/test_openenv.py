"""The client of OpenEnv servers, against a server in a thread."""

import contextlib
import json
import sys
import time

import pytest

from posttrain import schema
from posttrain.envs import registry
from tests.envs.adapters import servers


@pytest.fixture
def server():
  made = servers.Server()
  with made.running() as url:
    made.url = url
    yield made


def make(url, **options):
  return registry.make('g', schema.OpenEnv(url=url, max_turns=4, **options))


def begin(env, seed):
  """Returns an episode after its reset, and the prompt."""
  (task,) = (
    task for task in env.source('train', 0).take(100) if task.id == str(seed)
  )
  episode = env.make(task)
  return episode, episode.reset()


def says(number):
  return json.dumps({'number': number})


def test_an_episode_of_guesses(server):
  env = make(server.url, prompt='Guess.', correct_at=1.0)
  assert env.blocking and env.max_turns == 4
  episode, messages = begin(env, 7)
  assert messages == (
    {'role': 'system', 'content': 'Guess.'},
    {'role': 'user', 'content': '{"hint": "guess", "tries": 0}'},
  )
  out = episode.step(says(3), False)
  assert out.messages == (
    {'role': 'user', 'content': '{"hint": "higher", "tries": 1}'},
  )
  assert (out.reward, out.done) == (0.25, False)
  assert episode.grade().correct is False
  out = episode.step(says(7), False)
  assert (out.reward, out.done) == (1.0, True)
  score = episode.grade()
  assert (score.reward, score.correct) == (1.25, True)
  assert score.metrics == {'refused': 0, 'all_refused': 0}
  episode.close()
  assert server.closed == 1 and server.seeds == [7]


def test_seeds_of_the_splits_are_disjoint():
  env = make('ws://nowhere/ws', train_tasks=5)
  train, held = env.source('train', 3), env.source('eval', 0)
  assert [task.info['seed'] for task in train.take(9)] == [0, 1, 2, 3, 4]
  assert held.take(1)[0].info['seed'] == schema.MAX_SEEDS


@pytest.mark.parametrize(
  ('text', 'words'),
  [
    ('{}', 'error: Invalid message; number: Field required'),
    ('guess 3', 'error: an action must be a JSON object'),
  ],
)
def test_a_bad_action_is_an_observation(server, text, words):
  episode, _ = begin(make(server.url), 7)
  out = episode.step(text, False)
  assert (out.reward, out.done) == (0.0, False)
  (message,) = out.messages
  assert message['role'] == 'user' and message['content'].startswith(words)
  # Nobody gave a reward: that is not zero.
  assert episode.grade().reward is None
  episode.close()


def test_an_episode_of_refused_actions_has_a_declared_reward(server):
  env = make(server.url, refused_reward=-2.0, correct_at=1.0)
  episode, _ = begin(env, 7)
  for count in (1, 2):
    assert episode.step('what?', False).reward == 0.0
    score = episode.grade()
    assert (score.reward, score.correct) == (-2.0, False)
    assert score.metrics == {'refused': count, 'all_refused': 1}
  assert episode.step(says(3), False).reward == 0.25  # one legal action
  assert episode.grade().reward == 0.25
  episode.close()


@pytest.mark.parametrize(
  ('number', 'error', 'words'),
  [
    (12, RuntimeError, 'EXECUTION_ERROR'),
    (servers.DROPS, ConnectionError, 'got ConnectionClosed'),
  ],
)
def test_errors_of_the_server_raise(server, number, error, words):
  episode, _ = begin(make(server.url), 7)
  with pytest.raises(error, match=words):
    episode.step(says(number), False)
  episode.close()
  episode.close()


@contextlib.contextmanager
def answering(message, late=0.0, **options):
  """Yields an episode of a server that answers the first request only."""

  def handle(connection):
    connection.recv()
    with contextlib.suppress(Exception):
      time.sleep(late)
      connection.send(message)
      connection.recv(timeout=5)

  with servers.serving(handle) as url:
    env = make(url, connect_timeout=2.0, **options)
    episode = env.make(next(env.source('train', 0)))
    yield episode
    episode.close()


@pytest.mark.parametrize(
  'answer',
  [
    '',
    servers.observation('x', 1, float('nan')),
    ' ' * (2**24 + 1),  # compressed to 17 KiB
  ],
)
def test_malformed_answers_raise_one_line(answer):
  with answering(answer) as episode:
    with pytest.raises((RuntimeError, ConnectionError)) as raised:
      episode.reset()
    assert len(str(raised.value)) < 600 and '\n' not in str(raised.value)


def test_a_late_answer_is_no_answer_to_the_next_request():
  one = servers.observation('x', 1, 0.5)
  with answering(one, late=0.3, message_timeout=0.1) as episode:
    for _ in range(2):
      with pytest.raises(ConnectionError, match='a reset in message_timeout='):
        episode.reset()
      time.sleep(0.4)


def test_a_missing_server_raises():
  with servers.Server().running() as url:
    pass
  with pytest.raises(ConnectionError, match='url must name a server'):
    begin(make(url), 7)


def test_a_full_server_raises_and_close_frees_a_session():
  made = servers.Server(capacity=1)
  with made.running() as url:
    env = make(url)
    first, _ = begin(env, 1)
    with pytest.raises(RuntimeError, match='CAPACITY_REACHED'):
      begin(env, 2)
    first.close()
    for seed in range(20):  # close waits until the server knows
      episode, _ = begin(env, seed)
      episode.close()


def test_observation_field_and_action_field(server):
  options = {'observation_field': 'hint', 'action_field': 'number'}
  episode, (asks,) = begin(make(server.url, **options), 7)
  assert asks == {'role': 'user', 'content': 'guess'}
  # The text is the field, whatever it is: here the server wants a number.
  (said,) = episode.step('7', False).messages
  assert said['content'].startswith('error: Invalid message')
  episode.close()
  with pytest.raises(RuntimeError, match="observation_field 'reward'"):
    begin(make(server.url, observation_field='reward'), 7)


def test_the_missing_package_is_named(monkeypatch):
  for name in [name for name in sys.modules if name.startswith('websockets.')]:
    monkeypatch.delitem(sys.modules, name)
  monkeypatch.setitem(sys.modules, 'websockets', None)
  with pytest.raises(ValueError, match=r"pip install 'posttrain\[openenv\]'"):
    make('ws://nowhere/ws')
