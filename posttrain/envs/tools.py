"""Tools of an environment's tasks, from Python functions.

    def add(a: int, b: int = 0) -> int:
      '''Adds two numbers.

      Args:
        a: the first number.
        b: the second number.
      '''

    types.Task(..., tools=tools.of([add]))

The arguments' types are those of the annotations, the descriptions those of the
docstring, in Google's style. The task's episode has a method `call`, see
`base.ToolEpisode`.
"""

import inspect
import re
import types as std
import typing
from collections.abc import Callable, Iterable
from typing import Any

from posttrain import types

_SECTION = re.compile(
  r'^(Args|Arguments|Attributes|Example|Examples|Note|Notes|Raises|Returns'
  r'|Yields):\s*$',
  re.MULTILINE,
)
_ARGUMENT = re.compile(r'^( *)\*{0,2}(\w+)\s*(?:\(.*?\))?:\s*(.*)$')
# By name of the Python type.
_KINDS = {
  'str': 'string',
  'int': 'integer',
  'float': 'number',
  'bool': 'boolean',
  'NoneType': 'null',
  'dict': 'object',
  'Mapping': 'object',
}
_ARRAYS = ('list', 'tuple', 'set', 'frozenset', 'Sequence', 'Iterable')


def of(functions: Iterable[Callable], format: str = 'auto') -> types.Tools:
  """Returns the tools that functions are.

  Args:
    functions: named functions or methods, at least one.
    format: see `types.Tools`.

  Raises:
    ValueError: a function has arguments that cannot be passed by name.
  """
  return types.Tools(tuple(map(schema, functions)), format)


def schema(function: Callable) -> dict[str, Any]:
  """Returns the description of a function that models are given.

  An annotation without a counterpart in JSON allows any value.

  Raises:
    ValueError: as `of`.
  """
  # 1. The docstring: the text before its sections, and its arguments, whose
  # deeper lines continue one.
  summary, *sections = _SECTION.split(inspect.getdoc(function) or '')
  descriptions: dict[str, str] = {}
  for title, section in zip(sections[::2], sections[1::2], strict=True):
    if title not in ('Args', 'Arguments'):
      continue
    name, indent = '', None
    for line in filter(str.strip, section.splitlines()):
      match = _ARGUMENT.match(line)
      if match and (indent is None or len(match[1]) <= indent):
        indent, name = len(match[1]), match[2]
        descriptions[name] = match[3].strip()
      elif name:
        descriptions[name] = f'{descriptions[name]} {line.strip()}'.strip()
  # 2. The signature.
  try:
    signature = inspect.signature(function, eval_str=True)
  except NameError:  # an annotation that is imported for type checkers only
    signature = inspect.signature(function)
  schema: dict[str, Any] = {'type': 'object', 'properties': {}}
  required, more = [], {}
  for name, parameter in signature.parameters.items():
    if parameter.kind is parameter.VAR_KEYWORD:
      more = {'additionalProperties': True}
      continue
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
      raise ValueError(
        f'a tool must have arguments that are passed by name: got {name!r} of '
        f'{function.__name__}; leave out * and /'
      )
    schema['properties'][name] = _type(parameter.annotation)
    if name in descriptions:
      schema['properties'][name]['description'] = descriptions[name]
    if parameter.default is parameter.empty:
      required.append(name)
  return {
    'type': 'function',
    'function': {
      'name': function.__name__,
      'description': summary.strip(),
      'parameters': {
        **schema,
        **({'required': required} if required else {}),
        **more,
      },
    },
  }


def _type(annotation: Any) -> dict[str, Any]:
  """Returns the JSON schema of an annotation; {} = any value."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is typing.Annotated:
    return _type(args[0])
  if origin is typing.Literal:
    kinds = {_KINDS.get(type(value).__name__) for value in args}
    kind = {'type': kinds.pop()} if len(kinds) == 1 else {}
    return {**kind, 'enum': list(args)}
  if origin in (typing.Union, std.UnionType):
    parts = [_type(x) for x in args]
    if not all(parts):
      return {}
    if all(list(x) == ['type'] for x in parts):
      return {'type': [x['type'] for x in parts]}
    return {'anyOf': parts}
  name = getattr(origin or annotation, '__name__', '')
  if name not in _ARRAYS:
    return {'type': _KINDS[name]} if name in _KINDS else {}
  items = {}
  if args and (origin is not tuple or args[1:] == (...,)):
    items = _type(args[0])  # {} if the items of a tuple may differ
  return {'type': 'array', 'items': items} if items else {'type': 'array'}
