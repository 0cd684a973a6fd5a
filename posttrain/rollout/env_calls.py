"""Calls into environments: their arguments are copies, their results checked.

An environment is a user's code. Its failures become an `EnvError`, which names
environment, task and method: an exception, with the place where it was raised;
a call over the time limit; a result of the wrong type. What it gets and what it
returns is copied, so that no environment can change a task that others get, or
a conversation afterwards.
"""

import dataclasses
import functools
import numbers
import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from posttrain import types
from posttrain.chat import rendering, tool_specs
from posttrain.envs import base
from posttrain.rollout import copies, limits, tool_turns
from posttrain.rollout.grading import values
from posttrain.util import errors, foreign, watchdog

_METRICS = 1000  # the most metrics of a score


class EnvError(RuntimeError):
  """A failure of an environment, with the names of environment and task."""


class ResultError(ValueError):
  """A result of an environment of the wrong type or size."""


def failure(where: str, method: str, error: BaseException) -> EnvError:
  """Returns the error of an environment's method.

  Args:
    where: names the environment, and the task where there is one.
    method: the method that was called.
    error: what it raised, or a `ResultError` about its result.
  """
  if issubclass(type(error), ResultError):  # a class may define `__class__`
    return EnvError(f'{where}: {error}')
  place = ', '.join(filter(None, (method, foreign.place(error))))
  return EnvError(f'{where}: {foreign.error(error)} ({place})')


def _raise_interrupt(error: BaseException) -> None:
  """Raises Ctrl-C again, which only the main thread gets."""
  is_main = threading.current_thread() is threading.main_thread()
  if is_main and isinstance(error, KeyboardInterrupt):
    raise error


def late(where: str, method: str, result: limits.Late) -> EnvError:
  """Returns the error of a call that exceeded its time limit."""
  return EnvError(
    f'{where}: {method} must return within rollout.env_timeout='
    f'{result.seconds:g} s: it did not, and was given up'
  )


class Named(Protocol):
  """Names what calls call, for errors."""

  method: str  # the environment's method that was called last

  @property
  def where(self) -> str:
    """'<env>/<task id>'."""
    ...


def caught(calls: Named, fn: Callable[..., Any], *args: Any) -> Any:
  """Returns the result of a method of `calls`, or its `EnvError`."""
  try:
    with watchdog.waiting(lambda: f'environment {calls.where}: {calls.method}'):
      return fn(*args)
  except base.TimeLimit:
    raise
  except EnvError as error:  # from a worker process
    return error
  except BaseException as error:  # also SystemExit, from a user's code
    _raise_interrupt(error)
    return failure(calls.where, calls.method, error)


