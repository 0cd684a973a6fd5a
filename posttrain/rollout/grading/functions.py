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
import math
import numbers
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.rollout.grading import calls

LARGEST = 1e18  # the largest |reward|: advantages are float32, and squared


class TooManyFaults(RuntimeError):
  """More faults of a reward in a row than its budget allows."""

  def __init__(self, message: str, errors: tuple[str, ...]):
    super().__init__(message)
    self.errors = errors  # all errors of the step


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
  ):
    """Wraps a function.

    Args:
      key: dotted config key of the entry.
      cfg: the entry.
      fn: the function that `cfg.fn` names.
      columns: returns each key of `info` that some task has; called when the
        tasks of a step all lack an argument of the function.
    """
    self._key, self._cfg, self._fn, self._columns = key, cfg, fn, columns
    self._name = f'{key}: {cfg.fn}'
    self._was_slow = False
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
    logged: dict[str, list[float]] = {}
    arguments = {**arguments, 'rollouts': rollouts, **_loggers(logged)}
    if judge is not None:
      arguments['judge'] = judge
    arguments = self._accepted(arguments)
    clock = calls.Clock(self._cfg.timeout)
    if judge is not None and 'judge' in arguments:
      arguments['judge'] = clock.without(judge)
    rewards, failed = [None] * len(rollouts), set(range(len(rollouts)))
    metrics, fault = {}, None
    try:
      rewards = _listed(calls.call(self._fn, arguments, clock), len(rollouts))
      metrics = {key: float(np.mean(x)) for key, x in [*logged.items()] if x}
      failed = {i for i, x in enumerate(rewards) if not self._is_reward(x)}
      if failed:
        fault = self._bad_value(rewards, failed, rollouts)
    except calls.Fault as error:
      fault = error
    self._warn_if_slow(clock.own)
    return Result(
      [
        None if x is None or i in failed else float(x)
        for i, x in enumerate(rewards)
      ],
      frozenset(failed),
      {**metrics, 'faults': float(bool(fault)), 'seconds': clock.wall},
      self._count(fault, f'{len(failed)} of {len(rollouts)}'),
    )

  def _accepted(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments that the function declares.

    A column that only tasks of other steps have is None for each task.
    """
    if _missing(self._fn, arguments):
      n = len(arguments['rollouts'])
      arguments = {**{k: [None] * n for k in self._columns()}, **arguments}
    missing = _missing(self._fn, arguments)
    if missing:
      raise ValueError(
        f'{self._name} must take arguments that exist: got {missing}, expected '
        f'some of {sorted(arguments)}'
      )
    parameters = inspect.signature(self._fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
      return dict(arguments)
    return {k: value for k, value in arguments.items() if k in parameters}

  def _is_reward(self, value: Any) -> bool:
    """Returns whether a value is None or a number that is not too large."""
    factor = max(1.0, abs(self._cfg.weight))
    try:
      return value is None or (
        isinstance(value, numbers.Real) and abs(value) * factor <= LARGEST
      )
    except OverflowError:  # an integer that is no float
      return False

  def _bad_value(self, values, failed: Set[int], rollouts) -> calls.Fault:
    first = min(failed)
    value, requirement = values[first], 'finite rewards'
    if isinstance(value, numbers.Real) and abs(value) < math.inf:
      requirement = (
        f'rewards of a size of at most {LARGEST:g}, with the weight of '
        f'{self._cfg.weight:g} as well'
      )
    return calls.Fault(
      f'must return {requirement}: got {reprlib.repr(value)} for rollout '
      f'{first}, of task {rollouts[first].task.id!r}; None marks a rollout as '
      'not scorable'
    )

  def _count(self, fault: calls.Fault | None, left_out: str) -> str | None:
    """Counts and logs a fault; returns the log line, None without a fault."""
    self.budget.count(fault)
    if fault is None:
      return None
    error = f'{self._name} {fault}; rollouts left out: {left_out}'
    logging.getLogger('absl').warning('%s', error, exc_info=fault.__cause__)
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


def _loggers(logged: dict[str, list[float]]) -> dict[str, Callable]:
  """Returns the loggers of one call, which append to `logged`."""

  def log_extra(column, values):
    values = [_plain(x) for x in values]
    values = [float(x) for x in values if isinstance(x, numbers.Real)]
    logged.setdefault(column, []).extend(values)

  def log_metric(name, value):
    log_extra(name, [value])

  return {'log_metric': log_metric, 'log_extra': log_extra}


def _plain(value: Any) -> Any:
  """Converts a scalar of numpy, jax or torch to Python's."""
  return value.item() if getattr(value, 'ndim', None) == 0 else value


def _missing(fn: Callable, arguments: Mapping[str, Any]) -> list[str]:
  """Returns the required parameters that have no argument."""
  return [
    key
    for key, p in inspect.signature(fn).parameters.items()
    if p.default is p.empty
    and key not in arguments
    and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
  ]


def _listed(rewards: Any, count: int) -> list[Any]:
  """Returns the value of a call as a list; a Fault if it is none of `count`."""
  unordered = isinstance(rewards, str | bytes | Mapping | Set)
  listed = not unordered and hasattr(rewards, '__len__')
  try:
    values = [_plain(x) for x in rewards] if listed else None
  except Exception:  # such as an array without axes
    values = None
  got = reprlib.repr(rewards) if values is None else len(values)
  if got != count:
    raise calls.Fault(
      f'must return a reward per rollout: got {got}, expected {count}'
    )
  return values
