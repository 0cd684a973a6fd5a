"""Tool calls in plain text, and how tools are described to whoever writes it.

    guess({"number": 3})
    {"name": "guess", "arguments": {"number": 3}}
    <tool_call>{"name": "guess", "arguments": {"number": 3}}</tool_call>

Several may stand in one text, with words around them. Once there is a
`<tool_call>`, only what is inside such tags counts.
"""

import dataclasses
import inspect
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

_TAGGED = re.compile(r'<tool_call>(.*?)(?:</tool_call>|$)', re.DOTALL)
# Where a call may begin; what follows is read as JSON.
_START = re.compile(r'\b([A-Za-z_]\w*)\(\s*|(?=\{)')
_DECODER = json.JSONDecoder()
_HOW = (
  'Call a tool by writing NAME({"ARGUMENT": VALUE, ...}), the arguments as '
  'one JSON object.'
)


@dataclasses.dataclass(frozen=True)
class Call:
  """A tool's name, and what it is to be told."""

  name: str
  arguments: Any  # no mapping: a call that nobody can read


def find(text: str, names: Collection[str]) -> list[Call]:
  """Returns the calls of a text, in its order.

  What has the form of a call counts, whatever the name. What was meant as one
  counts too, though nobody can read it: a known name before a `(`, and a tag,
  with something else inside.

  Args:
    text: an assistant turn.
    names: of the tools.
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
      said = value.get('name') if isinstance(value, dict) else None
      if isinstance(said, str) and ('arguments' in value or said in names):
        yield Call(said, value.get('arguments', {}))
    elif isinstance(value, dict):
      yield Call(name, value)
    elif name in names:
      empty = text[match.end() : match.end() + 1] == ')'
      yield Call(name, {} if empty else None)


def tools(env: Any, but: Collection[str]) -> dict[str, Callable]:
  """Returns the methods of an instance by name, in alphabetical order.

  Args:
    env: anything.
    but: names that are no tools; those with a leading underscore are none.
  """
  # Of the class: `getmembers` of an instance would ask its properties.
  found = inspect.getmembers(type(env), inspect.isfunction)
  return {
    name: getattr(env, name)
    for name, _ in found
    if not name.startswith('_') and name not in but
  }


def run(call: Call, tools: Mapping[str, Callable]) -> Any:
  """Returns what a tool returns, which may be awaitable.

  Raises:
    ValueError: no such tool, or its arguments are not those it takes.
    Exception: whatever the tool raises.
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
  """Returns what to tell a policy of the tools: a line for each."""
  lines = (
    f'- {_signature(name, tool)}{_summary(tool)}'
    for name, tool in tools.items()
  )
  return '\n'.join(('Tools:', *lines, _HOW))


def _signature(name: str, tool: Callable) -> str:
  try:
    signature = inspect.signature(tool, eval_str=True)
  except NameError:  # of an annotation that only type checkers import
    signature = inspect.signature(tool)
  return f'{name}{signature.replace(return_annotation=signature.empty)}'


def _summary(tool: Callable) -> str:
  documented = inspect.getdoc(tool)
  return f': {documented.splitlines()[0]}' if documented else ''
