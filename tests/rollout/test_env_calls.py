"""Calls into environments: time limits, copies, types of their results."""

import asyncio
import dataclasses
import json
import re
import signal
import threading
import time
import types as std

import numpy as np
import pytest

from posttrain import schema, types
from posttrain.data import sources
from posttrain.metrics import writers
from posttrain.rollout import abandoned, driver, env_calls, limits
from tests.rollout import fakes
from tests.rollout.fakes import Recall, raises, spec

LIMIT = 0.05


@pytest.fixture(autouse=True)
def no_earlier_threads(monkeypatch):
  """Forgets the calls that other tests have left behind."""
  monkeypatch.setattr(abandoned, '_threads', [])


@pytest.fixture
def gate(no_earlier_threads):
  """An event that hanging calls wait for; set at the end."""
  event = threading.Event()
  yield event
  event.set()
  end = time.monotonic() + 5
  while abandoned.count():
    assert time.monotonic() < end
    time.sleep(0.005)


def play(env, timeout=LIMIT, count=1, **options):
  """Returns the rollouts of `env`, and one of a sound environment."""
  specs = [*(spec(uid, env) for uid in range(1, count + 1)), spec(99)]
  engine = fakes.Engine({x.uid: ['red', 'red'] for x in specs})
  cfg = schema.Rollout(env_timeout=timeout, **options)
  *rollouts, sound = driver.Driver(engine, fakes.RENDERER, 64, cfg).run(specs)
  assert sound.score.reward == 1.0
  return rollouts


def spins():
  while True:
    pass


def swallows():
  end = time.monotonic() + 5
  while time.monotonic() < end:
    try:
      time.sleep(5)
    except Exception:
      pass


@pytest.mark.parametrize('hang', [spins, swallows, lambda: time.sleep(5)])
@pytest.mark.parametrize('hook', ['make', 'reset', 'step', 'grade', 'close'])
def test_inline_call_over_its_limit_is_interrupted(hook, hang):
  env, before = Recall(fails={hook: hang}), threading.active_count()
  start, handler = time.monotonic(), signal.getsignal(signal.SIGALRM)
  (rollout,) = play(env)
  assert time.monotonic() - start < 3
  assert rollout.stop_reason == 'error' and rollout.error == (
    f'recall/t1: {hook} must return within rollout.env_timeout=0.05 s: it did '
    'not, and was given up'
  )
  assert env.closed == ([] if hook == 'make' else ['t1'])
  assert threading.active_count() <= before  # those of other tests may end
  assert signal.getsignal(signal.SIGALRM) == handler
  assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize('seconds, ends', [(5 * LIMIT, 0), (0.3, 1)])
def test_call_that_catches_every_exception_is_late_or_ends_the_process(
  seconds, ends, monkeypatch
):
  """A bare `except:` catches the alarm as well."""

  class Ended(Exception):
    pass

  def end(reason, code):
    reasons.append(reason)
    raise Ended

  def stubborn():
    start = time.monotonic()
    while time.monotonic() - start < seconds:
      try:
        time.sleep(0.01)
      except Ended:
        raise
      except:  # noqa: E722
        pass

  reasons = []
  monkeypatch.setattr(limits, 'AGAIN', 0.02)
  monkeypatch.setattr(limits, 'MOST_ALARMS', 3 if ends else 1000)
  monkeypatch.setattr(limits.watchdog, 'end', end)
  (rollout,) = play(Recall(fails={'step': stubborn}))
  assert len(reasons) == ends
  assert ends or 'step must return within rollout.env_t' in rollout.error
  for reason in reasons:
    assert 'environment recall/t1: step' in reason and 'blocking' in reason


@pytest.mark.parametrize('blocking', [False, True])
@pytest.mark.parametrize('hook', ['make', 'reset', 'step', 'grade', 'close'])
@pytest.mark.parametrize('error', [SystemExit(0), asyncio.CancelledError()])
def test_exit_of_an_environment_is_its_error(hook, error, blocking):
  env = Recall(fails={hook: raises(error)}, blocking=blocking)
  (rollout,) = play(env)
  assert rollout.stop_reason == 'error'
  assert f'recall/t1: {type(error).__name__}' in rollout.error


@pytest.mark.parametrize('hook', ['make', 'reset', 'step', 'grade', 'close'])
def test_blocking_call_over_its_limit_is_left_behind(hook, gate):
  env = Recall(fails={hook: gate.wait}, blocking=True)
  rollouts = play(env, count=3, env_threads=1)
  for rollout in rollouts:
    assert f'{hook} must return within rollout.env_timeout=' in rollout.error
  assert abandoned.count() == 3
  assert len(env.closed) == (3 if hook == 'close' else 0)
  gate.set()
  end = time.monotonic() + 5
  while abandoned.count():
    assert time.monotonic() < end
  # A call that returns at last closes its episode, once.
  assert len(env.closed) == 3


