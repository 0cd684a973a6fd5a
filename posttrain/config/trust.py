"""Trust in configs: names in them that reach beyond the run's own data.

A config can name any function, servers that get the samples, environment
variables whose values are sent to them, addresses in place of local paths, and
a folder of compiled programs. A recipe (FILE.py) is code, and the user wrote
the overrides: they may name all. A `.json` config and the options in a
checkpoint may come from elsewhere. A name in them is accepted

  1. if it is a function of `OWN` or of configs (`is_own`), which is looked up
     in their source files before anything is imported;
  2. if the user gives the same text in an override;
  3. if this user has trained exactly this config before: `remember` writes
     its digest to the user's own folder, which no archive can;
  4. with --trust_config.

Names that are not accepted are listed in one error.
"""

import ast
import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import pathlib
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain import schema
from posttrain.util import foreign, imports, json_files

# Modules and packages whose public functions are made to be named by a config:
# they grade texts, and neither they nor what they call reach files, processes,
# servers or modules by name.
OWN = ('posttrain.envs.sql.functions', 'posttrain.rewards')
RECIPES = 'configs'
# Parameters of functions that a config can name: of rewards (`completions`),
# algorithms and losses (`inputs`), demonstrations (`task`).
_PARAMETERS = {'completions', 'inputs', 'task'}
# Annotations of fields whose values need trust, see `schema.base`.
_TRUSTED = ('function', 'server', 'variable', 'compiled')
_ADDRESS = re.compile(r'[A-Za-z][\w+.-]*://\S*')
_ROOT = pathlib.Path(__file__).resolve().parents[2]
_SHOWN = 8  # names in a message


def named(run: schema.Run) -> dict[str, str]:
  """Returns dotted key -> text of all that needs trust."""
  names = dict(_walk(run, 'config'))
  return {k.replace('config.stages.', 'config.'): x for k, x in names.items()}


def is_own(path: str) -> bool:
  """Returns whether a path is of a function that is made for configs.

  Accepts the public functions that a module of `OWN` defines. Of a module of
  configs it accepts functions with a parameter of such a function, and public
  classes, which are environments; `get_config` of a recipe is not accepted.
  """
  module, _, name = path.partition(':')
  if name.startswith('_'):
    return False
  if module.split('.')[0] == RECIPES:
    node = imports.definition(_ROOT / RECIPES, path)
    if isinstance(node, ast.FunctionDef):
      args = node.args
      parameters = (*args.posonlyargs, *args.args, *args.kwonlyargs)
      return any(x.arg in _PARAMETERS for x in parameters)
    return node is not None
  is_listed = f'{module}.'.startswith(tuple(f'{x}.' for x in OWN))
  node = imports.definition(_ROOT / 'posttrain', path) if is_listed else None
  return isinstance(node, ast.FunctionDef)


def check(
  run: schema.Run,
  values: dict[str, Any],
  where: str,
  overrides: Sequence[tuple[str, str]] = (),
  trust: bool = False,
) -> None:
  """Refuses names in a foreign config that the user does not trust.

  Args:
    run: the options, overrides included; no function of them is imported yet.
    values: the config as it was read, without the overrides.
    where: its file or checkpoint.
    overrides: (dotted key, text) of the user.
    trust: whether the user trusts all of it; it is printed to stderr.

  Raises:
    ValueError: lists the keys and texts that need trust.
  """
  own = {text for _, value in overrides for text in _texts(value)}
  names = {key: text for key, text in named(run).items() if text not in own}
  if not names or is_remembered(values):
    return
  items = [
    f'{foreign.text(key)} {foreign.quote(text)}' for key, text in names.items()
  ]
  lines = ', '.join(items[:_SHOWN])
  lines += f' and {len(items) - _SHOWN} more' if len(items) > _SHOWN else ''
  if not trust:
    raise ValueError(
      f'--trust_config must be given to use what {where} names: got {lines}; '
      'look at them first: a config can name any function and any server. '
      f'(Configs that you trained yourself are recorded in {_folder()}; runs '
      'of older versions are not: resume them with their recipe FILE.py.)'
    )
  print(f'trusted, as named by {where}: {lines}', file=sys.stderr)


def remember(run: schema.Run, values: dict[str, Any]) -> None:
  """Records that this user trains a config, if names in it need trust.

  Warns if it cannot: then --trust_config is needed later.

  Args:
    run: the options.
    values: their `config.to_dict`.
  """
  if not named(run):
    return
  file = _folder() / _digest(values)
  try:
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file.touch()
  except OSError as error:
    logging.getLogger('absl').warning(
      'it could not be recorded that you train this config, so that its '
      'config.json and checkpoints will need --trust_config: %s; let '
      'XDG_STATE_HOME name a folder that can be written',
      foreign.error(error),
    )


def is_remembered(values: dict[str, Any]) -> bool:
  """Returns whether this user has trained exactly this config."""
  try:
    return (_folder() / _digest(values)).is_file()
  except OSError:
    return False


def _folder() -> pathlib.Path:
  home = os.path.expanduser('~/.local/state')
  return pathlib.Path(
    os.environ.get('XDG_STATE_HOME') or home, 'posttrain/runs'
  )


def _digest(values: dict[str, Any]) -> str:
  return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _walk(node: Any, path: str) -> Iterator[tuple[str, str]]:
  """Yields (dotted key, text) of the values that need trust."""
  if isinstance(node, str) and _ADDRESS.fullmatch(node):
    yield path, node
  if isinstance(node, dict | list | tuple):
    items = node.items() if isinstance(node, dict) else enumerate(node)
    for key, value in items:
      yield from _walk(value, f'{path}.{key}')
  if not dataclasses.is_dataclass(node):
    return
  hints = typing.get_type_hints(type(node), include_extras=True)
  for field in dataclasses.fields(node):
    value, key = getattr(node, field.name), f'{path}.{field.name}'
    kind = _kind(hints[field.name])
    items = value if isinstance(value, tuple) else (value,)
    if kind not in _TRUSTED:
      yield from _walk(value, key)
    elif value and value != field.default:
      for index, item in enumerate(items):
        if not _is_plain(kind, item):
          yield f'{key}.{index}' if items is value else key, item


def _kind(hint: Any) -> str | None:
  """Returns what the texts of a field reach; None: nothing."""
  inner = typing.get_args(hint) if typing.get_origin(hint) is tuple else ()
  (kind,) = getattr((*inner, hint)[0], '__metadata__', (None,))
  return kind


def _is_plain(kind: str, value: str) -> bool:
  return kind == 'function' and (':' not in value or is_own(value))


def _texts(value: str) -> Iterator[str]:
  """Yields an override's value, and the strings in it if it is JSON."""
  yield value
  with contextlib.suppress(ValueError):
    todo = [json_files.parse(value, 'an override')]
    while todo:
      node = todo.pop()
      if isinstance(node, str):
        yield node
      elif isinstance(node, dict | list):
        todo += node.values() if isinstance(node, dict) else node
