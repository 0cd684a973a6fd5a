"""Objects by import path, `package.module:name`.

Recipes name functions and classes by text, so that the config is plain data.
What a notebook or a closure defines has no such path: `path` keeps it in
`KEPT`, until the process ends.
"""

import importlib
import os
import re
import sys
import types
from collections.abc import Callable
from typing import Any

from posttrain.util import errors

# Functions of this process that cannot be imported, by name.
KEPT = types.SimpleNamespace()
# The import paths of functions that a program has handed over.
HANDED_OVER: set[str] = set()


def add_current_folder() -> None:
  """Lets modules of the current folder be imported, as `python -m` does."""
  folder = os.getcwd()
  if not sys.flags.safe_path and not {folder, ''} & set(sys.path):
    sys.path.insert(0, folder)


def load(path: str, key: str) -> Any:
  """Imports a module and returns an object in it.

  Args:
    path: 'package.module:name', where name may be dotted.
    key: dotted config key of the path, for errors.

  Raises:
    ValueError: the module or the name does not exist, or the module fails to
      import.
  """
  module, _, name = path.partition(':')
  if not (module and name) or '/' in module or module.startswith('.'):
    raise ValueError(
      f"{key} must be an import path 'package.module:name', such as "
      f"'rewards:short' of a function in rewards.py: got {path!r}"
    )
  try:
    value: Any = importlib.import_module(module)
    for part in name.split('.'):
      value = getattr(value, part)
  except (Exception, SystemExit) as error:  # of the module's own code, too
    hint = ''
    if isinstance(error, ModuleNotFoundError):
      hint = (
        '; a module has no .py in its name, and must be in the current folder, '
        'in PYTHONPATH, or installed'
      )
      if '.py:' in path:
        hint += f'; did you mean {path.replace(".py:", ":")}?'
    elif isinstance(error, AttributeError):
      hint = errors.nearest(str(error.name), dir(error.obj))
    raise ValueError(
      f'{key} must be importable: got {path!r}; {errors.describe(error)}{hint}'
    ) from error
  return value


def function(path: str, key: str) -> Any:
  """Imports a callable; as `load`, with a ValueError for anything else."""
  value = load(path, key)
  if not callable(value):
    raise ValueError(
      f'{key} must name a function: got {path!r}, of type '
      f'{type(value).__name__}'
    )
  return value


def path(
  value: Callable[..., Any], kept: dict[str, Any] | None = None, key: str = ''
) -> str:
  """Returns an import path of a function or class, for a config.

  What can be imported keeps its own path. Anything else gets one that is valid
  in this process only, by its name: a later object of the same name replaces
  it, as in a notebook whose cell is run again.

  Args:
    value: the function or class.
    kept: name -> object, of one config; the object is added. Of two objects of
      one name the second one gets NAME_2. None = there is no other.
    key: names a lambda, a partial or an instance, which has no name.

  Raises:
    ValueError: the object cannot be called, or has no name.
  """
  name = getattr(value, '__qualname__', '')
  own = name.split('.')[-1]
  own = own if own.isidentifier() else re.sub(r'\W', '_', key)
  if not callable(value) or not own.isidentifier():
    raise ValueError(
      f'a function must be callable and have a name: got {value!r}; define it '
      'with def'
    )
  module = getattr(value, '__module__', None)
  place = f'{module}:{name}'
  try:
    is_importable = module and module != '__main__' and '<' not in name
    named = load(place, 'a function') if is_importable else None
  except ValueError:
    named = None  # of a file that was run and cannot be imported
  if named is not value:
    kept = {} if kept is None else kept
    name, number = own, 1
    while kept.get(name, value) is not value:
      number += 1
      name = f'{own}_{number}'
    kept[name] = value
    setattr(KEPT, name, value)
    place = f'{__name__}:KEPT.{name}'
  HANDED_OVER.add(place)
  return place
