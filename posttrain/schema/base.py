"""Checks of option values: one error class, and helpers that raise it."""

import dataclasses
import functools
import re
import sys
import types
import typing
from typing import Annotated, Any

from posttrain.util import errors

# Texts that reach beyond the run's own data: `config.trust` takes them from a
# config that the user did not write only if the user says so.
Function = Annotated[str, 'function']  # an import path
FunctionOrNone = Annotated[str | None, 'function']
Server = Annotated[str, 'server']  # an address that is called
Variable = Annotated[str, 'variable']  # of the environment; its value is sent
Compiled = Annotated[str | None, 'compiled']  # a folder of programs
# Paths, which `config.paths` makes absolute, so that config.json means the same
# files from any folder.
File = Annotated[str, 'file']  # or a folder
FileOrNone = Annotated[str | None, 'file']
# A folder of weights or of a tokenizer, or a model of the hub's cache.
Folder = Annotated[str, 'folder']
FolderOrNone = Annotated[str | None, 'folder']

LONGEST = 365 * 86_400.0  # seconds of a time limit; clocks overflow far above


class FieldError(ValueError):
  """A field with an invalid value; `config.build` prepends the dotted path."""

  def __init__(self, field: str, must: str, got: Any, hint: str = ''):
    """Formats the message '<field> must <must>: got <got>; <hint>'."""
    self.field = field
    self.detail = f'must {must}: got {errors.quote(got)}'
    self.detail += f'; {hint}' if hint else ''
    super().__init__(f'{field} {self.detail}')


def require(ok: bool, field: str, must: str, got: Any, hint: str = '') -> None:
  """Raises `FieldError` unless `ok`."""
  if not ok:
    raise FieldError(field, must, got, hint)


def require_positive(node: Any, *fields: str) -> None:
  """Checks that the fields are finite and > 0."""
  for field in fields:
    value = getattr(node, field)
    require(value > 0, field, 'be > 0', value)
    require(value <= sys.float_info.max, field, 'be finite', value)


def require_non_negative(node: Any, *fields: str) -> None:
  """Checks that the fields are finite and >= 0."""
  for field in fields:
    value = getattr(node, field)
    require(value >= 0, field, 'be >= 0', value)
    require(value <= sys.float_info.max, field, 'be finite', value)


def require_seconds(node: Any, *fields: str) -> None:
  """Checks that the fields are time limits > 0 that clocks can hold."""
  require_positive(node, *fields)
  require_within(node, 0, LONGEST, *fields)


def require_within(node: Any, low: float, high: float, *fields: str) -> None:
  """Checks that the fields are in [low, high]; None is no number to check."""
  ends = (f'{x:,}' if isinstance(x, int) else f'{x:g}' for x in (low, high))
  within = f'in [{", ".join(ends)}]'
  for field in fields:
    value = getattr(node, field)
    optional = types.NoneType in _annotations(type(node))[field]
    must = f'be None or {within}' if optional else f'be {within}'
    require(value is None or low <= value <= high, field, must, value)


def require_fraction(node: Any, field: str) -> None:
  """Checks that the field is in [0, 1)."""
  value = getattr(node, field)
  require(0 <= value < 1, field, 'be in [0, 1)', value)


def require_types(node: Any) -> None:
  """Checks that the fields have their annotated types; int serves as float.

  `config.build` checks what users write; this is for nodes from other places,
  such as files of checkpoints.
  """
  for field, kinds in _annotations(type(node)).items():
    value = getattr(node, field)
    names = ' or '.join(kind.__name__ for kind in kinds)
    ok = type(value) in kinds or (float in kinds and type(value) is int)
    require(ok, field, f'be of type {names}', value)
    items: Any = value if tuple in kinds and value is not None else ()
    ok = all(type(item) is int for item in items)
    require(ok, field, 'hold integers', value)


@functools.cache
def _annotations(node: type) -> dict[str, tuple[type, ...]]:
  """Returns the types of each field; tuples hold integers."""
  hints = typing.get_type_hints(node)
  kinds = {}
  for field in dataclasses.fields(node):
    hint = hints[field.name]
    union = isinstance(hint, types.UnionType)
    options = typing.get_args(hint) if union else (hint,)
    kinds[field.name] = tuple(typing.get_origin(x) or x for x in options)
  return kinds


def require_choice(node: Any, field: str, choices: tuple) -> None:
  """Checks that the field is one of the choices."""
  value = getattr(node, field)
  require(value in choices, field, f'be one of {choices}', value)


def require_regex(node: Any, field: str) -> None:
  """Checks that the field is a regular expression."""
  value = getattr(node, field)
  try:
    re.compile(value)
  except re.error as error:
    raise FieldError(field, 'be a regex', value, str(error)) from None


def require_import_path(node: Any, field: str) -> None:
  """Checks that the field has the form 'package.module:function'."""
  value = getattr(node, field)
  module, _, name = value.partition(':')
  require(
    bool(module and name),
    field,
    "be an import path 'package.module:function'",
    value,
  )
