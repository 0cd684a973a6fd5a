"""Calls into environments: their arguments are copies, their results checked.

An environment is a user's code. Its failures become an `EnvError`, which names
environment, task and method: an exception, with the place where it was raised;
a call over the time limit; a result of the wrong type. What it gets and what it
returns is copied, so that no environment can change a task that others get, or
a conversation afterwards.
"""

import abc
import copy
import dataclasses
import functools
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, cast

from posttrain import types
from posttrain.chat import rendering, tool_calls
from posttrain.envs import base
from posttrain.rollout import calls, worker
from posttrain.util import coroutines, errors, watchdog

_LONGEST = 2000  # characters of the message of a tool's exception
_CUT = 'the turn was cut off before its end: its calls are not made'


class EnvError(RuntimeError):
  """A failure of an environment, with the names of environment and task."""


class ResultError(ValueError):
  """A result of an environment of the wrong type or size."""


def failure(where: str, method: str, error: BaseException) -> EnvError:
  """Returns the error of an environment's method.

  Args:
    where: names the environment, and the task where there is one.
    method: the method that was called.
    error: what it raised, a `ResultError` about its result, or `calls.Late`.
  """
  if isinstance(error, ResultError):
    return EnvError(f'{where}: {error}')
  if isinstance(error, calls.Late):
    return EnvError(
      f'{where}: {method} must return within rollout.env_timeout='
      f'{error.seconds:g} s: it did not, and was given up'
    )
  place = ', '.join(filter(None, (method, errors.place(error))))
  return EnvError(f'{where}: {errors.describe(error)} ({place})')


class Workers(Protocol):
  """Worker processes of environments and reward functions, as `remote.Remote`.

  `losses` counts the workers that were lost or given up.
  """

  losses: int

  def begin(self) -> None:
    """Starts the workers."""

  def episode(self, task: types.Task) -> 'EpisodeCalls':
    """Returns the calls into the episode of a task, in a worker."""
    ...

  def reward(
    self, path: str
  ) -> Callable[[worker.Call, calls.Clock], worker.Reply]:
    """Returns a reward function in a worker."""
    ...


class EpisodeCalls(abc.ABC):
  """All calls into the episode of one task.

  Calls do not overlap, and may come from different threads. `method` is the
  environment's method that was called last.
  """

  def __init__(self, task: types.Task):
    """Calls nothing yet."""
    self._task, self.method = task, 'make'
    self._is_running = self._has_episode = False

  @property
  def where(self) -> str:
    """'<env>/<task id>', for errors."""
    return f'{errors.text(self._task.env)}/{errors.text(self._task.id)}'

  def caught(self, method: str, *args: Any) -> Any:
    """Returns the result of a call, see `Calls`, or its `EnvError`.

    Args:
      method: 'open', which is the first, 'step', 'end' or 'close'.
      *args: its arguments.

    Raises:
      Late: a worker process exceeded the time limit.
    """
    self._is_running = True
    try:
      with watchdog.waiting(lambda: f'environment {self.where}: {self.method}'):
        return self._make(method, *args)
    except calls.Late:
      raise
    except EnvError as error:  # of a worker process
      return error
    except BaseException as error:  # also SystemExit, from a user's code
      return failure(self.where, self.method, error)
    finally:
      self._is_running = False

  @abc.abstractmethod
  def _make(self, method: str, *args: Any) -> Any:
    """Makes a call."""

  def abandon(self) -> None:
    """Closes the episode unless a call runs; ignores its exceptions.

    A call that was given up closes the episode itself, once it returns.
    """
    if self.is_open:
      self.caught('close')

  @property
  def is_open(self) -> bool:
    """Whether `abandon` would close the episode."""
    return self._has_episode and not self._is_running


