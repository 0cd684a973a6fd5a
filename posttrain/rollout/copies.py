"""Copies of what environments and reward functions get and return.

Both are a user's code, which may edit its arguments, or keep and edit later
what it has returned. Neither may reach a task, a transcript or the arguments of
another function, so a copy crosses the border in both directions.
"""

import copy
import dataclasses
import types as std
from typing import Any, TypeVar

import numpy as np

Value = TypeVar('Value')

_ATOMS = frozenset((type(None), bool, int, float, complex, str, bytes))


def of(value: Value) -> Value:
  """Returns a deep copy, in time linear in the size of the value.

  Where a part cannot be copied, the time is that times its depth.

  Equal objects within the value stay one object. An object that cannot be
  copied, such as a lock or a connection, stays as it is. Containers and
  dataclasses that hold one are copied around it; other objects that hold one
  stay as they are, because a copy might close it when it is deleted.

  Raises:
    RecursionError: the value is nested too deeply.
  """
  return value if type(value) in _ATOMS else _copy(value, {})


def _copy(value: Any, memo: dict[int, Any]) -> Any:
  kind = type(value)
  if kind in _ATOMS:
    return value
  if id(value) in memo:  # as in `copy.deepcopy`, which gets the same memo
    return memo[id(value)]
  if kind is dict:
    memo[id(value)] = new = {}
    for key, item in value.items():
      if type(key) not in _ATOMS:
        key = _copy(key, memo)
      new[key] = item if type(item) in _ATOMS else _copy(item, memo)
  elif kind is list:
    memo[id(value)] = new = []
    new.extend([x if type(x) in _ATOMS else _copy(x, memo) for x in value])
  elif kind is tuple:
    items = tuple([_copy(item, memo) for item in value])
    new = memo.setdefault(id(value), items)  # it may hold itself, in a list
  elif kind is np.ndarray and value.dtype != object:
    memo[id(value)] = new = value.copy('K')
  elif kind is std.MappingProxyType:
    new = std.MappingProxyType(_copy(dict(value), memo))
  elif kind.__module__ == 'posttrain.types':  # dataclasses, some frozen
    memo[id(value)] = new = object.__new__(kind)
    fields = vars(new)
    for key, item in vars(value).items():
      fields[key] = item if type(item) in _ATOMS else _copy(item, memo)
  else:
    new = _other(value, memo)
  return new


def _other(value: Any, memo: dict[int, Any]) -> Any:
  known = len(memo)
  try:
    return copy.deepcopy(value, memo)
  except (RecursionError, MemoryError):
    raise
  except Exception:  # a part of it has no copy
    while len(memo) > known:  # half-made copies
      memo.popitem()
  is_node = dataclasses.is_dataclass(value) and not hasattr(value, '__del__')
  if not (is_node or isinstance(value, dict | list | tuple | set)):
    return value
  try:
    return _around(value, memo)
  except (RecursionError, MemoryError):
    raise
  except Exception:  # such as a class whose `__setitem__` refuses
    memo[id(value)] = value
    return value


def _around(value: Any, memo: dict[int, Any]) -> Any:
  """Copies a container or dataclass, and its parts that have copies."""
  if isinstance(value, tuple):  # of a subclass, such as a namedtuple
    return tuple.__new__(type(value), [_copy(item, memo) for item in value])
  memo[id(value)] = new = copy.copy(value)
  if isinstance(value, dict):
    for key, item in value.items():
      new[key] = _copy(item, memo)
  elif isinstance(value, list):
    new[:] = [_copy(item, memo) for item in value]
  fields = getattr(value, '__dict__', {})
  if dataclasses.is_dataclass(value):
    names = {field.name for field in dataclasses.fields(value)}
    fields = {k: getattr(value, k) for k in names if hasattr(value, k)} | fields
  for name, item in fields.items():
    object.__setattr__(new, name, _copy(item, memo))
  return new
