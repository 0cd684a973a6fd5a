"""Tools of a task: their form, their description as text, arguments of a call.

A tool is a JSON object as the APIs of models have them:

    {"type": "function", "function": {
      "name": "add", "description": "Adds two numbers.",
      "parameters": {"type": "object",
                     "properties": {"a": {"type": "integer"}, ...},
                     "required": ["a", "b"]}}}
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.chat import tool_calls
from posttrain.util import foreign

Tools = Sequence[Mapping[str, Any]]

_CLASSES = {
  'string': (str,),
  'integer': (int,),
  'number': (int, float),
  'boolean': (bool,),
  'array': (list,),
  'object': (dict,),
  'null': (type(None),),
}
# How a call is written, in the description of tools.
_HOW = {
  'hermes': '<tool_call>\n{"name": NAME, "arguments": {"ARGUMENT": VALUE, '
  '...}}\n</tool_call>',
  'llama3': '{"name": NAME, "parameters": {"ARGUMENT": VALUE, ...}} and '
  'nothing else',
  'plain': 'NAME({"ARGUMENT": VALUE, ...}), the arguments as one JSON object',
}


def plain(tools: Any) -> list[dict[str, Any]]:
  """Returns tools as plain JSON values.

  Raises:
    ValueError: one has another form, or two have one name.
  """
  try:
    values = json.loads(json.dumps(tools))
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(
      f'tools must be JSON values: {foreign.text(error)}'
    ) from None
  if not isinstance(values, list) or not values:
    raise ValueError(
      f'tools must be a list of tools, or None: got {foreign.quote(values, 80)}'
    )
  names = set()
  for index, tool in enumerate(values):
    function = tool.get('function') if isinstance(tool, dict) else None
    name = function.get('name') if isinstance(function, dict) else None
    if not isinstance(name, str) or not name or name in names:
      raise ValueError(
        f'tools[{index}] must be {{"type": "function", "function": {{"name": '
        '..., "description": ..., "parameters": ...}}, with a name of its '
        f'own: got {foreign.quote(tool, 80)}; posttrain.envs.tools.of builds '
        'tools from functions'
      )
    if not isinstance(function.get('parameters', {}), dict):
      raise ValueError(
        f'tools[{index}].function.parameters must be a JSON schema: got '
        f'{foreign.quote(function["parameters"], 80)}'
      )
    names.add(name)
  return values


def parameters(tools: Tools) -> dict[str, Mapping[str, Any]]:
  """Returns the schema of each tool's arguments, by the tool's name."""
  functions = (tool['function'] for tool in tools)
  return {x['name']: x.get('parameters', {}) for x in functions}


def problem(
  call: tool_calls.Call, schemas: Mapping[str, Mapping[str, Any]]
) -> str:
  """Returns why a call cannot be made, in a line for the model; '' if it can.

  Args:
    call: the call.
    schemas: from `parameters`.
  """
  if call.error:
    return call.error
  if call.name not in schemas:
    got = foreign.quote(call.name, 80)
    return f'the tool must be one of {sorted(schemas)}: got {got}'
  schema = schemas[call.name]
  properties = schema.get('properties', {})
  for name in schema.get('required', ()):
    if name not in call.arguments:
      return f'{call.name} must have the argument {name!r}: it is missing'
  for name, value in call.arguments.items():
    if name not in properties:
      if schema.get('additionalProperties'):
        continue
      return (
        f'{call.name} must have no other arguments than {sorted(properties)}: '
        f'got {foreign.quote(name, 80)}'
      )
    if not _fits(value, properties[name]):
      return (
        f'{name} of {call.name} must be {_kind(properties[name])}: got '
        f'{foreign.quote(value, 80)}'
      )
  return ''


def describe(tools: Tools, format: str) -> str:
  """Returns the description of tools for a prompt, a line per tool.

  Args:
    tools: the tools.
    format: the format of calls, one of `tool_calls.FORMATS`; of any other, such
      as 'text', nothing is said.
  """
  functions = (tool['function'] for tool in tools)
  lines = (f'- {_signature(x)}{_summary(x)}' for x in functions)
  how = [f'Call a tool by writing {_HOW[format]}.'] if format in _HOW else []
  return '\n'.join(('Tools:', *lines, *how))


def _signature(function: Mapping[str, Any]) -> str:
  schema = function.get('parameters', {})
  required = schema.get('required', ())
  arguments = (
    f'{name}{"" if name in required else "?"}{_annotation(x)}'
    for name, x in schema.get('properties', {}).items()
  )
  return f'{function["name"]}({", ".join(arguments)})'


def _annotation(schema: Any) -> str:
  kind = _kind(schema)
  return '' if kind == 'any' else f': {kind}'


def _summary(function: Mapping[str, Any]) -> str:
  lines = str(function.get('description') or '').splitlines()
  return f': {lines[0]}' if lines else ''


def _kind(schema: Any) -> str:
  """Returns the name of a schema's type, such as 'array of integer'."""
  if not isinstance(schema, Mapping):
    return 'any'
  if isinstance(schema.get('enum'), list):
    return ' | '.join(map(json.dumps, schema['enum']))
  if isinstance(schema.get('anyOf'), list):
    return ' | '.join(map(_kind, schema['anyOf']))
  kinds = _types(schema)
  items = _kind(schema.get('items'))
  of = '' if items == 'any' else f' of {items}'
  return ' | '.join(f'{x}{of}' if x == 'array' else x for x in kinds) or 'any'


def _types(schema: Mapping[str, Any]) -> list[str]:
  kinds = schema.get('type', [])
  kinds = kinds if isinstance(kinds, list) else [kinds]
  return [*map(str, kinds), *(['null'] if schema.get('nullable') else [])]


def _fits(value: Any, schema: Any) -> bool:
  """Returns whether a value is of a schema's type; unknown ones fit."""
  if not isinstance(schema, Mapping):
    return True
  if isinstance(schema.get('enum'), list) and value not in schema['enum']:
    return False
  if isinstance(schema.get('anyOf'), list):
    return any(_fits(value, x) for x in schema['anyOf'])
  kinds = [x for x in _types(schema) if x in _CLASSES]
  if 'items' in schema and isinstance(value, list):
    if not all(_fits(item, schema['items']) for item in value):
      return False
  return not kinds or any(_is(value, kind) for kind in kinds)


def _is(value: Any, kind: str) -> bool:
  if isinstance(value, bool):  # an int in Python, no number in JSON
    return kind == 'boolean'
  return isinstance(value, _CLASSES[kind])