class Calls(EpisodeCalls):
  """Calls into an episode in this process."""

  def __init__(self, env: base.Env, task: types.Task):
    """Calls nothing yet."""
    super().__init__(task)
    self._env = env
    self._episode: base.Episode | None = None
    self._turns = ToolTurns(task.tools) if task.tools else None

  def _make(self, method: str, *args: Any) -> Any:
    return getattr(self, method)(*args)

  def open(self) -> types.Messages:
    """Makes the episode; returns its prompt."""
    self.method = 'make'
    self._episode = coroutines.wait(self._env.make(copy.deepcopy(self._task)))
    self._has_episode = True
    return _messages(self._result('reset'), 'reset')

  def _result(self, method: str, *args: Any) -> Any:
    """Returns the result of a method of the episode."""
    self.method = method
    return coroutines.wait(getattr(self._episode, method)(*args))

  def step(
    self, text: str, truncated: bool, style: tool_calls.Style | None = None
  ) -> tuple[types.Messages, float, bool]:
    """Passes a turn on, or makes the calls of tools that it has.

    Args:
      text: the turn.
      truncated: whether it was cut off before its end.
      style: how the policy calls tools; None if its calls are not read.

    Returns:
      The new messages, the reward, and whether the episode is done.
    """
    if self._turns is not None and style is not None:
      assert self._episode is not None
      self.method = 'call'
      results = self._turns.play(self._episode, text, truncated, style)
      if results:
        return _messages(results, 'call'), 0.0, False
    out = self._result('step', text, truncated)
    if not isinstance(out, types.StepOut):
      raise _wrong('step', 'types.StepOut(messages, reward, done)', out)
    return (
      _messages(out.messages, 'step'),
      _number(out.reward, 'step', 'a reward', worker.LARGEST),
      _flag(out.done, 'step', 'done'),
    )

  def end(self, has_turns: bool) -> types.Score:
    """Grades the episode, unless it has no turn, and closes it."""
    score = types.Score(None)
    if has_turns:
      score = _score(self._result('grade'))
      if self._turns is not None:
        metrics = {**self._turns.metrics(), **score.metrics}
        score = dataclasses.replace(score, metrics=metrics)
    self.close()
    return score

  def close(self) -> None:
    """Closes the episode."""
    had_episode, self._has_episode = self._has_episode, False
    if had_episode:
      self._result('close')
      self._episode = None


