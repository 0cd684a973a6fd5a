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

import collections.abc
import inspect
import re
import types as std
import typing
from collections.abc import Callable, Iterable
from typing import Any

from posttrain import types
from posttrain.util import errors

_SECTION = re.compile(
  r'^(Args|Arguments|Attributes|Example|Examples|Note|Notes|Raises|Returns'
  r'|Yields):\s*$',
  re.MULTILINE,
)
_ARGUMENT = re.compile(r'^( *)\*{0,2}(\w+)\s*(?:\(.*?\))?:\s*(.*)$')
_KINDS = {
  str: 'string',
  int: 'integer',
  float: 'number',
  bool: 'boolean',
  list: 'array',
  tuple: 'array',
  set: 'array',
  frozenset: 'array',
  dict: 'object',
  None: 'null',
  type(None): 'null',
  collections.abc.Sequence: 'array',
  collections.abc.Iterable: 'array',
  collections.abc.Mapping: 'object',
}


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
  properties, required, more = {}, [], {}
  summary, descriptions = _docstring(inspect.getdoc(function) or '')
  for name, parameter in _signature(function).parameters.items():
    if parameter.kind is parameter.VAR_KEYWORD:
      more = {'additionalProperties': True}
      continue
    if parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
      raise ValueError(
        'a tool must have arguments that are passed by name: got '
        f'{errors.quote(name, 80)} of {errors.text(function.__name__, 80)}; '
        'leave out * and /'
      )
    properties[name] = _type(parameter.annotation)
    if name in descriptions:
      properties[name]['description'] = descriptions[name]
    if parameter.default is parameter.empty:
      required.append(name)
  parameters = {'type': 'object', 'properties': properties}
  if required:
    parameters['required'] = required
  return {
    'type': 'function',
    'function': {
      'name': function.__name__,
      'description': summary,
      'parameters': {**parameters, **more},
    },
  }


def _signature(function: Callable) -> inspect.Signature:
  try:
    return inspect.signature(function, eval_str=True)
  except NameError:  # an annotation that is imported for type checkers only
    return inspect.signature(function)


def _docstring(text: str) -> tuple[str, dict[str, str]]:
  """Returns a docstring's text before its sections, and its arguments."""
  parts = _SECTION.split(text)
  summary, arguments = parts[0].strip(), {}
  for title, section in zip(parts[1::2], parts[2::2], strict=True):
    if title in ('Args', 'Arguments'):
      arguments |= _arguments(section)
  return summary, arguments


def _arguments(section: str) -> dict[str, str]:
  """Returns the descriptions of a section; deeper lines continue one."""
  lines: dict[str, list[str]] = {}
  name, indent = '', None
  for line in filter(str.strip, section.splitlines()):
    match = _ARGUMENT.match(line)
    if match and (indent is None or len(match[1]) <= indent):
      indent, name = len(match[1]), match[2]
      lines[name] = [match[3].strip()]
    elif name:
      lines[name].append(line.strip())
  return {name: ' '.join(filter(None, x)) for name, x in lines.items()}


def _type(annotation: Any) -> dict[str, Any]:
  """Returns the JSON schema of an annotation; {} = any value."""
  origin, args = typing.get_origin(annotation), typing.get_args(annotation)
  if origin is typing.Annotated:
    return _type(args[0])
  if origin is typing.Literal:
    kinds = {_KINDS.get(type(value)) for value in args}
    kind = {'type': kinds.pop()} if len(kinds) == 1 else {}
    return {**kind, 'enum': list(args)}
  if origin in (typing.Union, std.UnionType):
    return _union([_type(x) for x in args])
  kind = _KINDS.get(_hashable(origin or annotation))
  if kind == 'array' and (items := _items(origin, args)):
    return {'type': kind, 'items': items}
  return {'type': kind} if kind else {}


def _union(parts: list[dict[str, Any]]) -> dict[str, Any]:
  if not all(parts):
    return {}
  if all(list(x) == ['type'] for x in parts):
    return {'type': [x['type'] for x in parts]}
  return {'anyOf': parts}


def _items(origin: Any, args: tuple) -> dict[str, Any]:
  """Returns the schema of an array's items; {} if they may differ."""
  if origin is tuple and args[1:] != (...,):
    return {}
  return _type(args[0]) if args else {}


def _hashable(value: Any) -> Any:
  return value if isinstance(value, collections.abc.Hashable) else object
