"""Conversion of a reward function's results and metrics to plain numbers.

The conversion runs a user's code (the `__float__` or `__iter__` of a returned
object), so it runs where the function runs: in its thread or its process.
Numpy and the standard library only, no jax, for the worker process.
"""

import dataclasses
import logging
import math
import numbers
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

from posttrain.util import foreign

LARGEST = 1e18  # the largest |reward|: advantages are float32, and squared
_QUOTED = 80  # characters of a value in an error
_NAME = 100  # characters of a metric's name
_LARGEST_METRIC = 1e300  # the largest |metric|: means add them up
_MOST_METRICS = 1000  # names that a call may log
_MOST_WARNINGS = 100  # subjects that are warned of
_warned: set[str] = set()  # subjects already warned of


class Fault(Exception):
  """A failed call; the message is the requirement and the result."""

  stack = ''  # the function's last frames, for the log
  process_is_sound = False  # of an isolated function


@dataclasses.dataclass(frozen=True)
class Bad:
  """A value that is no reward."""

  requirement: str
  value: str  # quoted


Value = float | None | Bad


def listed(rewards: Any, count: int, weight: float) -> list[Value]:
  """Returns what a function returned, as a list of `count` values.

  Args:
    rewards: the function's result.
    count: the number of rollouts.
    weight: the factor in the sum; a reward times it must not be too large.

  Raises:
    Fault: it is no sequence of this length.
  """
  unordered = isinstance(rewards, str | bytes | Mapping | Set)
  size = None
  try:
    size = None if unordered else len(rewards)
    values = [plain(x) for x in rewards] if size == count else None
  except Exception:  # such as an array without axes
    values = None
  if values is None or len(values) != count:
    got = foreign.quote(rewards, _QUOTED) if size in (None, count) else size
    raise Fault(
      f'must return a reward per rollout: got {got}, expected {count}'
    )
  return [_value(x, weight) for x in values]


def plain(value: Any) -> Any:
  """Converts a scalar of numpy, jax or torch to Python's."""
  return value.item() if getattr(value, 'ndim', None) == 0 else value


def loggers(logged: dict[str, list[float]]) -> dict[str, Callable]:
  """Returns the loggers of one call, which append to `logged`."""

  def log_extra(column, values):
    name = foreign.text(column, _NAME)
    if name not in logged and len(logged) == _MOST_METRICS:
      _warn(
        '',
        'a reward function must log at most %d metrics in a call: the others, '
        'such as %s, are dropped',
        _MOST_METRICS,
        name,
      )
      return
    values = [plain(x) for x in values]
    values = [x for x in values if isinstance(x, numbers.Real)]
    logged.setdefault(name, []).extend(_finite(name, values))

  def log_metric(name, value):
    log_extra(name, [value])

  return {'log_metric': log_metric, 'log_extra': log_extra}


def _finite(name: str, values: Sequence[Any]) -> list[float]:
  """Returns logged numbers; none of them, with a warning, if one is bad."""
  result = []
  for value in values:
    try:
      number = float(value)
    except Exception:  # a large integer, or a class of the user
      number = math.nan
    if not abs(number) <= _LARGEST_METRIC:
      _warn(
        name,
        'metric %s of a reward function must be finite: got %s; all its '
        'values of such a call are dropped',
        name,
        foreign.quote(value, _QUOTED),
      )
      return []
    result.append(number)
  return result


def _warn(subject: str, message: str, *values: Any) -> None:
  """Logs a warning once per subject, and of few subjects."""
  if subject not in _warned and len(_warned) < _MOST_WARNINGS:
    _warned.add(subject)
    logging.getLogger('absl').warning(message, *values)


def raised(error: BaseException) -> Fault:
  """Returns the fault of a function that raised."""
  place = foreign.place(error)
  fault = Fault(
    f'must return rewards: it raised {foreign.error(error)}'
    f'{f" ({place})" if place else ""}; None marks a rollout as not scorable'
  )
  fault.stack = foreign.stack(error)
  return fault


def _value(value: Any, weight: float) -> Value:
  """Returns None or a number that is not too large as it is."""
  if value is None:
    return None
  is_finite = isinstance(value, int)
  try:
    # A plain float: the class of a user may define another `__abs__`.
    number = float(value) if isinstance(value, numbers.Real) else math.nan
    if abs(number) * max(1.0, abs(weight)) <= LARGEST:
      return number
    is_finite = math.isfinite(number)
  except Exception:  # an integer that is no float, or a class of the user
    pass
  requirement = 'finite rewards'
  if is_finite:
    requirement = (
      f'rewards of a size of at most {LARGEST:g}, with the weight of '
      f'{weight:g} as well'
    )
  return Bad(requirement, foreign.quote(value, _QUOTED))