class ToolTurns:
  """The turns of one episode with tools."""

  def __init__(self, tools_of_task: types.Tools):
    self._schemas = tool_calls.parameters(tools_of_task.schemas)
    self._turns = self._malformed = self._calls = self._failures = 0

  def play(
    self,
    episode: base.Episode,
    text: str,
    truncated: bool,
    style: tool_calls.Style,
  ) -> types.Messages:
    """Makes the calls of a turn, in order.

    Those of a truncated turn are malformed and not made, not even the complete
    ones: the policy had not ended what it wanted to call.

    Returns:
      A message per call, or one for all of them in the role 'user'; () for a
      turn without calls.
    """
    parsed = tool_calls.parse(text, style.format, self._schemas)
    problems = [
      _CUT if truncated else tool_calls.problem(call, self._schemas)
      for call in parsed
    ]
    self._turns += 1
    self._calls += len(parsed)
    self._malformed += any(problems)
    results = [
      self._failure(problem) if problem else self._result(episode, call)
      for call, problem in zip(parsed, problems, strict=True)
    ]
    messages = [
      {'role': 'tool', 'name': call.name, 'content': result}
      for call, result in zip(parsed, results, strict=True)
    ]
    return tool_calls.write(messages, style)

  def metrics(self) -> dict[str, float]:
    """Returns the counts of the episode, as metrics of its score.

    calls; failures, calls that got an error; malformed, the share of turns with
    a call that could not be read, did not fit its tool, or was in a truncated
    turn. None without turns.
    """
    if not self._turns:
      return {}
    return {
      'calls': self._calls,
      'failures': self._failures,
      'malformed': self._malformed / self._turns,
    }

  def _result(self, episode: base.Episode, call: tool_calls.Call) -> str:
    run = cast(base.ToolEpisode, episode).call
    schemas = self._schemas[call.name].get('properties', {})
    arguments = {
      name: tool_calls.fitted(value, schemas.get(name))
      for name, value in call.arguments.items()
    }
    try:
      return str(coroutines.wait(run(call.name, arguments)))
    except Exception as error:
      return self._failure(errors.describe(error, _LONGEST))

  def _failure(self, reason: str) -> str:
    self._failures += 1
    return f'error: {reason}'


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
      EnvError: the call fails.
    """
    self._name = env.name
    self._where = f'environment {errors.text(env.name)}'
    self._method, self._timeout = f'source({split!r})', timeout
    self._source = self._call(lambda: env.source(split, seed))

  def __len__(self) -> int:
    """Returns the number of tasks of an epoch."""
    return self._call(lambda: len(self._source))

  def __iter__(self) -> 'Source':
    return self

  def __next__(self) -> types.Task:
    return self._checked(self._call(lambda: next(self._source)))

  def take(self, count: int, start: int = 0) -> tuple[types.Task, ...]:
    """Returns the first tasks in their own order, from `start` on."""
    place = (count, start) if start else (count,)  # others may have no start
    tasks = self._call(lambda: tuple(self._source.take(*place)))
    return tuple(map(self._checked, tasks))

  def observe(self, results: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Passes on what finished groups came to, if the source observes.

    Args:
      results: task's id and pass rate of a step's groups, as drawn.

    Returns:
      The source's metrics.
    """
    observe = getattr(self._source, 'observe', None)
    return self._call(lambda: observe(results)) if observe else {}

  def get_state(self) -> dict[str, Any]:
    """Returns the position, JSON-able."""
    return self._call(self._source.get_state)

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where `get_state` was called."""
    self._call(functools.partial(self._source.set_state, state))

  def _call(self, call: calls.Thunk) -> Any:
    def attempt():
      # Quotes an error within the time limit, as its `str` may hang.
      try:
        return coroutines.wait(call())
      except MemoryError:
        raise
      except BaseException as error:  # also SystemExit, from a user's code
        expected = isinstance(error, ValueError | RuntimeError)
        if expected and errors.is_expected(error):
          raise  # of a source of posttrain: it names file and row
        raise failure(self._where, self._method, error) from error

    try:
      with watchdog.waiting(lambda: f'{self._where}: {self._method}'):
        return calls.inline(attempt, self._timeout)
    except calls.Late as error:
      raise failure(self._where, self._method, error) from None

  def _checked(self, task: Any) -> types.Task:
    if not isinstance(task, types.Task) or task.env != self._name:
      must = f'a source of types.Task of {errors.quote(self._name)}'
      raise failure(self._where, self._method, _wrong(self._method, must, task))
    return task


def _wrong(method: str, expected: str, got: Any) -> ResultError:
  return ResultError(
    f'{method} must return {expected}: got {errors.quote(got, 80)}, a '
    f'{type(got).__name__}'
  )


def _messages(messages: Any, method: str) -> types.Messages:
  """Returns a copy of the messages in their normal form."""
  if not isinstance(messages, list | tuple):
    raise _wrong(method, 'a tuple of messages', messages)
  try:
    return rendering.normalize(copy.deepcopy(messages))
  except ValueError as error:
    raise ResultError(f'{method}: {error}') from None


def _number(
  value: Any, method: str, what: str, largest: float = math.inf
) -> float:
  """Returns a number of Python, numpy, jax or torch as a float.

  Args:
    value: the number.
    method: the environment's method that returned it.
    what: the noun for the value in errors, as in "reward".
    largest: the largest absolute value; infinity = any number, also NaN.
  """
  plain = worker.plain(value)
  bound = '' if largest == math.inf else f' of a size of at most {largest:g}'
  if isinstance(plain, numbers.Real) and (
    not bound or abs(plain) <= largest  # or NaN
  ):
    return float(plain)
  raise _wrong(method, f'{what} as a number{bound}', value)


def _flag(value: Any, method: str, what: str) -> bool:
  if (number := _number(value, method, what)) not in (0, 1):
    raise _wrong(method, f'{what} as a bool', value)
  return bool(number)


def _score(score: Any) -> types.Score:
  """Returns a copy of a score, with Python's numbers."""
  if not isinstance(score, types.Score):
    raise _wrong('grade', 'a types.Score', score)
  answer = worker.plain(score.answer)
  if not isinstance(answer, str | int | float | None):
    raise _wrong('grade', 'an answer as a str', answer)
  reward, correct, formatted = score.reward, score.correct, score.formatted
  return types.Score(
    None
    if reward is None
    else _number(reward, 'grade', 'a reward', worker.LARGEST),
    None if correct is None else _flag(correct, 'grade', 'correct'),
    None if formatted is None else _flag(formatted, 'grade', 'formatted'),
    {
      errors.text(name, 100): _number(x, 'grade', f'metric {name!r}')
      for name, x in score.metrics.items()
    },
    None if answer is None else str(answer),
  )
