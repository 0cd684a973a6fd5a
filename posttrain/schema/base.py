"""How a schema says no: one error class, and helpers that raise it."""

import math
import re


class FieldError(ValueError):
  """A field breaks its rule; `config.build` adds the dotted path in front."""

  def __init__(self, field: str, must: str, got, hint: str = ''):
    self.field = field
    self.detail = f'must {must}: got {got!r}' + (f'; {hint}' if hint else '')
    super().__init__(f'{field} {self.detail}')


def require(ok: bool, field: str, must: str, got, hint: str = '') -> None:
  """Raises `FieldError` unless `ok`."""
  if not ok:
    raise FieldError(field, must, got, hint)


def require_positive(node, *fields: str) -> None:
  for field in fields:
    value = getattr(node, field)
    require(value > 0, field, 'be > 0', value)
    require(math.isfinite(value), field, 'be finite', value)


def require_non_negative(node, *fields: str) -> None:
  for field in fields:
    value = getattr(node, field)
    require(value >= 0, field, 'be >= 0', value)
    require(math.isfinite(value), field, 'be finite', value)


def require_choice(node, field: str, choices: tuple) -> None:
  value = getattr(node, field)
  require(value in choices, field, f'be one of {choices}', value)


def require_regex(node, field: str) -> None:
  value = getattr(node, field)
  try:
    re.compile(value)
  except re.error as error:
    raise FieldError(field, 'be a regex', value, str(error)) from None


def require_import_path(node, field: str) -> None:
  value = getattr(node, field)
  module, _, name = value.partition(':')
  require(
    bool(module and name),
    field,
    "be an import path 'package.module:function'",
    value,
  )
