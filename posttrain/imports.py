"""Import paths in configs: 'package.module:attr' -> the object."""

import difflib
import importlib
import importlib.util
import pkgutil
from typing import Any


def load(path: str) -> Any:
  """Imports the object that `path` names.

  Args:
    path: 'package.module:attr' or 'package.module.attr'; behind a colon the
      attribute may be dotted ('module:Class.method').

  Returns:
    The object.

  Raises:
    ValueError: the path is malformed, or names nothing; the nearest name is
      suggested. An exception raised by the module itself, while it is being
      imported, passes through.
  """
  module_name, colon, attr = path.partition(':')
  if not colon:
    module_name, _, attr = path.rpartition('.')
  parts = module_name.split('.') + attr.split('.')
  if not module_name or not all(part.isidentifier() for part in parts):
    raise ValueError(
        "an import path must read 'package.module:attr' or "
        f"'package.module.attr': got {path!r}"
    )
  found = _module(module_name, path)
  for name in attr.split('.'):
    if not hasattr(found, name):
      found = _submodule(found, name, path)
    else:
      found = getattr(found, name)
  return found


def _module(name: str, path: str) -> Any:
  """Imports a module; tells a missing one from one that fails."""
  parent = ''
  for part in name.split('.'):
    here = f'{parent}.{part}' if parent else part
    try:
      spec = importlib.util.find_spec(here)
    except ModuleNotFoundError:  # the parent is no package
      spec = None
    if spec is None:
      raise ValueError(
          _message(path, f'module {here!r}', part, _siblings(parent))
      )
    module = importlib.import_module(here)
    parent = here
  return module


def _submodule(found: Any, name: str, path: str) -> Any:
  owner = getattr(found, '__name__', repr(found))
  if hasattr(found, '__path__') and importlib.util.find_spec(
      f'{owner}.{name}'
  ):
    return importlib.import_module(f'{owner}.{name}')
  names = [n for n in dir(found) if not n.startswith('__')]
  raise ValueError(_message(path, f'{name!r} in {owner!r}', name, names))


def _siblings(parent: str) -> list[str]:
  """Names of the modules beside a missing one."""
  where = None  # sys.path
  if parent:
    where = getattr(importlib.import_module(parent), '__path__', ())
  return [module.name for module in pkgutil.iter_modules(where)]


def _message(path: str, missing: str, name: str, names) -> str:
  near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
  hint = f'; did you mean {near[0]!r}?' if near else ''
  return (
      f'an import path must name something that exists: got {path!r}, and '
      f'there is no {missing}{hint}'
  )
