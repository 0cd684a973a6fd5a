"""Tools: their place in templates, and their calls in an assistant's text.

A tool is a JSON object as the APIs of models have them:

    {"type": "function", "function": {
      "name": "add", "description": "Adds two numbers.",
      "parameters": {"type": "object",
                     "properties": {"a": {"type": "integer"}, ...},
                     "required": ["a", "b"]}}}

A template that reads `tools` gets them and renders them itself. For others, and
in the format `plain`, a description is put into the first message: after the
text of a system message, in a system message of its own, or before the user's
text if the template renders no system message. The format of calls, if it is
'auto', is that in which the template renders a call of an assistant turn.
Results of calls are messages of role 'tool'; of role 'user' if the template
does not render that role.

    hermes   <tool_call>
             {"name": "add", "arguments": {"a": 1, "b": 2}}
             </tool_call>
    llama3   {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": ...}
    plain    add({"a": 1, "b": 2})

1. Thoughts (`outside_thoughts`) have no calls.
2. Hermes, Qwen: any number of calls, with other text around them. Llama 3.1 and
   3.2: the turn is a call, or several with a `;` between them, perhaps after
   `<|python_tag|>`; its arguments may be called `arguments`. Plain: any number,
   with other text around them; a JSON object with a name and arguments is one
   too. If there are tags of Hermes, only the text in them counts.
3. A call that cannot be read is returned as well, with the reason in one line,
   for the model. No text raises an exception.
"""

import dataclasses
import itertools
import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from posttrain import types
from posttrain.chat import templates

Tools = Sequence[Mapping[str, Any]]
FORMATS = ('hermes', 'llama3', 'plain')
MAX_CALLS = 32  # of a turn; the first one above them is an error
MAX_DEPTH = 64  # of nested arguments
# How a call is written, in the description of tools.
_HOW = {
  'hermes': '<tool_call>\n{"name": NAME, "arguments": {"ARGUMENT": VALUE, '
  '...}}\n</tool_call>',
  'llama3': '{"name": NAME, "parameters": {"ARGUMENT": VALUE, ...}} and '
  'nothing else',
  'plain': 'NAME({"ARGUMENT": VALUE, ...}), the arguments as one JSON object',
}
# The types of JSON Schema that a value has.
_NAMES = {
  str: 'string',
  int: 'integer number',
  float: 'number',
  bool: 'boolean',
  list: 'array',
  dict: 'object',
  type(None): 'null',
}
_KNOWN = ' '.join(_NAMES.values()).split()
_PYTHON = '<|python_tag|>'
THOUGHT = '<think>'
_THOUGHTS = re.compile(
  r'<think>.*?(?:</think>|\Z)'
  r'|\A(?!\s*(?:<tool_call>|<\|python_tag\|>|\{))(?:(?!<think>).)*?</think>',
  re.DOTALL,
)
_TAGGED = re.compile(
  r'(?P<open><tool_call>)(?P<call>.*?)'
  r'(?:(?P<close></tool_call>)|(?=<tool_call>)|\Z)|</tool_call>',
  re.DOTALL,
)
# Start of a Llama 3 call whose JSON cannot be read; other objects are answers.
_LLAMA_START = re.compile(r'\s*\{\s*"(?:name|type)"\s*:')
# Start of a possible plain call, followed by JSON.
_PLAIN_START = re.compile(r'\b([A-Za-z_]\w*)\(\s*|(?=\{)')
# A call as text.
_WRITTEN = {
  'hermes': '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>',
  'llama3': '{"name": "%s", "parameters": %s}',
  'plain': '%s(%s)',
}
# Where the first call may begin, perhaps with characters that are to follow.
_STARTS = {
  'hermes': r'(<tool_call>|<[a-z_]*\Z)',
  'llama3': r'\A\s*(\{|<\|python_tag\|>|<[|a-z_]*\Z)',
  'plain': r'(<tool_call>|<[a-z_]*\Z|\{|\b(?:%s)\(|\w+\Z)',
}
_UNREADABLE = 'a call must be one that can be read'
_DEEP = f'a call must be nested at most {MAX_DEPTH} levels deep'


# Python refuses to read integers of thousands of digits.
_DECODER = json.JSONDecoder(
  parse_int=lambda digits: int(digits) if len(digits) < 1000 else float(digits)
)


@dataclasses.dataclass(frozen=True)
class Call:
  """A tool's name and arguments."""

  name: str  # '' if it cannot be read
  arguments: Mapping[str, Any]  # {} if they cannot be read
  error: str = ''  # why the call is malformed; '' = it is not


