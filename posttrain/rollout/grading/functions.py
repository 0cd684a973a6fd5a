"""Reward functions, their faults, and the budgets of faults.

A call has a fault if it raises, exceeds its timeout, returns the wrong number
of rewards, or returns a value that is neither None nor a number whose square
fits into a float32, both with its weight and without. After a fault the
affected rollouts have no reward at all: all of the call, or those with a bad
value. Each fault is logged and counted; too many in a row end the run.
"""

import dataclasses
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.rollout import abandoned, copies
from posttrain.rollout.grading import calls, isolated, values
from posttrain.rollout.remote import remote as remotes
from posttrain.util import exits, foreign, spelling, watchdog

LARGEST = values.LARGEST


_FUNCTIONS = {'judge', 'log_extra', 'log_metric'}  # arguments that are no lists
# Names of arguments elsewhere -> ours.
_SYNONYMS = {
  **dict.fromkeys(('prompt', 'query', 'queries', 'question'), 'prompts'),
  **dict.fromkeys(
    (
      'completion',
      'response',
      'responses',
      'solution_str',
      'output',
      'outputs',
    ),
    'completions',
  ),
}


class TooManyFaults(RuntimeError):
  """More faults of a reward in a row than its budget allows."""

  def __init__(self, message: str, errors: tuple[str, ...]):
    super().__init__(message)
    self.errors = errors  # all errors of the step


class OnlyFaults(TooManyFaults):
  """TooManyFaults in a stage where no rollout has had a reward yet."""

  exit_code = exits.NO_REWARD


@dataclasses.dataclass(frozen=True)
class Result:
  """The rewards of one summand for some rollouts."""

  rewards: list[float | None]  # None = no term of the sum
  # Indices of the rollouts that could not be scored because of a fault: their
  # total reward is unknown.
  failed: frozenset[int] = frozenset()
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  error: str | None = None  # the fault, in one line


class Budget:
  """The number of times in a row that a reward may fail.

  Checkpoints do not store the count: a resumed run starts from 0.
  """

  def __init__(self, key: str, name: str, max_faults: int):
    """Starts from 0 faults.

    Args:
      key: dotted config key of the entry.
      name: the reward's name in errors.
      max_faults: the most faults in a row.
    """
    self._key, self._name, self._max_faults = key, name, max_faults
    self._last, self._in_row = None, 0

  def count(self, fault: calls.Fault | str | None) -> None:
    """Counts one call; `fault`: its error, None if it succeeded."""
    self._last, self._in_row = fault, self._in_row + 1 if fault else 0

  def check(self, errors: tuple[str, ...]) -> None:
    """Checks that the budget is not exceeded.

    Args:
      errors: all errors of the step, attached to the exception.

    Raises:
      TooManyFaults: more than `max_faults` calls failed in a row.
    """
    if self._in_row > self._max_faults:
      raise TooManyFaults(
        f'{self._name} must fail at most max_faults={self._max_faults} times '
        f'in a row: got {self._in_row}, the last: {self._last}; fix it, or '
        f'raise {self._key}.max_faults',
        errors,
      ) from (self._last if isinstance(self._last, Exception) else None)


