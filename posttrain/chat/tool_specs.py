"""Tools of a task: their form, their place in templates, calls' arguments.

A tool is a JSON object as the APIs of models have them:

    {"type": "function", "function": {
      "name": "add", "description": "Adds two numbers.",
      "parameters": {"type": "object",
                     "properties": {"a": {"type": "integer"}, ...},
                     "required": ["a", "b"]}}}

1. A template that reads `tools` gets them and renders them itself.
   For others, and in the format `plain`, a description is put into the first
   message: after the text of a system message, in a system message of its own,
   or before the user's text if the template renders no system message.
2. The format of calls, if it is 'auto', is that in which the template renders
   a call of an assistant turn.
3. Results of calls are messages of role 'tool'; of role 'user' if the template
   does not render that role.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain import types
from posttrain.chat import templates, tool_calls

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


# Messages and a tool by which a template is examined.
_MARK = '\uf8ffanswer\uf8ff'
_QUESTION = {'role': 'user', 'content': 'question'}
_CALL = tool_calls.Call('probe', {'a': 1})
_SCHEMA = {'type': 'object', 'properties': {'a': {'type': 'integer'}}}
_PROBE = {
  'type': 'function',
  'function': {
    'name': _CALL.name,
    'description': 'A tool.',
    'parameters': _SCHEMA,
  },
}
_CALLING = {
  'role': 'assistant',
  'content': '',
  'tool_calls': [
    {
      'type': 'function',
      'function': {'name': _CALL.name, 'arguments': dict(_CALL.arguments)},
    }
  ],
}


class Style(NamedTuple):
  """The format of calls, and the role of their results."""

  format: str  # one of `tool_calls.FORMATS`, or 'text'
  role: str  # of the messages with results: 'tool' or 'user'

  @property
  def reads_calls(self) -> bool:
    """Whether calls are read, and not left in the text."""
    return self.format != 'text'


def plain(tools: Any) -> list[dict[str, Any]]:
  """Returns tools as plain JSON values.

  Raises:
    ValueError: one has another form, or two have one name.
  """
  try:
    values = json.loads(json.dumps(tools))
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(f'tools must be JSON values: {error!s:.200}') from None
  if not isinstance(values, list) or not values:
    raise ValueError(
      f'tools must be a list of tools, or None: got {values!r:.80}'
    )
  names = set()
  for index, tool in enumerate(values):
    function = tool.get('function') if isinstance(tool, dict) else None
    name = function.get('name') if isinstance(function, dict) else None
    if not isinstance(name, str) or not name or name in names:
      raise ValueError(
        f'tools[{index}] must be {{"type": "function", "function": {{"name": '
        '..., "description": ..., "parameters": ...}}, with a name of its '
        f'own: got {tool!r:.80}; posttrain.envs.tools.of builds '
        'tools from functions'
      )
    if not isinstance(function.get('parameters', {}), dict):
      raise ValueError(
        f'tools[{index}].function.parameters must be a JSON schema: got '
        f'{function["parameters"]!r:.80}'
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
    return f'the tool must be one of {sorted(schemas)}: got {call.name!r:.80}'
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
        f'got {name!r:.80}'
      )
    if not _fits(value, properties[name]):
      return (
        f'{name} of {call.name} must be {_kind(properties[name])}: got '
        f'{value!r:.80}'
      )
  return ''


def describe(tools: Tools, format: str) -> str:
  """Returns the description of tools for a prompt, a line per tool.

  Args:
    tools: the tools.
    format: the format of calls, one of `tool_calls.FORMATS`; of any other, such
      as 'text', nothing is said.
  """
  lines = ['Tools:']
  for tool in tools:
    function = tool['function']
    schema = function.get('parameters', {})
    arguments = []
    for name, argument in schema.get('properties', {}).items():
      optional = '' if name in schema.get('required', ()) else '?'
      kind = _kind(argument)
      arguments.append(
        f'{name}{optional}' + ('' if kind == 'any' else f': {kind}')
      )
    summary = str(function.get('description') or '').splitlines()[:1]
    head = f'- {function["name"]}({", ".join(arguments)})'
    lines.append(': '.join([head, *summary]))
  if format in _HOW:
    lines.append(f'Call a tool by writing {_HOW[format]}.')
  return '\n'.join(lines)


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
  if isinstance(value, bool):  # an int in Python, no number in JSON
    return not kinds or 'boolean' in kinds
  return not kinds or any(isinstance(value, _CLASSES[kind]) for kind in kinds)


class Described:
  """A template whose first message has a description before or after it."""

  def __init__(self, template: templates.Template, description: str):
    self._template, self._description = template, description
    system = {'role': 'system', 'content': _MARK}
    answer = {'role': 'assistant', 'content': 'answer'}
    one = _rendered(template, system, _QUESTION)
    two = _rendered(template, system, _QUESTION, answer, _QUESTION)
    # Some templates show a system message before the last question only.
    self._has_system = one.find(_MARK) == two.find(_MARK) >= 0

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages; with `prompt`, adds the header of an assistant turn.

    Raises:
      ValueError: the template raises an error.
    """
    if messages:
      first, *rest = messages
      content = first['content']
      if first['role'] == 'system':
        first = {**first, 'content': f'{content}\n\n{self._description}'}
      elif self._has_system:
        rest = [first, *rest]
        first = {'role': 'system', 'content': self._description}
      else:
        first = {**first, 'content': f'{self._description}\n\n{content}'}
      messages = (first, *rest)
    return self._template.text(messages, prompt)


