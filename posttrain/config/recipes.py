"""Recipe files: Python with a function `get_config`, which is run.

A recipe is code: it may do whatever Python can, as the user who runs it.
"""

import os
import pathlib
import runpy
from types import TracebackType

from ml_collections import config_dict

from posttrain.util import errors, foreign, spelling

_FOLDER = pathlib.Path(__file__).parents[2] / 'configs'
PREFIX = 'recipe_'  # begins the module name of a recipe file


def split(spec: str) -> tuple[str, str]:
  """Splits `FILE` or `FILE:ARGUMENT` into the file and '' or the argument.

  A recipe of the installed package `configs` is found from any folder, as
  `configs/grpo.py` or as `grpo`; a file of that path comes first.

  Raises:
    ValueError: there is no such file, or it is neither Python nor JSON.
  """
  path, _, argument = spec.partition(':')
  if os.path.isfile(spec):  # a path may have colons
    path, argument = spec, ''
  path = _installed(path)
  if not os.path.isfile(path):
    raise ValueError(
      '--config must name a file, or a recipe of the package: got '
      f'{foreign.quote(path)}; {_hint(path)}'
    )
  if not path.endswith(('.py', '.json')):
    raise ValueError(
      '--config must name a recipe FILE.py, or the config.json of a workdir: '
      f'got {foreign.quote(path)}'
    )
  return path, argument


def _installed(path: str) -> str:
  """Returns the file of an installed recipe's name, else the path."""
  if os.path.isfile(path) or os.path.isabs(path) or '..' in path:
    return path
  file = _FOLDER / f'{_name(path)}.py'
  return str(file) if file.is_file() else path


def _name(path: str) -> str:
  return path.removeprefix('configs/').removesuffix('.py')


def _hint(path: str) -> str:
  """Returns the near recipe's name, else all names."""
  names = sorted(
    file.relative_to(_FOLDER).with_suffix('').as_posix()
    for file in _FOLDER.rglob('*.py')
    if 'def get_config(' in file.read_text()
  )
  first, comma, rest = path.partition(',')
  if comma and _name(first) in names:
    return (
      f'write {foreign.text(first)}:{foreign.text(rest.strip())}, with a colon '
      "after the recipe's name"
    )
  near = spelling.near(os.path.splitext(_name(path))[0], names)
  if near := near or [x for x in names if x.startswith(f'{_name(path)}_')]:
    return f'did you mean {" or ".join(near)}?'
  searched = ''
  if path.endswith(('.py', '.json')):
    searched = f'there is no {foreign.text(os.path.abspath(path))}; '
  return f'{searched}the recipes are {", ".join(names)}'


def run(path: str, argument: str) -> config_dict.ConfigDict:
  """Runs a recipe; returns its config.

  Args:
    path: a Python file.
    argument: passed to its `get_config`; '' = none is passed.

  Raises:
    ValueError: it is no Python, raises, or has no `get_config` that returns a
      ConfigDict; names the file and the line.
  """
  name = os.path.splitext(os.path.basename(path))[0]
  try:
    recipe = runpy.run_path(path, run_name=PREFIX + name)
    if 'get_config' not in recipe:
      raise ValueError(f'{path} must define get_config(argument)')
    config = recipe['get_config'](*([argument] if argument else []))
  except MemoryError:
    raise
  except (Exception, SystemExit) as error:
    # Errors of options, raised by the schema or by configs/, already name the
    # key.
    user = isinstance(error, ValueError | RuntimeError)
    if user and errors.is_expected(error, 'configs.'):
      raise
    line = _line(path, error)
    raise ValueError(
      f'{path} must be a recipe that runs: {line}{foreign.error(error)}'
    ) from error
  if not isinstance(config, config_dict.ConfigDict):
    raise ValueError(
      f'{path}: get_config must return a ConfigDict: got '
      f'{foreign.quote(config)}'
    )
  return config


def _line(path: str, error: BaseException) -> str:
  """Returns 'line N: ', the last line of a file before an error, or ''."""
  number = None
  if isinstance(error, SyntaxError) and error.filename == path:
    number = error.lineno
  trace: TracebackType | None = error.__traceback__
  while trace is not None:
    if trace.tb_frame.f_code.co_filename == path:
      number = trace.tb_lineno
    trace = trace.tb_next
  return '' if number is None else f'line {number}: '
