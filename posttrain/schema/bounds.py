"""The base class of all options, and the annotations that it checks.

    class Optim(bounds.Options):
      # Peak learning rate.
      lr: bounds.Positive = 3e-4

An annotation declares an option's type and, in `Annotated`, what else a value
must be (`Rule`), and whether the text of a path or an address needs more (a
word of `reach`). The page of options shows the rules. What relates several
options is checked in a class's own `__post_init__`, by `require`.
"""

import dataclasses
import functools
import re
import sys
import types
import typing
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from posttrain.util import errors

LONGEST = 365 * 86_400.0  # seconds of a time limit; clocks overflow far above


class FieldError(ValueError):
  """A field with an invalid value; `config.build` prepends the dotted path."""

  def __init__(self, field: str, must: str, got: Any, hint: str):
    """Formats the message '<field> must <must>: got <got>; <hint>'."""
    self.field = field
    self.detail = f'must {must}: got {errors.quote(got)}'
    self.detail += f'; {hint}' if hint else ''
    super().__init__(f'{field} {self.detail}')


def require(ok: bool, field: str, must: str, got: Any, hint: str = '') -> None:
  """Raises `FieldError` unless `ok`."""
  if not ok:
    raise FieldError(field, must, got, hint)


class Rule(NamedTuple):
  """What a value must be, besides its type; None needs none where allowed."""

  must: str  # as in 'be > 0'
  allows: Callable[[Any], bool]


@typing.dataclass_transform(
  frozen_default=True, field_specifiers=(dataclasses.field,)
)
class Options:
  """Makes a frozen dataclass of each subclass, and checks its values."""

  def __init_subclass__(cls):
    dataclasses.dataclass(frozen=True)(cls)

  def __post_init__(self) -> None:
    """Checks each field by its annotation.

    Raises:
      FieldError: a value has another type, or breaks a rule.
    """
    for name, kind, marks in _declared(type(self)):
      value = getattr(self, name)
      text = kind.__name__ if isinstance(kind, type) else kind
      must = f'be of type {text}{", as JSON" if "[" in str(text) else ""}'
      require(_fits(value, kind), name, must, value)
      optional = types.NoneType in typing.get_args(kind)
      for rule in marks if value is not None else ():
        must = f'be None or {rule.must.removeprefix("be ")}'
        must = must if optional else rule.must
        near = errors.nearest(str(value), re.findall("'(.+?)'", must))
        require(rule.allows(value), name, must, value, near[2:])


@functools.cache
def _declared(node: type) -> list[tuple[str, Any, tuple[Rule, ...]]]:
  """Returns name, type and rules of each field."""
  plain = typing.get_type_hints(node)
  hints = typing.get_type_hints(node, include_extras=True)
  return [
    (name, plain[name], rules(hints[name]))
    for name in (field.name for field in dataclasses.fields(node))
  ]


def _fits(value: Any, kind: Any) -> bool:
  """Returns whether a value has a type; int serves as float, but not bool."""
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if origin in (types.UnionType, typing.Union):
    return any(_fits(value, x) for x in args)
  if origin is tuple:
    return isinstance(value, tuple) and all(_fits(x, args[0]) for x in value)
  if origin is dict:
    is_dict = isinstance(value, dict)
    return is_dict and all(_fits(x, args[1]) for x in value.values())
  if kind is Any:
    return True
  kinds = (int, float) if kind is float else kind
  return isinstance(value, kinds) and isinstance(value, bool) == (kind is bool)


def rules(hint: Any) -> tuple[Rule, ...]:
  """Returns the rules of an annotation."""
  marks = getattr(hint, '__metadata__', ())
  return tuple(x for x in marks if isinstance(x, Rule))


def reach(hint: Any) -> str:
  """Returns what the text of an annotation names, as 'file'; '' = nothing."""
  marks = getattr(hint, '__metadata__', ())
  return next((x for x in marks if isinstance(x, str)), '')


# --- rules -------------------------------------------------------------------


def within(low: float, high: float) -> Rule:
  """Returns the rule of a closed interval."""
  ends = (f'{x:,}' if isinstance(x, int) else f'{x:g}' for x in (low, high))
  return Rule(f'be in [{", ".join(ends)}]', lambda x: low <= x <= high)


def one_of(*choices: Any) -> Rule:
  """Returns the rule of a choice."""
  return Rule(f'be one of {choices}', lambda x: x in choices)


def some_of(*choices: Any) -> Rule:
  """Returns the rule of a collection of different choices."""
  return Rule(
    f'hold some of {choices}, each once',
    lambda x: bool(x) and set(x) <= set(choices) and len(set(x)) == len(x),
  )


def readable(must: str, read: Callable[[Any], object]) -> Rule:
  """Returns the rule of a text that a function reads without an error."""

  def allows(text: Any) -> bool:
    try:
      read(text)
    except Exception:
      return False
    return True

  return Rule(must, allows)


_POSITIVE = Rule('be > 0', lambda x: x > 0)
_NON_NEGATIVE = Rule('be >= 0', lambda x: x >= 0)
_FINITE = Rule('be finite', lambda x: abs(x) <= sys.float_info.max)
_IMPORT_PATH = Rule(
  "be an import path 'package.module:function'", lambda x: all(x.partition(':'))
)
_NAMED = Rule('name a file or folder', bool)

Positive = Annotated[float, _POSITIVE, _FINITE]
NonNegative = Annotated[float, _NON_NEGATIVE, _FINITE]
Fraction = Annotated[float, Rule('be in [0, 1)', lambda x: 0 <= x < 1)]
Share = Annotated[float, within(0, 1)]
Seconds = Annotated[float, _POSITIVE, within(0, LONGEST)]
Count = Annotated[int, _POSITIVE]
CountOrNone = Annotated[int | None, _POSITIVE]
CountOrZero = Annotated[int, _NON_NEGATIVE]
Regex = Annotated[str, readable('be a regex', re.compile)]
# Texts that reach beyond the run's own data: `config.checks` takes them from a
# config that the user did not write only if the user says so.
Function = Annotated[str, 'function', _IMPORT_PATH]
FunctionOrNone = Annotated[str | None, 'function', _IMPORT_PATH]
FunctionOrWord = Annotated[str, 'function']  # an import path, or another text
Server = Annotated[str, 'server']  # an address that is called
Variable = Annotated[str, 'variable']  # of the environment; its value is sent
Compiled = Annotated[str | None, 'compiled']  # a folder of programs
# Paths, which `config` makes absolute, so that config.json means the same
# files from any folder. File may be a folder.
File = Annotated[str, 'file', _NAMED]
FileOrNone = Annotated[str | None, 'file', _NAMED]
# A folder of weights or of a tokenizer, or a model of the hub's cache.
Folder = Annotated[str, 'folder']
FolderOrNone = Annotated[str | None, 'folder']
