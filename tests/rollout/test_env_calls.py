"""Calls into environments: time limits, copies, types of their results."""

import asyncio
import re
import types as std

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.data import sources
from posttrain.rollout import calls, env_calls, episodes
from posttrain.util import coroutines
from tests.rollout import fakes
from tests.rollout.fakes import Recall, spec

LIMIT = 0.05


def play(env, timeout=LIMIT, count=1, **options):
  """Returns the rollouts of `env`, and one of a sound environment."""
  specs = [*(spec(uid, env) for uid in range(1, count + 1)), spec(99)]
  engine = fakes.Engine({x.uid: ['red', 'red'] for x in specs})
  cfg = schema.Rollout(env_timeout=timeout, **options)
  *rollouts, sound = episodes.Driver(engine, fakes.RENDERER, 64, cfg).run(specs)
  assert sound.score.reward == 1.0
  return rollouts


@pytest.mark.parametrize('blocking', [False, True])
@pytest.mark.parametrize('hook', ['make', 'reset', 'step', 'grade', 'close'])
def test_call_over_its_limit_ends_its_episode(hook, blocking, gate):
  env = Recall(fails={hook: gate.wait}, blocking=blocking)
  for rollout in play(env, count=3, env_threads=1):
    assert rollout.error.startswith(
      f'recall/t{rollout.uid}: {hook} must return within rollout.env_timeout='
    )
  assert calls.hung() == 3
  gate.set()
  fakes.wait_for(lambda: not calls.hung())
  # A call that returns at last closes its episode, once.
  assert len(env.closed) == 3


class Async(Recall):
  """Every hook is a coroutine."""

  async def make(self, task):
    return AsyncEpisode(super().make(task))


class AsyncEpisode:
  def __init__(self, episode):
    for name in ('reset', 'step', 'grade', 'close'):
      setattr(self, name, self._later(getattr(episode, name)))

  def _later(self, hook):
    async def later(*args):
      await asyncio.sleep(0)
      return hook(*args)

    return later


@pytest.mark.parametrize('blocking', [False, True])
def test_coroutines_are_awaited(blocking):
  env = Async(blocking=blocking)
  (rollout,) = play(env, 5.0)
  (plain,) = play(Recall(blocking=blocking), 5.0)
  assert rollout.messages == plain.messages and rollout.error is None
  assert rollout.score == plain.score and env.closed == [rollout.task.id]


def test_a_coroutine_is_awaited_outside_of_a_call():
  """As in a worker process, whose caller has the time limit."""

  async def later():
    return 7

  assert coroutines.wait(later()) == coroutines.wait(7) == 7


def test_numbers_of_numpy_become_pythons():
  score = types.Score(
    np.float32(0.5), np.bool_(True), metrics={'b': np.array(3)}
  )
  env = Recall(fails={'grade': lambda: score})
  (rollout,) = play(env, 5.0)
  assert rollout.score == types.Score(0.5, True, metrics={'b': 3})
  assert type(rollout.score.reward) is float


@pytest.mark.parametrize(
  'hook, value, words',
  [
    ('reset', 'text', "got 'text', a str"),
    ('step', None, 'types.StepOut.*: got None'),
    ('step', types.StepOut(reward='1'), "a reward as a number .*: got '1'"),
    ('grade', 1.0, 'types.Score: got 1.0'),
    ('grade', types.Score(10**400), 'a reward as a number of a size'),
    ('grade', types.Score(1.0, metrics={'a': ''}), "metric 'a' as a number"),
  ],
)
def test_result_of_the_wrong_type_names_environment_and_method(
  hook, value, words
):
  (rollout,) = play(Recall(fails={hook: lambda: value}), 5.0)
  assert re.match(f'recall/t1: {hook} must .*{words}', rollout.error)


class Editor(Recall):
  """Edits the task that it gets, and the messages that it has returned."""

  def make(self, task):
    task.info['list'].append(1)
    said = [{'role': 'user', 'content': 'name'}]

    def edits():
      said[0]['content'] = 'edited'
      return types.StepOut(done=True)

    self.fails = {'reset': lambda: said, 'step': edits}
    return super().make(task)


def test_environment_cannot_change_tasks_or_conversations():
  own = spec(1, Editor())
  own.task.info['list'] = []
  engine = fakes.Engine({1: ['red']})
  (rollout,) = episodes.Driver(engine, fakes.RENDERER, 64).run([own])
  assert rollout.error is None and rollout.task.info == {'list': []}
  assert rollout.messages[0] == {'role': 'user', 'content': 'name'}


def source_of(value):
  env = std.SimpleNamespace(name='e', source=lambda split, seed: value)
  return env_calls.Source(env, 'train', 0, LIMIT)


def test_failures_of_sources_are_named(gate):
  for task in (7, types.Task('1', 'other', ())):
    source = source_of(sources.Shuffled([task], 0))
    with pytest.raises(
      env_calls.EnvError, match=r"e: source\('train'\) must return .* of 'e'"
    ):
      next(source)

  class Fails(sources.Shuffled):
    def take(self, count):
      return [1 / 0]

    def __next__(self):
      gate.wait()

  with pytest.raises(
    env_calls.EnvError,
    match=r"environment e: ZeroDivisionError: .* \(source\('train'\), test_env",
  ):
    source_of(Fails([7], 0)).take(1)
  with pytest.raises(
    env_calls.EnvError, match=r"e: source\('train'\) must return within rollo"
  ):
    next(source_of(Fails([7], 0)))
