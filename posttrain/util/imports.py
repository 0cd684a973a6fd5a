"""Objects by import path, `package.module:name`.

Recipes name functions and classes by text, so that the config is plain data.
"""

import importlib
from typing import Any


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
  if not (module and name):
    raise ValueError(
      f"{key} must be an import path 'package.module:name': got {path!r}"
    )
  try:
    value: Any = importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
      f'{key} must be importable: got {path!r}; {error}; its folder must be '
      'on the PYTHONPATH'
    ) from error
  for part in name.split('.'):
    if not hasattr(value, part):
      raise ValueError(
        f'{key} must name an object of its module: got {path!r}, but {module} '
        f'has no {name!r}'
      )
    value = getattr(value, part)
  return value


def function(path: str, key: str) -> Any:
  """Imports a callable; as `load`, with a ValueError for anything else."""
  value = load(path, key)
  if not callable(value):
    raise ValueError(
      f'{key} must name a function: got {path!r}, a {type(value).__name__}'
    )
  return value