def parse(text: str, format: str, names: Collection[str]) -> list[Call]:
  """Returns the calls in a text, in order; never raises an exception.

  Args:
    text: an assistant turn, without its stop token.
    format: one of `FORMATS`.
    names: the tools' names. A call of another name is returned as it is.
  """
  text, calls = outside_thoughts(text), []
  for call in _READERS[format](text, names):
    if len(calls) == MAX_CALLS:
      calls.append(_malformed(f'a turn must have at most {MAX_CALLS} calls'))
      break
    level: list[Any] = [call.arguments]
    for _ in range(MAX_DEPTH):  # without recursion, which has a limit
      level = [
        item
        for value in level
        if isinstance(value, dict | list)
        for item in (value.values() if isinstance(value, dict) else value)
      ]
    calls.append(_malformed(_DEEP, call.name) if level else call)
  return calls


def outside_thoughts(text: str, ends: bool = True) -> str:
  """Returns a turn with spaces in place of its thoughts and their tags.

  A thought is `<think>...</think>`; the first one may begin in the prompt, and
  the last one need not end. A tag within a JSON object is text, and a turn that
  begins with a call does not begin with a thought.

  Args:
    text: the turn.
    ends: whether an object that is open at the end is not one of JSON.
  """
  if 'think>' not in text:
    return text
  shown = list(text)
  for thought in _THOUGHTS.finditer(_masked(text, ends)):
    shown[slice(*thought.span())] = ' ' * len(thought[0])
  return ''.join(shown)


def _masked(text: str, ends: bool = True) -> str:
  """Returns a text with braces in place of JSON objects."""
  masked, position = list(text), 0
  while (begin := text.find('{', position)) >= 0:
    value = _read(text, begin)
    position = max(value.end, begin + 1)
    if not value.error or not ends and value.end == len(text):
      masked[begin:position] = '{' * (position - begin)
  return ''.join(masked)


def start(text: str, format: str, names: Collection[str]) -> int:
  """Returns where the first call of a turn that goes on may begin."""
  pattern = _STARTS[format].replace('%s', '|'.join(map(re.escape, names)))
  # An open object may become one of JSON, with tags as text, or not.
  views = outside_thoughts(text), outside_thoughts(text, False)
  shown, position = ''.join(map(max, *views)), 0
  masked = _masked(shown)
  while match := re.compile(pattern).search(masked, position):
    begin = match.start(1)
    value = _read(shown, begin)
    is_open = value.end == len(text)
    if masked[begin] != '{' or is_open or _is_call(value.value, names):
      return begin
    position = max(value.end, begin + 1)
  return len(text)


def write(messages: types.Messages, style: 'Style') -> types.Messages:
  """Writes messages in the form in which the policy has them.

  Calls are text where the template does not render them in the style's format,
  and results have the style's role.
  """
  result = []
  for role, turns in itertools.groupby(messages, lambda x: x['role']):
    if role == 'tool' and style.role == 'user':
      text = '\n'.join(x['content'] for x in turns)
      turns = ({'role': 'user', 'content': text},)
    for turn in turns:
      if turn.get('tool_calls') and not style.renders:
        text = ('; ' if style.format == 'llama3' else '\n').join(
          _WRITTEN[style.format]
          % (call['name'], json.dumps(call['arguments'], ensure_ascii=False))
          for call in (x.get('function', x) for x in turn['tool_calls'])
        )
        # A word before a plain call would be a part of its name.
        content = re.sub(r'\w\Z', r'\g<0>\n', turn['content'])
        turn = {'role': 'assistant', 'content': content + text}
      result.append(turn)
  return tuple(result)


def _hermes(text: str, names: Collection[str]) -> Iterator[Call]:
  del names
  for part in _TAGGED.finditer(_masked(text)):
    body = text[slice(*part.span('call'))].strip()
    read = _read(body, 0)
    if not part['open']:
      yield _malformed("a call must begin with '<tool_call>'")
    elif read.error:
      yield _malformed(read.error)
    elif part['close'] and read.end == len(body):
      yield _call(read.value, ('arguments',))
    else:
      yield _malformed("a call must end with '</tool_call>'")