class Function:
  """A reward function, called once per step."""

  def __init__(
    self,
    key: str,
    cfg: schema.RewardFn,
    fn: Callable,
    columns: Callable[[], Iterable[str]] = tuple,
    remote: remotes.Remote | None = None,
  ):
    """Wraps a function.

    Args:
      key: dotted config key of the entry.
      cfg: the entry.
      fn: the function that `cfg.fn` names.
      columns: returns each key of `info` that some task has; called when the
        tasks of a step all lack an argument of the function.
      remote: worker processes, for a function that is not isolated and has no
        judge; None = a thread.
    """
    self._key, self._cfg, self._fn, self._columns = key, cfg, fn, columns
    self._name = f'{key}: {cfg.fn}'
    self._was_slow = False
    self._worker = None
    if cfg.isolate:
      assert cfg.fn is not None
      self._worker = isolated.Worker(cfg.fn, cfg.memory * 2**20)
    elif remote is not None and cfg.judge is None:
      assert cfg.fn is not None
      self._worker = remote.reward(cfg.fn)
    self.budget = Budget(key, self._name, cfg.max_faults)

  def __call__(
    self,
    rollouts: Sequence[types.Rollout],
    arguments: Mapping[str, Any],
    judge: Callable | None = None,
  ) -> Result:
    """Calls the function once, for all rollouts.

    Args:
      rollouts: the rollouts to score.
      arguments: values by parameter name; the function takes those that it
        declares. `rollouts` and the two loggers are added.
      judge: the argument `judge`; None = none.

    Returns:
      The rewards, with metrics: the means of the logged values, if the function
      returned; `faults`, 0 or 1; `seconds`, including those of the judge.

    Raises:
      ValueError: the function needs an argument that does not exist.
      EndpointError: the judge's server is away.
    """
    clock = calls.Clock(self._cfg.timeout)
    logged: dict[str, list[float]] = {}
    loggers = values.loggers(logged)
    shared = {**loggers} if judge is None else {**loggers, 'judge': judge}
    arguments = self._accepted({**arguments, 'rollouts': rollouts, **shared})
    if 'judge' in arguments and judge is not None:
      shared['judge'] = clock.untimed(judge)
    rewards: list[values.Value] = [None] * len(rollouts)
    failed, metrics, fault = set(range(len(rollouts))), {}, None
    try:
      rewards = self._call(arguments, shared, clock, logged, len(rollouts))
      metrics = {key: float(np.mean(x)) for key, x in [*logged.items()] if x}
      failed = {i for i, x in enumerate(rewards) if isinstance(x, values.Bad)}
      if failed:
        fault = _bad_value(rewards, min(failed), rollouts)
    except calls.Fault as error:
      fault = error
    self._warn_if_slow(clock.own)
    return Result(
      [None if i in failed else x for i, x in enumerate(rewards)],
      frozenset(failed),
      {**metrics, 'faults': float(bool(fault)), 'seconds': clock.wall},
      self._count(fault, f'{len(failed)} of {len(rollouts)}'),
    )

  def _call(
    self,
    arguments: Mapping[str, Any],
    shared: Mapping[str, Any],
    clock: calls.Clock,
    logged: dict[str, list[float]],
    count: int,
  ) -> list[values.Value]:
    """Calls the function with copies; those of `shared` stay as they are."""
    try:
      own = {
        key: shared[key] if key in shared else _copied(value)
        for key, value in arguments.items()
      }
    except Exception as error:  # nested too deeply, or too large
      raise calls.Fault(
        f'must get arguments that can be copied: got {foreign.error(error)}'
      ) from error
    weight = self._cfg.weight
    with watchdog.waiting(lambda: f'reward function {self._name}'):
      if self._worker is not None:
        return self._worker.call(own, logged, clock, count, weight)
      return calls.call(
        self._fn, own, clock, lambda x: values.listed(x, count, weight)
      )

  def _accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the function declares.

    A column that only tasks of other steps have is None for each task.
    """
    if missing(self._fn, arguments):
      n = len(arguments['rollouts'])
      arguments = {**{k: [None] * n for k in self._columns()}, **arguments}
    require_arguments(self._name, self._fn, arguments)
    parameters = inspect.signature(self._fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
      return dict(arguments)
    return {k: value for k, value in arguments.items() if k in parameters}

  def _count(self, fault: calls.Fault | None, left_out: str) -> str | None:
    """Counts and logs a fault; returns the log line, None without a fault.

    Raises:
      TooManyThreads: too many calls that exceeded their timeout still run.
    """
    self.budget.count(fault)
    if fault is None:
      return None
    error = f'{self._name} {fault}; rollouts left out: {left_out}'
    lines = '\n'.join(filter(None, (error, fault.stack)))
    logging.getLogger('absl').warning('%s', lines)
    abandoned.check(f'{self._name} must return within its timeout')
    return error

  def _warn_if_slow(self, seconds: float) -> None:
    """Logs a warning, once; a call over the timeout is a fault instead."""
    timeout = self._cfg.timeout
    if timeout / 2 < seconds < timeout and not self._was_slow:
      self._was_slow = True
      logging.getLogger('absl').warning(
        '%s took %.2g s of its timeout of %.3g s; make it faster, or raise '
        '%s.timeout',
        self._name,
        seconds,
        timeout,
        self._key,
      )


def _copied(value: Any) -> Any:
  """Copies an argument; an object that rollouts share is copied for each."""
  if type(value) in (list, tuple):
    return type(value)(copies.of(x) for x in value)
  return copies.of(value)


def _bad_value(
  rewards: Sequence[values.Value], index: int, rollouts: Sequence[types.Rollout]
) -> calls.Fault:
  bad = rewards[index]
  assert isinstance(bad, values.Bad)
  task = foreign.quote(rollouts[index].task.id)
  return calls.Fault(
    f'must return {bad.requirement}: got {bad.value} for rollout {index}, of '
    f'task {task}; None marks a rollout as not scorable'
  )


def require_arguments(name: str, fn: Callable, known: Iterable[str]) -> None:
  """Refuses a function that needs an argument that does not exist.

  Args:
    name: the function's name in errors.
    fn: the function.
    known: names of arguments.
  """
  known = sorted(known)
  if wrong := missing(fn, known):
    raise ValueError(
      f'{name} must take arguments that exist: got {wrong}, expected some of '
      f'{known}; {_meant(wrong, known)}'
    )


def _meant(wrong: Sequence[str], known: Sequence[str]) -> str:
  """Returns what to do about arguments that do not exist."""
  near = {
    key: [_SYNONYMS[key]]
    if _SYNONYMS.get(key) in known
    else spelling.near(key, known)
    for key in wrong
  }
  meant = [f'{names[0]} for {key}' for key, names in near.items() if names]
  rest = [key for key, names in near.items() if not names]
  hints = []
  if meant:
    lists = ' Each is a list, with an item per rollout'
    lists = '' if _FUNCTIONS & {x[0] for x in near.values() if x} else lists
    hints.append(f'did you mean {", ".join(meant)}?{lists}')
  if rest:
    hints.append(
      f'no task has {", ".join(rest)}: rename the argument, or a column of '
      'your rows (env.columns), or give it a default'
    )
  return '; '.join(hints)


def missing(fn: Callable, arguments: Collection[str]) -> list[str]:
  """Returns the required parameters that have no argument."""
  return [
    key
    for key, p in inspect.signature(fn).parameters.items()
    if p.default is p.empty
    and key not in arguments
    and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
  ]