def test_too_many_calls_left_behind_end_the_run(gate, monkeypatch):
  monkeypatch.setattr(abandoned, 'MOST', 1)
  monkeypatch.setattr(driver.pool, 'EXIT_SECONDS', LIMIT)
  env = Recall(fails={'step': gate.wait}, blocking=True)
  with pytest.raises(
    abandoned.TooManyThreads,
    match='calls of environments must return: got 2 calls that were given up',
  ):
    play(env, count=3)


def test_interrupt_does_not_wait_for_hanging_calls(gate, monkeypatch):
  monkeypatch.setattr(driver.pool, 'EXIT_SECONDS', LIMIT)
  monkeypatch.setattr(driver, 'CLOSE_SECONDS', LIMIT)
  for blocking in (False, True):
    broken = Recall(fails={'reset': raises(KeyboardInterrupt())})
    hook = 'step' if blocking else 'close'
    hangs = Recall(fails={hook: gate.wait}, blocking=blocking)
    specs = [spec(uid, hangs) for uid in range(8)] + [spec(99, broken)]
    engine = fakes.Engine({uid: ['red'] * 2 for uid in range(8)})
    start = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
      driver.Driver(
        engine, fakes.RENDERER, 64, schema.Rollout(env_timeout=60.0)
      ).run(specs)
    assert time.monotonic() - start < 4
    if not blocking:  # those after the third that hangs are not closed
      assert len(hangs.closed) == driver.MOST_LATE


def test_time_of_the_judge_does_not_count():
  judge = limits.untimed(lambda: time.sleep(4 * LIMIT))
  for blocking in (False, True):
    (rollout,) = play(Recall(fails={'make': judge}, blocking=blocking))
    assert rollout.score.reward == 1.0
  assert judge() is None  # outside of a call


def test_alarm_of_an_environment_works_and_is_replaced_afterwards():
  rung = []

  def times_itself():
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, 0.02)
    time.sleep(0.03)
    signal.signal(signal.SIGALRM, before)

  (rollout,) = play(Recall(fails={'make': times_itself}))
  assert rung == [1] and rollout.score.reward == 1.0
  (late,) = play(Recall(fails={'step': spins}))
  assert late.stop_reason == 'error'


def test_limits_outside_of_the_main_thread():
  results = []
  thread = threading.Thread(
    target=lambda: results.append(inline(lambda: 7, 0.001))
  )
  thread.start()
  thread.join()
  assert results == [7]
  assert limits.aside(lambda: 7, 1.0) == 7
  with pytest.raises(KeyError):
    limits.aside(raises(KeyError()), 1.0)


def test_numbers_of_numpy_become_pythons():
  score = types.Score(
    np.float32(0.5),
    np.bool_(True),
    np.int64(0),
    {'a': np.float16(2), 'b': np.array(3)},
    np.str_('x'),
  )
  step = types.StepOut(reward=np.float64(0.25), done=np.bool_(True))
  env = Recall(fails={'grade': lambda: score, 'step': lambda: step})
  (rollout,) = play(env)
  assert rollout.score == types.Score(0.5, True, False, {'a': 2, 'b': 3}, 'x')
  writers.dumps(dataclasses.asdict(rollout.score))
  assert json.dumps(dataclasses.asdict(rollout.turns[0]))
  assert type(rollout.score.reward) is type(rollout.turns[0].reward) is float


@pytest.mark.parametrize(
  'hook, value, message',
  [
    (
      'reset',
      'text',
      "reset must return a tuple of messages: got 'text', a st",
    ),
    ('step', None, 'step must return a types.StepOut: got None, a NoneType'),
    ('step', [1], r'step must return a types.StepOut: got \[1\], a list'),
    (
      'step',
      types.StepOut('hi'),
      "step must return a tuple of messages: got 'h",
    ),
    (
      'step',
      types.StepOut(reward='1'),
      "step must return a reward as a number: got '1'",
    ),
    (
      'step',
      types.StepOut(done='no'),
      "step must return done as a bool: got 'no'",
    ),
    ('grade', 1.0, 'grade must return a types.Score: got 1.0, a float'),
    (
      'grade',
      types.Score([1.0]),
      r'grade must return a reward as a number: got \[1.0\]',
    ),
    (
      'grade',
      types.Score(10**400),
      'reward of grade must be finite, .*got inf',
    ),
    ('grade', types.Score(1.0, 'yes'), "correct as a bool: got 'yes'"),
    ('grade', types.Score(1.0, metrics=[]), 'metrics as a small dict'),
    ('grade', types.Score(1.0, metrics={'a': ''}), "metric 'a' as a number"),
    ('grade', types.Score(1.0, answer=[1]), r'an answer as a str: got \[1'),
  ],
)
def test_result_of_the_wrong_type_names_environment_and_method(
  hook, value, message
):
  (rollout,) = play(Recall(fails={hook: lambda: value}))
  assert re.match(f'recall/t1: .*{message}', rollout.error), rollout.error