def _llama3(text: str, names: Collection[str]) -> Iterator[Call]:
  text = text.strip().removesuffix(';')
  rest = text.removeprefix(_PYTHON).strip()
  read = _read(rest, 0)
  if not text.startswith(_PYTHON) and not (
    rest.startswith('{')
    and (
      _LLAMA_START.match(rest)
      if read.error
      else 'parameters' in read.value or _is_call(read.value, names)
    )
  ):
    return  # an answer in JSON
  while not read.error:
    yield _call(read.value, ('parameters', 'arguments'))
    rest = rest[read.end :].lstrip()
    if not rest:
      return
    if rest[0] != ';':
      yield _malformed('a call must be followed by nothing, or by ; and a call')
      return
    rest = rest[1:].lstrip()
    read = _read(rest, 0)
  yield _malformed(read.error)


def _plain(text: str, names: Collection[str]) -> Iterator[Call]:
  parts = _TAGGED.finditer(_masked(text))
  tagged = [text[slice(*x.span('call'))] for x in parts if x['open']]
  unreadable = f'{_UNREADABLE}: write {_HOW["plain"]}'
  for part in tagged or [text]:
    position, some = 0, False
    while match := _PLAIN_START.search(part, position):
      name, begin = match[1], match.end()
      read = _read(part, begin)
      position = max(read.end, begin + (name is None))
      if name is None:
        if read.error or not _is_call(read.value, names):
          continue
        yield _call(read.value, ('arguments', 'parameters'))
      elif isinstance(read.value, dict):
        yield Call(name, read.value)
      elif name not in names:
        continue
      elif part.startswith(')', begin):
        yield Call(name, {})
      else:
        yield _malformed(unreadable, name)
      some = True
    if tagged and not some:
      yield _malformed(unreadable)


_READERS = {'hermes': _hermes, 'llama3': _llama3, 'plain': _plain}


class _Json(NamedTuple):
  """A JSON value in a text, or why there is none."""

  value: Any
  end: int  # of the value, or the place of the error
  error: str = ''


def _read(text: str, begin: int) -> _Json:
  """Reads the JSON value at a place.

  An error is at the first character that is not JSON, so that what follows can
  be read from there on.
  """
  try:
    return _Json(*_DECODER.raw_decode(text, begin))
  except json.JSONDecodeError as error:
    is_open = re.fullmatch(r'[\w\\-]*', text[error.pos :]) or (
      error.msg.startswith('Unterminated')
    )
    reason = f'{error.msg} at character {error.pos - begin + 1} of its JSON'
    return _Json(
      None, len(text) if is_open else error.pos, f'{_UNREADABLE}: {reason}'
    )
  except RecursionError:
    return _Json(None, len(text), _DEEP)


def _is_call(value: Any, names: Collection[str]) -> bool:
  """Returns whether a JSON value is meant as a call."""
  return (
    isinstance(value, dict)
    and isinstance(value.get('name'), str)
    and (
      value['name'] in names or 'arguments' in value or 'parameters' in value
    )
  )


def _call(value: Any, keys: tuple[str, ...]) -> Call:
  """Returns the call of a JSON value.

  Args:
    value: an object with a name.
    keys: names of the arguments in it.
  """
  must = f'a call must be {{"name": NAME, "{keys[0]}": {{...}}}}: got '
  name = value.get('name') if isinstance(value, dict) else None
  if not isinstance(name, str) or not name:
    return _malformed(f'{must}{value!r:.80}')
  key = next((x for x in (*keys, 'parameters') if x in value), keys[0])
  if key not in keys:
    return _malformed(f'{must}{key!r}', name)
  arguments = value.get(key, {})
  if not isinstance(arguments, dict):
    return _malformed(f'{key!r} must be an object: got {arguments!r:.80}', name)
  return Call(name, arguments)


def _malformed(error: str, name: str = '') -> Call:
  return Call(name, {}, error)


# Messages and a tool by which a template is examined.
_CALL = Call('probe', {'a': 1})
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

  format: str  # one of `FORMATS`
  role: str  # of the messages with results: 'tool' or 'user'
  renders: bool = False  # whether the template renders calls in this format


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
    if (
      not isinstance(name, str)
      or not name
      or name in names
      or not isinstance(function.get('parameters') or {}, dict)
    ):
      raise ValueError(
        f'tools[{index}] must be {{"type": "function", "function": {{"name": '
        '..., "description": ..., "parameters": SCHEMA}}, with a name of its '
        f'own: got {tool!r:.80}; posttrain.envs.tools.of builds '
        'tools from functions'
      )
    names.add(name)
  return values


def parameters(tools: Tools) -> dict[str, Mapping[str, Any]]:
  """Returns the schema of each tool's arguments, by the tool's name."""
  functions = (tool['function'] for tool in tools)
  return {x['name']: x.get('parameters') or {} for x in functions}


