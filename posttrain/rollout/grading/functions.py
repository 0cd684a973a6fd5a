"""Reward functions, which may fail; what becomes of it.

A fault is a call that raises, is not back in time, returns another number of
rewards, or one that is neither None nor a number that a float32 can square,
with its weight or without. What it could not score has no reward at all: all
rollouts of a call, or those with a bad value. Each fault is logged and counted;
too many in a row end the run.
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

LARGEST = 1e18  # of a reward's size: advantages are float32, and are squared


class TooManyFaults(RuntimeError):
  """A reward function failed more often in a row than its budget allows."""

  def __init__(self, message: str, errors: tuple[str, ...]):
    super().__init__(message)
    self.errors = errors  # all there were in the step


@dataclasses.dataclass(frozen=True)
class Found:
  """What one summand says of some rollouts."""

  rewards: list[float | None]  # None = it is no part of the sum
  # Indices of those whose reward should be here and is not: nobody knows what
  # they are worth.
  failed: frozenset[int] = frozenset()
  metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)
  error: str | None = None  # the fault, in a line


class Budget:
  """How often in a row a reward may fail.

  That is no part of a checkpoint: a run that is resumed counts from 0.
  """

  def __init__(self, key: str, name: str, most: int):
    """Args: key: of the config's entry; name: for errors; most: faults."""
    self._key, self._name, self._most = key, name, most
    self._last, self._in_row = None, 0

  def count(self, fault: calls.Fault | str | None) -> None:
    """Takes what went wrong in a call; None = nothing."""
    self._last, self._in_row = fault, self._in_row + 1 if fault else 0

  def check(self, errors: tuple[str, ...]) -> None:
    """Ends the run of a reward that fails again and again.

    Args:
      errors: all there were in the step, for who writes them down.

    Raises:
      TooManyFaults: more than `max_faults` calls in a row.
    """
    if self._in_row > self._most:
      raise TooManyFaults(
        f'{self._name} must fail at most max_faults={self._most} times in a '
        f'row: got {self._in_row}, the last: {self._last}; mend it, or raise '
        f'{self._key}.max_faults',
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
    """Makes one that was never called.

    Args:
      key: of the config, to this entry.
      cfg: its options.
      fn: what `cfg.fn` names.
      columns: returns the names of what tasks may carry; asked when those of a
        step all lack what the function needs.
    """
    self._key, self._cfg, self._fn, self._columns = key, cfg, fn, columns
    self._name = f'{key}: {cfg.fn}'
    self._was_slow = False
    self.budget = Budget(key, self._name, cfg.max_faults)

  def __call__(
    self,
    rollouts: Sequence[types.Rollout],
    given: Mapping[str, Any],
    judge: Callable | None = None,
  ) -> Found:
    """Asks it for rewards.

    Args:
      rollouts: to score.
      given: what it may ask for by name, beside them and what logs.
      judge: to hand over as well; None = none.

    Returns:
      With the means of what it logged, if it returned at all; `faults`, 0 or
      1; `seconds`, those of its judge included.

    Raises:
      ValueError: it asks for what there is not.
      EndpointError: of the judge.
    """
    logged: dict[str, list[float]] = {}
    given = {**given, 'rollouts': rollouts, **_loggers(logged)}
    if judge is not None:
      given['judge'] = judge
    given = self._accepted(given)
    clock = calls.Clock(self._cfg.timeout)
    if judge is not None and 'judge' in given:
      given['judge'] = clock.without(judge)
    rewards, failed = [None] * len(rollouts), set(range(len(rollouts)))
    metrics, fault = {}, None
    try:
      rewards = _listed(calls.call(self._fn, given, clock), len(rollouts))
      metrics = {key: float(np.mean(x)) for key, x in [*logged.items()] if x}
      failed = {i for i, x in enumerate(rewards) if not self._is_reward(x)}
      if failed:
        fault = self._bad(rewards, failed, rollouts)
    except calls.Fault as error:
      fault = error
    self._warn_if_slow(clock.own)
    return Found(
      [
        None if x is None or i in failed else float(x)
        for i, x in enumerate(rewards)
      ],
      frozenset(failed),
      {**metrics, 'faults': float(bool(fault)), 'seconds': clock.wall},
      self._count(fault, f'{len(failed)} of {len(rollouts)}'),
    )

  def _accepted(self, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of what is given, what the function takes by name.

    What only tasks of other steps carry is None for each of these.
    """
    if _missing(self._fn, given):
      none = {key: [None] * len(given['rollouts']) for key in self._columns()}
      given = {**none, **given}
    missing = _missing(self._fn, given)
    if missing:
      raise ValueError(
        f'{self._name} must ask for what there is: got {missing}, expected '
        f'some of {sorted(given)}'
      )
    parameters = inspect.signature(self._fn).parameters
    if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
      return dict(given)
    return {key: value for key, value in given.items() if key in parameters}

  def _is_reward(self, value: Any) -> bool:
    """Whether it is a number that is not too large, or None."""
    factor = max(1.0, abs(self._cfg.weight))
    try:
      return value is None or (
        isinstance(value, numbers.Real) and abs(value) * factor <= LARGEST
      )
    except OverflowError:  # an integer that is no float
      return False

  def _bad(self, values, failed: Set[int], rollouts) -> calls.Fault:
    first = min(failed)
    value, wanted = values[first], 'finite rewards'
    if isinstance(value, numbers.Real) and abs(value) < math.inf:
      wanted = (
        f'rewards of a size of at most {LARGEST:g}, with the weight of '
        f'{self._cfg.weight:g} as well'
      )
    return calls.Fault(
      f'must return {wanted}: got {reprlib.repr(value)} for rollout {first}, '
      f'of task {rollouts[first].task.id!r}; None says that one is not '
      'scorable'
    )

  def _count(self, fault: calls.Fault | None, left_out: str) -> str | None:
    """Returns what is said of a fault."""
    self.budget.count(fault)
    if fault is None:
      return None
    error = f'{self._name} {fault}; rollouts left out: {left_out}'
    logging.getLogger('absl').warning('%s', error, exc_info=fault.__cause__)
    return error

  def _warn_if_slow(self, seconds: float) -> None:
    """Says so once; one that is out of time is a fault anyway."""
    timeout = self._cfg.timeout
    if timeout / 2 < seconds < timeout and not self._was_slow:
      self._was_slow = True
      logging.getLogger('absl').warning(
        '%s took %.2g s of the %.3g s that it has; make it faster, or raise '
        '%s.timeout',
        self._name,
        seconds,
        timeout,
        self._key,
      )


def _loggers(logged: dict[str, list[float]]) -> dict[str, Callable]:
  """What one call logs by; what has been read already stays as it is."""

  def log_extra(column, values):
    values = [_plain(x) for x in values]
    found = [float(x) for x in values if isinstance(x, numbers.Real)]
    logged.setdefault(column, []).extend(found)

  def log_metric(name, value):
    log_extra(name, [value])

  return {'log_metric': log_metric, 'log_extra': log_extra}


def _plain(value: Any) -> Any:
  """A scalar of numpy, jax or torch as Python's; others as they are."""
  return value.item() if getattr(value, 'ndim', None) == 0 else value


def _missing(fn: Callable, given: Mapping[str, Any]) -> list[str]:
  """What the function needs by name, and is not given."""
  return [
    key
    for key, p in inspect.signature(fn).parameters.items()
    if p.default is p.empty
    and key not in given
    and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
  ]


def _listed(found: Any, count: int) -> list[Any]:
  """What was returned, if it is one value per rollout."""
  unordered = isinstance(found, str | bytes | Mapping | Set)
  listed = not unordered and hasattr(found, '__len__')
  try:
    values = [_plain(x) for x in found] if listed else None
  except Exception:  # such as an array without axes
    values = None
  got = reprlib.repr(found) if values is None else len(values)
  if got != count:
    raise calls.Fault(
      f'must return a reward per rollout: got {got}, expected {count}'
    )
  return values
