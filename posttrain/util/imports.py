"""Objects by import path: `package.module:name`.

A recipe names what it brings along in text, so that the config stays data.
"""

import importlib
from typing import Any


def load(path: str, key: str) -> Any:
  """Imports what a path names.

  Args:
    path: 'package.module:name', of anything on the Python path.
    key: dotted config key that says so, for errors.

  Raises:
    ValueError: no such module or name, or the module itself fails to import.
  """
  module, _, name = path.partition(':')
  if not (module and name):
    raise ValueError(
      f"{key} must be an import path 'package.module:name': got {path!r}"
    )
  try:
    found: Any = importlib.import_module(module)
  except ImportError as error:
    raise ValueError(
      f'{key} must be importable: got {path!r}; {error}; its folder must be '
      'on the PYTHONPATH'
    ) from error
  for part in name.split('.'):
    if not hasattr(found, part):
      raise ValueError(
        f'{key} must name what is there: got {path!r}, but {module} has no '
        f'{name!r}'
      )
    found = getattr(found, part)
  return found


def function(path: str, key: str) -> Any:
  """Imports what a path names, which must be callable; else ValueError."""
  found = load(path, key)
  if not callable(found):
    raise ValueError(
      f'{key} must name a function: got {path!r}, a {type(found).__name__}'
    )
  return found
