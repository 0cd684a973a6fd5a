"""Checks of option values: one error class, and helpers that raise it."""

import math
import re
from typing import Any


class FieldError(ValueError):
  """A field with an invalid value; `config.build` prepends the dotted path."""

  def __init__(self, field: str, must: str, got: Any, hint: str = ''):
    """Formats the message '<field> must <must>: got <got>; <hint>'."""
    self.field = field
    self.detail = f'must {must}: got {got!r}' + (f'; {hint}' if hint else '')
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
    require(math.isfinite(value), field, 'be finite', value)


def require_non_negative(node: Any, *fields: str) -> None:
  """Checks that the fields are finite and >= 0."""
  for field in fields:
    value = getattr(node, field)
    require(value >= 0, field, 'be >= 0', value)
    require(math.isfinite(value), field, 'be finite', value)


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