def make_template(
  template: templates.BuiltIn | templates.Jinja,
  bos: str,
  stops: Sequence[str],
  described: types.Tools,
) -> tuple[Any, Style]:
  """Returns a template that describes tools and the format of calls.

  Args:
    template: the template, without tools.
    bos: text of the token that begins a conversation, '' if there is none.
    stops: texts of the tokens that end a turn, eos first.
    described: the tools.

  Raises:
    ValueError: the tools have another form; or the format is 'auto', and the
      template's is not known.
  """
  formats, format = ('auto', 'text', *tool_calls.FORMATS), described.format
  if format not in formats:
    raise ValueError(
      f'the format of tool calls must be one of {formats}: got {format!r:.80}'
    )
  schemas = plain(described.schemas)
  built_in = isinstance(template, templates.BuiltIn)
  native = not built_in and 'tools' in template.reads and format != 'plain'
  if format == 'auto':
    format = _format(template, stops) if native else 'plain'
  if native:
    return template.with_tools(schemas), Style(format, _role(template))
  description = describe(schemas, format)
  if built_in:
    head = templates.BUILT_IN.format(
      role='system', content=description, end=stops[0]
    )
    return templates.BuiltIn(bos + head, stops[0]), Style(format, 'tool')
  return Described(template, description), Style(format, _role(template))


def _format(template: templates.Jinja, stops: Sequence[str]) -> str:
  """Returns the format in which a template renders a call."""
  template = template.with_tools([_PROBE])
  opened = _rendered(template, _QUESTION, prompt=True)
  text = _rendered(template, _QUESTION, _CALLING).removeprefix(opened)
  end = min((text.index(x) for x in stops if x in text), default=len(text))
  for format in ('hermes', 'llama3'):
    if tool_calls.parse(text[:end], format, [_CALL.name]) == [_CALL]:
      return format
  raise ValueError(
    'the format of tool calls must be named for config.tokenizer.'
    "chat_template, which tells of tools, but has calls in neither 'hermes' "
    "nor 'llama3': got 'auto'; 'plain' tells of tools in a system message "
    'instead'
  )


def _role(template: templates.Jinja) -> str:
  """Returns the role of results, 'user' if the template renders no 'tool'."""
  answer = {'role': 'assistant', 'content': 'answer'}
  result = {'role': 'tool', 'name': 'probe', 'content': _MARK}
  text = _rendered(template, _QUESTION, answer, result)
  return 'tool' if text.count(_MARK) == 1 else 'user'


def _rendered(
  template: templates.Template,
  *messages: Mapping[str, Any],
  prompt: bool = False,
) -> str:
  """Renders messages; '' where the template refuses them."""
  try:
    return template.text(messages, prompt)
  except ValueError:
    return ''