class Calls:
  """All calls into the episode of one task.

  Calls do not overlap, and may come from different threads. Each returns its
  result or an `EnvError`.
  """

  def __init__(self, env: base.Env, task: types.Task):
    """Calls nothing yet."""
    self._env, self._task = env, task
    self._episode: base.Episode | None = None
    self._turns = tool_turns.Turns(task.tools) if task.tools else None
    self._is_left_behind = False
    self.method = 'make'  # the last that was called

  @property
  def where(self) -> str:
    """'<env>/<task id>', for errors."""
    return f'{foreign.text(self._task.env)}/{foreign.text(self._task.id)}'

  def caught(self, fn: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of a method of this class, or its `EnvError`."""
    return caught(self, fn, *args)

  def open(self) -> types.Messages:
    """Makes the episode; returns its prompt."""
    self.method = 'make'
    self._episode = self._env.make(copies.of(self._task))
    self.method = 'reset'
    return _messages(self._episode.reset(), 'reset')

  def step(
    self, text: str, truncated: bool, style: tool_specs.Style | None = None
  ) -> tuple[types.Messages, float, bool]:
    """Passes a turn on; returns the new messages, the reward, and `done`.

    Args:
      text: the turn.
      truncated: whether it was cut off before its end.
      style: how the policy calls tools; None if the task has none.
    """
    assert self._episode is not None
    if self._turns is not None and style is not None and style.reads_calls:
      self.method = 'call'
      results = self._turns.play(self._episode, text, truncated, style)
      if results:
        return _messages(results, 'call'), 0.0, False
    self.method = 'step'
    out = self._episode.step(text, truncated)
    if not isinstance(out, types.StepOut):
      raise _wrong('step', 'a types.StepOut', out)
    return (
      _messages(out.messages, 'step'),
      _reward(out.reward, 'step', ''),
      _flag(out.done, 'step', 'done'),
    )

  def end(self, has_turns: bool) -> types.Score:
    """Grades the episode, unless it has no turn, and closes it."""
    assert self._episode is not None
    score = types.Score(None)
    if has_turns:
      self.method = 'grade'
      score = _score(self._episode.grade())
      if self._turns is not None:
        metrics = {**self._turns.metrics(), **score.metrics}
        score = dataclasses.replace(score, metrics=metrics)
    self._close()
    return score

  def leave_behind(self) -> None:
    """Leaves the episode to a call that has not returned."""
    self._is_left_behind = True

  def abandon(self) -> None:
    """Closes the episode in any state; ignores its exceptions."""
    if not self._is_left_behind:
      self.close_after_call()

  def close_after_call(self) -> None:
    """Closes the episode after a call that was left behind has returned."""
    try:
      self._close()
    except base.TimeLimit:
      raise
    except BaseException as error:
      _raise_interrupt(error)

  @property
  def is_open(self) -> bool:
    """Whether `abandon` would close the episode."""
    return self._episode is not None and not self._is_left_behind

  def _close(self) -> None:
    episode, self._episode = self._episode, None
    if episode is not None:
      self.method = 'close'
      episode.close()


class Source:
  """An environment's tasks; its calls have a time limit, its tasks a type."""

  def __init__(self, env: base.Env, split: str, seed: int, timeout: float):
    """Calls the environment's `source`.

    Args:
      env: the environment.
      split: 'train' or 'eval'.
      seed: the seed of the tasks' order.
      timeout: the time limit of a call, in seconds.

    Raises:
      EnvError: the call fails, or returns no source.
    """
    self._name = env.name
    self._where = f'environment {foreign.text(env.name)}'
    self._method, self._timeout = f'source({split!r})', timeout
    self._source = self._call(lambda: env.source(split, seed))
    methods = ('__next__', '__len__', 'take', 'get_state', 'set_state')
    missing = [x for x in methods if not hasattr(self._source, x)]
    if missing:
      wanted = f'a posttrain.data.sources.Shuffled, with {", ".join(methods)}'
      raise self._failure(_wrong(self._method, wanted, self._source))

  def __len__(self) -> int:
    """Returns the number of tasks of an epoch."""
    return self._call(lambda: len(self._source))

  def __iter__(self) -> 'Source':
    return self

  def __next__(self) -> types.Task:
    return self._checked(self._call(lambda: next(self._source)))

  def take(self, count: int) -> tuple[types.Task, ...]:
    """Returns the first tasks in their own order; at most all of them."""
    tasks = self._call(lambda: tuple(self._source.take(count)))
    return tuple(map(self._checked, tasks))

  def get_state(self) -> dict[str, Any]:
    """Returns the position, JSON-able."""
    return self._call(self._source.get_state)

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where `get_state` was called."""
    self._call(functools.partial(self._source.set_state, state))

  def _call(self, call: Callable[[], Any]) -> Any:
    with (
      limits.Inline(self._timeout) as inline,
      watchdog.waiting(lambda: f'{self._where}: {self._method}'),
    ):
      result = inline(lambda: self._attempt(call))
    if isinstance(result, limits.Late):
      raise late(self._where, self._method, result)
    return result

  def _attempt(self, call: Callable[[], Any]) -> Any:
    """Calls; quotes an error within the time limit, as its `str` may hang."""
    try:
      return call()
    except (base.TimeLimit, MemoryError):
      raise
    except BaseException as error:  # also SystemExit, from a user's code
      _raise_interrupt(error)
      expected = isinstance(error, ValueError | RuntimeError)
      if expected and errors.is_expected(error):
        raise  # of a source of posttrain: it names file and row
      raise self._failure(error) from error

  def _checked(self, task: Any) -> types.Task:
    if not isinstance(task, types.Task):
      raise self._failure(_wrong(self._method, 'a source of types.Task', task))
    if task.env != self._name:
      wanted = f'tasks whose env is {foreign.quote(self._name)}'
      raise self._failure(_wrong(self._method, wanted, task.env))
    return task

  def _failure(self, error: BaseException) -> EnvError:
    return failure(self._where, self._method, error)


def _wrong(method: str, expected: str, got: Any) -> ResultError:
  return ResultError(
    f'{method} must return {expected}: got {foreign.quote(got, 80)}, a '
    f'{foreign.kind(got)}'
  )


def _messages(messages: Any, method: str) -> types.Messages:
  """Returns a copy of the messages, which are checked."""
  if not isinstance(messages, list | tuple):
    raise _wrong(method, 'a tuple of messages', messages)
  messages = tuple(copies.of(message) for message in messages)
  for index, message in enumerate(messages):
    try:
      rendering.check_message(message, f'messages[{index}] of the environment')
    except ValueError as error:
      raise ResultError(f'{method}: {foreign.text(error)}') from None
  return messages


def _reward(value: Any, method: str, hint: str) -> float:
  """Returns a finite reward as Python's float."""
  number = _number(value, method)
  if not abs(number) <= values.LARGEST:  # or NaN
    raise ResultError(
      f'reward of {method} must be finite, of a size of at most '
      f'{values.LARGEST:g}: got {number!r}{hint}'
    )
  return number


def _number(value: Any, method: str, metric: Any = None) -> float:
  """Returns a number of Python, numpy, jax or torch as a float.

  Args:
    value: the number.
    method: the environment's method that returned it.
    metric: the metric's name; None = the reward.
  """
  plain = values.plain(value)
  if not isinstance(plain, numbers.Real):
    named = f'metric {foreign.quote(metric, 80)}'
    what = 'a reward' if metric is None else named
    raise _wrong(method, f'{what} as a number', value)
  try:
    return float(plain)
  except OverflowError:
    return float('inf') if plain > 0 else -float('inf')


def _flag(value: Any, method: str, what: str) -> bool:
  plain = values.plain(value)
  if not isinstance(plain, bool | int | float) or plain not in (0, 1):
    raise _wrong(method, f'{what} as a bool', value)
  return bool(plain)


def _metric(name: Any) -> str:
  """Returns the name of a metric as it is logged."""
  return _known_metric(name) if type(name) is str else foreign.text(name, 100)


@functools.lru_cache(1024)
def _known_metric(name: str) -> str:
  return foreign.text(name, 100)


def _score(score: Any) -> types.Score:
  """Returns a copy of a score, with Python's numbers."""
  if not isinstance(score, types.Score):
    raise _wrong('grade', 'a types.Score', score)
  if not isinstance(score.metrics, Mapping) or len(score.metrics) > _METRICS:
    raise _wrong('grade', 'metrics as a small dict', score.metrics)
  metrics = score.metrics.items()
  reward, answer = score.reward, values.plain(score.answer)
  if reward is not None:
    hint = '; None marks an episode as not scorable'
    reward = _reward(reward, 'grade', hint)
  if not isinstance(answer, str | int | float | None):
    raise _wrong('grade', 'an answer as a str', answer)
  return types.Score(
    reward,
    None if score.correct is None else _flag(score.correct, 'grade', 'correct'),
    None
    if score.formatted is None
    else _flag(score.formatted, 'grade', 'formatted'),
    {_metric(name): _number(x, 'grade', name) for name, x in metrics},
    None if answer is None else str(answer),
  )
