"""Faults of servers and libraries of environments, on this machine."""

import contextlib
import importlib.util
import json
import threading
from collections.abc import Iterator

from experiments.trials import base
from posttrain import envs, schema


def refused(make, *words: str) -> str:
  """Returns the one line with which `make` refuses."""
  try:
    result = make()
  except ValueError as error:
    line = str(error)
  else:
    raise AssertionError(f'not refused: {result!r}')
  assert '\n' not in line and len(line) < 2000, line[:300]
  for word in words:
    assert word in line, f'{word!r} is not in: {line}'
  return line


@contextlib.contextmanager
def _server(answers: list[str]) -> Iterator[str]:
  """Yields the url of a server that gives these answers, in order."""
  from websockets.sync import server

  left = iter(answers)

  def serve(socket) -> None:
    for message in socket:
      if json.loads(message)['type'] == 'close':
        return
      socket.send(next(left))

  with server.serve(serve, 'localhost', 0) as opened:
    thread = threading.Thread(target=opened.serve_forever)
    thread.start()
    try:
      yield f'ws://localhost:{opened.socket.getsockname()[1]}/ws'
    finally:
      opened.shutdown()
      thread.join()


@contextlib.contextmanager
def _episode(answers: list[str], **options) -> Iterator:
  """Yields an episode, after its reset, with a server of these answers."""
  with _server([_observed(), *answers]) as url:
    env = envs.make('o', schema.OpenEnv(url=url, **options))
    episode = env.make(env.source('train', 0).take(1)[0])
    with contextlib.closing(episode):
      episode.reset()
      yield episode


def _observed(reward=None, done: object = False) -> str:
  data = {'observation': {'x': 1}, 'reward': reward, 'done': done}
  return json.dumps({'type': 'observation', 'data': data})


REFUSAL = '{"type": "error", "data": {"code": "VALIDATION_ERROR"}}'


@base.trial('envs', 'refused actions cannot pay more than legal ones')
def openenv_refused(scratch: base.Scratch) -> str:
  del scratch
  seen = []
  for options, answers, texts, want in (
    ({}, [REFUSAL] * 3, ['{}'] * 3, (None, 1.0)),
    ({'refused_reward': -9.0}, [REFUSAL] * 3, ['{}'] * 3, (-9.0, 1.0)),
    # Refused before they are sent.
    ({'refused_reward': -9.0}, [], ['no JSON', '[1]', '['], (-9.0, 1.0)),
    (
      {'refused_reward': -9.0},
      [_observed(-1), REFUSAL],
      ['{}'] * 2,
      (-1.0, 0.0),
    ),
    ({'refused_reward': -9.0}, [_observed()], ['{}'], (None, 0.0)),
    ({'refused_reward': -9.0}, [], [], (None, 0.0)),
  ):
    with _episode(answers, **options) as episode:
      for text in texts:
        episode.step(text, False)
      score = episode.grade()
    got = (score.reward, score.metrics['all_refused'])
    assert got == want, (options, texts, got)
    seen.append(got)
  refused(lambda: schema.OpenEnv(refused_reward=float('nan')), 'finite')
  refused(
    lambda: schema.OpenEnv(refused_reward=2.0, correct_at=1.0), 'be below'
  )
  return f'{len(seen)} episodes: {base.words(seen)}'


@base.trial('envs', 'malformed answers of a server are one line')
def openenv_malformed(scratch: base.Scratch) -> str:
  del scratch
  huge = '9' * 5000
  answers = [
    '',
    'null',
    '[' * 10**6,
    '{"a":' * 10**5,
    '{"type": "observation"}',
    '{"type": "observation", "data": []}',
    '{"type": "observation", "data": {"observation": "x"}}',
    '{"type": ["x"], "data": {"message": {}}}',
    '{"type": "error", "data": {"message": "' + 'sk-' + 'a' * 10**6 + '"}}',
    '{"type": "error", "data": {"errors": [null, 3, {"loc": {}}]}}',
    '{"type": "observation", "data": {"observation": {}, "reward": 1e999}}',
    f'{{"type": "observation", "data": {{"observation": {huge}}}}}',
    *(_observed(reward) for reward in ('1', [], {}, float('nan'), 10**400)),
    *(_observed(0, done) for done in ('false', 2, [])),
  ]
  longest = 0
  for answer in answers:
    with _episode([answer]) as episode:
      try:
        episode.step('{}', False)
      except RuntimeError as error:
        line = str(error)
      else:
        raise AssertionError(f'accepted: {answer[:80]}')
    assert '\n' not in line and line.startswith('ws://localhost:'), line[:200]
    assert 'a' * 100 not in line, line
    longest = max(longest, len(line))
  assert longest < 700, longest
  return (
    f'{len(answers)} answers: a line each, the longest {longest} characters'
  )


# Tasksets of the tests -> the words of their refusal.
_TASKSETS = {
  'tasksets:NeedsMetrics': "a runtime for metric 'passed'",
  'tasksets:NeedsRuntimes': "a runtime for reward 'tests_pass'",
  'tasksets:Siblings': "an argument 'siblings' for reward 'best'",
  'tasksets:Staged': 'a runtime for stage_verifier',
  'tasksets:DeferredOnes': 'a verifier of its own',
  'tasksets:Artifacts': 'an image, artifacts',
  'compared:Compared': "whose package has 'Tournament'",
}


@base.trial('envs', 'verifiers: what cannot be scored here is refused by name')
def verifiers_refused(scratch: base.Scratch) -> str:
  del scratch
  if importlib.util.find_spec('verifiers') is None:
    raise base.NotTried('verifiers is not installed')
  for name, words in _TASKSETS.items():
    cfg = schema.Verifiers(taskset=f'tests.envs.adapters.{name}')
    env = envs.make('v', cfg)
    refused(lambda env=env: env.source('train', 0), words)
  cfg = schema.Verifiers(taskset='tests.envs.adapters.tasksets:Sums')
  env = envs.make('v', cfg)
  task, rewards = env.source('train', 0).take(1)[0], []
  for answer in (task.answer, 'wrong, and much too long'):
    episode = env.make(task)
    episode.reset()
    rewards.append(episode.step(answer, False).reward)
  assert rewards == [1.5, 0.0], rewards
  return f'{len(_TASKSETS)} tasksets refused; a plain one: {rewards}'
