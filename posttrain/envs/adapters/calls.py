"""Tool calls in plain text, and the description of tools in a prompt.

    guess({"number": 3})
    {"name": "guess", "arguments": {"number": 3}}
    <tool_call>{"name": "guess", "arguments": {"number": 3}}</tool_call>

A text may hold several calls, with other words around them. If it holds a
`<tool_call>`, only the text inside such tags counts.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

_TAGGED = re.compile(r'<tool_call>(.*?)(?:</tool_call>|$)', re.DOTALL)
# Start of a possible call, followed by JSON.
_START = re.compile(r'\b([A-Za-z_]\w*)\(\s*|(?=\{)')
_DECODER = json.JSONDecoder()
_HOW = (
  'Call a tool by writing NAME({"ARGUMENT": VALUE, ...}), the arguments as '
  'one JSON object.'
)


@dataclasses.dataclass(frozen=True)
class Call:
  """A tool's name and arguments."""

  name: str
  arguments: Any  # a mapping, or anything else if the call cannot be read


def find(text: str, names: Collection[str]) -> list[Call]:
  """Returns the calls in a text, in order.

  Text in the form of a call counts, whatever the name. So do calls that cannot
  be read: a known name before a `(`, or a tag, with other contents.

  Args:
    text: an assistant turn.
    names: the tools' names.
  """
  tagged = _TAGGED.findall(text)
  if not tagged:
    return list(_scan(text, names))
  return [
    call
    for part in tagged
    for call in list(_scan(part, names)) or [Call('', None)]
  ]


def _scan(text: str, names: Collection[str]) -> Iterator[Call]:
  at = 0
  while match := _START.search(text, at):
    name, value, end = match[1], None, None
    try:
      value, end = _DECODER.raw_decode(text, match.end())
    except (ValueError, RecursionError):
      pass
    at = end or match.end() + (name is None)
    if name is None:
      tool = value.get('name') if isinstance(value, dict) else None
      if isinstance(tool, str) and ('arguments' in value or tool in names):
        yield Call(tool, value.get('arguments', {}))
    elif isinstance(value, dict):
      yield Call(name, value)
    elif name in names:
      empty = text[match.end() : match.end() + 1] == ')'
      yield Call(name, {} if empty else None)


def tools(env: Any, exclude: Collection[str]) -> dict[str, Callable]:
  """Returns the methods of an instance by name, in alphabetical order.

  Args:
    env: any object.
    exclude: names of methods that are no tools; methods with a leading
      underscore are never tools.
  """
  # Of the class: `getmembers` of an instance would evaluate its properties.
  methods = inspect.getmembers(type(env), inspect.isfunction)
  return {
    name: getattr(env, name)
    for name, _ in methods
    if not name.startswith('_') and name not in exclude
  }


def run(call: Call, tools: Mapping[str, Callable]) -> Any:
  """Runs a call and returns the tool's result, which may be awaitable.

  Raises:
    ValueError: the tool does not exist, or its signature does not fit.
    Exception: any exception of the tool.
  """
  if not isinstance(call.arguments, Mapping):
    raise ValueError(f'a call must be one that can be read. {_HOW}')
  if call.name not in tools:
    raise ValueError(
      f'the tool must be one of {sorted(tools)}: got {call.name!r}'
    )
  tool = tools[call.name]
  try:
    inspect.signature(tool).bind(**call.arguments)
  except TypeError as error:
    raise ValueError(f'{_signature(call.name, tool)}: {error}') from None
  return tool(**call.arguments)


def describe(tools: Mapping[str, Callable]) -> str:
  """Returns the description of the tools for the prompt: a line per tool."""
  lines = (
    f'- {_signature(name, tool)}{_summary(tool)}'
    for name, tool in tools.items()
  )
  return '\n'.join(('Tools:', *lines, _HOW))


def _signature(name: str, tool: Callable) -> str:
  try:
    signature = inspect.signature(tool, eval_str=True)
  except NameError:  # an annotation that is imported for type checkers only
    signature = inspect.signature(tool)
  return f'{name}{signature.replace(return_annotation=signature.empty)}'


def _summary(tool: Callable) -> str:
  doc = inspect.getdoc(tool)
  return f': {doc.splitlines()[0]}' if doc else ''
