"""Functions and classes of this process, under import paths.

A config names functions by import path. What a notebook or a closure defines
has none; `path` keeps it here, as an attribute of this module, until the
process ends.
"""

import sys
from collections.abc import Callable
from typing import Any

from posttrain.util import foreign, imports


def path(value: Callable[..., Any], kept: dict[str, Any] | None = None) -> str:
  """Returns an import path of a function or class, for a config.

  What can be imported keeps its own path. Anything else gets one that is valid
  in this process only, by its name: a later object of the same name replaces
  it, as in a notebook whose cell is run again.

  Args:
    value: the function or class.
    kept: name -> object, of one config; the object is added. Of two objects of
      one name the second one gets NAME_2. None = there is no other.

  Raises:
    ValueError: the object cannot be called, or has no name.
  """
  return _importable(value) or _keep(value, {} if kept is None else kept)


def _importable(value: Callable[..., Any]) -> str | None:
  """Returns the import path that an object has without this module."""
  name = getattr(value, '__qualname__', '')
  module = getattr(value, '__module__', None)
  if not callable(value) or not name.split('.')[-1].isidentifier():
    raise ValueError(
      'a function must be callable and have a name: got '
      f'{foreign.quote(value)}; define it with def'
    )
  if module and module != '__main__' and '<' not in name:
    try:
      if imports.load(f'{module}:{name}', 'a function') is value:
        return f'{module}:{name}'
    except ValueError:
      pass  # of a file that was run and cannot be imported
  return None


def _keep(value: Any, kept: dict[str, Any]) -> str:
  """Makes an object an attribute of this module; returns its import path.

  Args:
    value: the object.
    kept: attribute -> object, see `path`; the object is added.
  """
  own = value.__qualname__.split('.')[-1]
  if own in _OWN:
    raise ValueError(f'a function must not be named {own!r}; rename it')
  name, number = own, 1
  while kept.get(name, value) is not value or name in _OWN:
    number += 1
    name = f'{own}_{number}'
  kept[name] = value
  setattr(sys.modules[__name__], name, value)
  return f'{__name__}:{name}'


_OWN = frozenset(vars(sys.modules[__name__])) | {'_OWN'}
