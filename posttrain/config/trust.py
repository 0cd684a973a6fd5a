"""Trust in configs: names in them that reach beyond the run's own data.

A config can name any function, servers that get the samples, environment
variables whose values are sent to them, addresses in place of local paths, and
a folder of compiled programs. A recipe (FILE.py) is code, and the user wrote
the overrides: they may name all. A `.json` config and the options in a
checkpoint may come from elsewhere: of them, only functions of `OWN` and those
that this process has handed over (`imports.path`) are taken without
--trust_config.
"""

import dataclasses
import re
import sys
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from posttrain import schema
from posttrain.schema import bounds
from posttrain.util import errors, imports

# Modules whose public functions are made to be named by a config.
OWN = ('posttrain.envs.sql.functions.', 'posttrain.rewards.', 'configs.')
# Annotations of fields whose values need trust, see `schema.bounds`.
_TRUSTED = ('function', 'server', 'variable', 'compiled')
_ADDRESS = re.compile(r'[A-Za-z][\w+.-]*://\S*')


def check(
  run: schema.Run,
  where: str,
  overrides: Sequence[tuple[str, str]] = (),
  trust: bool = False,
  trackers: bool = True,
) -> None:
  """Refuses names in a foreign config that the user does not trust.

  Args:
    run: the options, overrides included; no function of them is imported yet.
    where: the file or checkpoint that they are from.
    overrides: (dotted key, text) of the user, whose names are trusted.
    trust: whether the user trusts all of it; it is printed to stderr.
    trackers: whether the command starts the trackers.

  Raises:
    ValueError: lists the keys and texts that need trust.
  """
  if not trackers:
    run = dataclasses.replace(run, metrics=schema.Metrics())
  items = [
    f'{key} {errors.quote(text)}'
    for key, text in named(run).items()
    if not any(text in value for _, value in overrides)
  ]
  if not items:
    return
  lines = errors.text(', '.join(items), 1000)
  if not trust:
    raise ValueError(
      f'--trust_config must be given to use what {where} names: got {lines}; '
      'look at them first: a config can name any function and any server'
    )
  print(f'trusted, as named by {where}: {lines}', file=sys.stderr)


def named(run: schema.Run) -> dict[str, str]:
  """Returns dotted key -> text of all that needs trust."""
  names = dict(_walk(run, 'config'))
  return {k.replace('config.stages.', 'config.'): x for k, x in names.items()}


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
    hint = hints[field.name]
    is_tuple = typing.get_origin(hint) is tuple
    hint = typing.get_args(hint)[0] if is_tuple else hint
    kind = bounds.reach(hint)
    if kind not in _TRUSTED:
      yield from _walk(value, key)
    elif value and value != field.default:
      for index, text in enumerate(value if is_tuple else (value,)):
        if kind != 'function' or not _is_own(text):
          yield f'{key}.{index}' if is_tuple else key, text


def _is_own(path: str) -> bool:
  """Returns whether a function is ours, or was handed over by this process."""
  if ':' not in path or path in imports.HANDED_OVER:
    return True
  is_plain = re.fullmatch(r'\w+(\.\w+)*:[^\W_]\w*', path) is not None
  return is_plain and path.replace(':', '.').startswith(OWN)
