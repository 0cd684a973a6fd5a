"""Objects by import path, `package.module:name`.

Recipes name functions and classes by text, so that the config is plain data.
"""

import ast
import importlib
import importlib.util
import os
import pathlib
import sys
from typing import Any

from posttrain.util import foreign, spelling


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
  is_file = '/' in module or module.startswith('.')
  if not (module and name) or is_file:
    raise ValueError(
      f"{key} must be an import path 'package.module:name': got "
      f'{foreign.quote(path)}{meant(path)}'
    )
  try:
    value: Any = importlib.import_module(module)
  except ImportError as error:
    if hint := meant(path):
      raise ValueError(
        f"{key} must be an import path 'package.module:name': got "
        f'{foreign.quote(path)}{hint}'
      ) from error
    raise ValueError(
      f'{key} must be importable: got {foreign.quote(path)}; '
      f'{foreign.text(error)}; {_remedy(error, module)}'
    ) from error
  except MemoryError:
    raise
  except (Exception, SystemExit) as error:  # of the module's own code
    raise ValueError(
      f'{key} must be importable: got {foreign.quote(path)}; '
      f'{foreign.error(error)}'
    ) from error
  for part in name.split('.'):
    if not hasattr(value, part):
      raise ValueError(
        f'{key} must name an object of its module: got {foreign.quote(path)}, '
        f'but {foreign.text(module)} has no {foreign.quote(name)}; '
        f'{_others(module, value, part)}'
      )
    value = getattr(value, part)
  return value


def meant(path: str) -> str:
  """Returns '; write rewards:short, ...' for a path of another form, else ''.

  Args:
    path: such as `rewards.py:short`, `folder/rewards.py`, `rewards.short`,
      `rewards:` or `:short`.
  """
  place, colon, name = path.partition(':')
  if place.endswith('.py'):
    return _of_file(place, name)
  if colon and place and not name:
    hint = f"write {place}:NAME, with a function's name after the colon"
  elif colon and name and not place:
    hint = f"write MODULE:{name}, with the module's name before the colon"
  elif not colon and _is_module(place.rpartition('.')[0]):
    hint = f'write {":".join(place.rsplit(".", 1))}, with a colon'
  else:
    return ''
  return f'; {foreign.text(hint)}'


def _of_file(place: str, name: str) -> str:
  """Returns how a function of a file is written as an import path."""
  folder, _, module = os.path.normpath(place)[:-3].rpartition('/')
  where = ''
  if folder.startswith(('/', '~', '.')):  # no package of the current folder
    where = f', and put {folder} into PYTHONPATH'
  elif folder:
    module = f'{folder.replace("/", ".")}.{module}'
  name = name or 'NAME'
  hint = f"write {module}:{name}, the module's name without .py{where}"
  return f'; {foreign.text(hint)}'


def _is_module(name: str) -> bool:
  """Returns whether a module may be meant: its package can be imported."""
  parts = name.split('.')
  if not all(part.isidentifier() for part in parts):
    return False
  try:
    spec = importlib.util.find_spec(parts[0])  # imports nothing
  except ValueError:  # of a module without one
    return False
  return spec is not None and spec.origin is not None


def _remedy(error: ImportError, module: str) -> str:
  """Returns what to do about a module that is missing, or cannot import."""
  missing = getattr(error, 'name', None) or ''
  if isinstance(error, ModuleNotFoundError) and f'{module}.'.startswith(
    f'{missing}.'
  ):
    file = missing.replace('.', '/') + '.py'
    return (
      f'it must be installed, or be {foreign.text(file)} in the current folder '
      'or in one of PYTHONPATH'
    )
  return f'the import fails within {foreign.text(module)}'


def _others(module: str, value: Any, name: str) -> str:
  """Returns the near names of an object, else the functions it defines."""
  inside = getattr(value, '__dict__', {})
  names = [x for x, y in inside.items() if callable(y) and x[0] != '_']
  if near := spelling.near(name, names):
    return f'did you mean {foreign.text(near[0])}?'
  own = [x for x in names if getattr(inside[x], '__module__', '') == module]
  return f'it defines {foreign.text(", ".join(own)) or "no function"}'


def function(path: str, key: str) -> Any:
  """Imports a callable; as `load`, with a ValueError for anything else."""
  value = load(path, key)
  if not callable(value):
    raise ValueError(
      f'{key} must name a function: got {foreign.quote(path)}, of type '
      f'{foreign.kind(value)}'
    )
  return value


def definition(
  folder: pathlib.Path, path: str
) -> ast.FunctionDef | ast.ClassDef | None:
  """Returns the function or class of a path in a package's own source.

  None if the source does not define it.

  Imports nothing, because importing a module runs it. Finds the file that would
  be imported, and searches its syntax tree. Names that a module has imported or
  assigned are not its definitions, and names with a dot are none.

  Args:
    folder: the package's folder.
    path: 'package.module:name'.
  """
  module, _, name = path.partition(':')
  package, *rest = module.split('.')
  if package != folder.name or not all(x.isidentifier() for x in (*rest, name)):
    return None
  spec = importlib.util.find_spec(package)  # of a package: imports nothing
  places = [] if spec is None else spec.submodule_search_locations or []
  if [pathlib.Path(x).resolve() for x in places] != [folder.resolve()]:
    return None  # another package of this name is found first
  place = folder.joinpath(*rest)
  file = place / '__init__.py' if place.is_dir() else place.with_suffix('.py')
  if not file.is_file() or not file.resolve().is_relative_to(folder.resolve()):
    return None
  for node in reversed(ast.parse(file.read_bytes()).body):
    if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
      return node
  return None