def test_text_of_an_error_is_short_and_one_line():
  class Odd(Exception):
    def __str__(self):
      raise OSError

  for error in (Odd(), ValueError('a\n' * 10**6)):
    (rollout,) = play(Recall(fails={'step': raises(error)}))
    assert rollout.error.startswith(f'recall/t1: {type(error).__name__}: ')
    assert len(rollout.error) < 600 and '\n' not in rollout.error


def inline(call, seconds):
  with limits.Inline(seconds) as limit:
    return limit(call)


def test_each_call_has_the_whole_limit():
  """One alarm serves many calls, also after one that was interrupted."""
  with limits.Inline(4 * LIMIT) as limit:
    for _ in range(3):
      assert limit(lambda: time.sleep(3 * LIMIT)) is None
    start = time.monotonic()
    assert limit(spins) == limits.Late(4 * LIMIT)
    assert 4 * LIMIT <= time.monotonic() - start < 3
    time.sleep(5 * LIMIT)  # between calls nothing is interrupted
    assert limit(lambda: 7) == 7
    assert limit(spins) == limits.Late(4 * LIMIT)


class Editor(Recall):
  """Edits the task that it gets, and the messages that it has returned."""

  def make(self, task):
    assert 'edited' not in task.info
    task.info['edited'] = task.info['list'].append(1)
    episode = super().make(task)
    step, episode.said = episode.step, [{'role': 'user', 'content': 'name'}]
    episode.reset = lambda: episode.said

    def edits(text, truncated):
      episode.said[0]['content'] = 'edited'
      return step(text, truncated)

    episode.step = edits
    return episode


def test_environment_cannot_change_tasks_or_conversations():
  env, info = Editor(), {'list': []}
  specs = [spec(1, env), spec(2, env)]
  task = dataclasses.replace(specs[0].task, info=info)
  specs = [dataclasses.replace(x, task=task) for x in specs]
  engine = fakes.Engine({uid: ['red', 'red'] for uid in (1, 2)})
  rollouts = driver.Driver(engine, fakes.RENDERER, 64).run(specs)
  assert info == {'list': []}
  for rollout in rollouts:
    assert rollout.messages[0] == {'role': 'user', 'content': 'name'}
    assert rollout.error is None and rollout.task is task


def source_of(value):
  env = std.SimpleNamespace(name='e', source=lambda split, seed: value)
  return env_calls.Source(env, 'train', 0, LIMIT)


@pytest.mark.parametrize('value', [[1], None, 'tasks', iter(())])
def test_source_of_the_wrong_type_is_named(value):
  with pytest.raises(env_calls.EnvError) as error:
    source_of(value)
  assert str(error.value).startswith(
    "environment e: source('train') must return a posttrain.data.sources."
  )


@pytest.mark.parametrize('name', ['other', None, 3])
def test_tasks_of_another_environment_are_named(name):
  source = source_of(sources.Shuffled([types.Task('1', name, ())], 0))
  for draw in (lambda: next(source), lambda: source.take(1)):
    with pytest.raises(env_calls.EnvError) as error:
      draw()
    assert "must return tasks whose env is 'e': got " in str(error.value)


def test_failures_of_sources_are_named():
  with pytest.raises(env_calls.EnvError, match='a source of types.Task: got 7'):
    next(source_of(sources.Shuffled([7], 0)))

  class Fails(sources.Shuffled):
    def take(self, count):
      return [1 / 0]

    def __next__(self):
      return spins()

  with pytest.raises(
    env_calls.EnvError,
    match=r"environment e: ZeroDivisionError: .* \(source\('train'\), test_env",
  ):
    source_of(Fails([7], 0)).take(1)
  with pytest.raises(
    env_calls.EnvError, match=r"e: source\('train'\) must return within rollo"
  ):
    next(source_of(Fails([7], 0)))
  # One of posttrain's own names what is wrong.
  with pytest.raises(ValueError, match='a source must hold items'):
    next(source_of(sources.Shuffled([], 0)))