def problem(call: Call, schemas: Mapping[str, Mapping[str, Any]]) -> str:
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
    format: the format of calls, one of `FORMATS`; of any other, such
      as 'text', nothing is said.
  """
  lines = ['Tools:']
  for tool in tools:
    function = tool['function']
    schema = function.get('parameters') or {}
    arguments = []
    for name, argument in schema.get('properties', {}).items():
      optional = '' if name in schema.get('required', ()) else '?'
      kind = _kind(argument)
      arguments.append(f'{name}{optional}: {kind}'.removesuffix(': any'))
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
  of = f' of {items}'.removesuffix(' of any')
  return ' | '.join(f'{x}{of}' if x == 'array' else x for x in kinds) or 'any'


def _types(schema: Mapping[str, Any]) -> list[str]:
  kinds = schema.get('type', [])
  kinds = kinds if isinstance(kinds, list) else [kinds]
  return [*map(str, kinds), *['null'] * bool(schema.get('nullable'))]


def _fits(value: Any, schema: Any) -> bool:
  """Returns whether a value is of a schema's type; unknown ones fit."""
  if not isinstance(schema, Mapping):
    return True
  if isinstance(schema.get('enum'), list) and value not in schema['enum']:
    return False
  if isinstance(schema.get('anyOf'), list):
    return any(_fits(value, x) for x in schema['anyOf'])
  kinds = [x for x in _types(schema) if x in _KNOWN]
  if 'items' in schema and isinstance(value, list):
    if not all(_fits(item, schema['items']) for item in value):
      return False
  value = fitted(value, schema)
  # Not isinstance: a boolean is an int in Python, but no number in JSON.
  return not kinds or any(x in _NAMES[type(value)] for x in kinds)


def fitted(value: Any, schema: Any) -> Any:
  """Returns a value with 3.0 as 3 where its schema has integers only."""
  if isinstance(value, list):
    return [fitted(item, schema) for item in value]
  kind = _kind(schema)
  if not isinstance(value, float) or 'number' in kind or not value.is_integer():
    return value
  return int(value) if 'integer' in kind else value


def make_template(
  template: templates.BuiltIn | templates.Jinja,
  bos: str,
  stops: Sequence[str],
  described: types.Tools,
) -> tuple[Any, Style | None]:
  """Returns a template that describes tools, and the format of calls.

  There is none in the format 'text': calls are not read.

  Args:
    template: the template, without tools.
    bos: text of the token that begins a conversation, '' if there is none.
    stops: texts of the tokens that end a turn, eos first.
    described: the tools.

  Raises:
    ValueError: the tools have another form; or the format is 'auto', and the
      template's is not known.
  """
  formats, format = ('auto', 'text', *FORMATS), described.format
  if format not in formats:
    raise ValueError(
      f'the format of tool calls must be one of {formats}: got {format!r:.80}'
    )
  schemas = plain(described.schemas)
  answer = {'role': 'assistant', 'content': 'answer'}
  result = {'role': 'tool', 'name': 'probe', 'content': templates.MARK}
  shown = templates.rendered(template, templates.QUESTION, answer, result)
  role = 'tool' if shown.count(templates.MARK) == 1 else 'user'
  native, known = 'tools' in template.reads and format != 'plain', []
  if native:  # the formats in which it renders a call
    probing = template.with_variables({'tools': [_PROBE]})
    opened = templates.rendered(probing, templates.QUESTION, prompt=True)
    text = templates.rendered(probing, templates.QUESTION, _CALLING)
    text = text.removeprefix(opened)
    end = min((text.index(x) for x in stops if x in text), default=None)
    known = [
      kind
      for kind in ('hermes', 'llama3')
      if parse(text[:end], kind, ['probe']) == [_CALL]
    ]
  if format == 'auto':
    format = next(iter(known), '' if native else 'plain')
  if not format:
    raise ValueError(
      'the format of tool calls must be named for config.tokenizer.'
      "chat_template, which has calls in neither 'hermes' nor 'llama3': got "
      "'auto'; 'plain' tells of tools in a system message instead"
    )
  style = None if format == 'text' else Style(format, role, format in known)
  if native:
    return template.with_variables({'tools': schemas}), style
  description = describe(schemas, format)
  if isinstance(template, templates.BuiltIn):
    head = templates.BUILT_IN.format(
      role='system', content=description, end=stops[0]
    )
    return templates.BuiltIn(bos + head, stops[0]), style
  return templates.Described(template, description), style
