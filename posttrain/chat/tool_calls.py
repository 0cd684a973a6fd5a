"""Calls of tools in the text of an assistant turn, in the formats of models.

    hermes   <tool_call>
             {"name": "add", "arguments": {"a": 1, "b": 2}}
             </tool_call>
    llama3   {"name": "add", "parameters": {"a": 1, "b": 2}}; {"name": ...}
    plain    add({"a": 1, "b": 2})

1. Text up to the end of a thought (`</think>`) has no calls.
2. Hermes, Qwen: any number of calls, with other text around them. Llama 3.1 and
   3.2: the turn is a call, or several with a `;` between them, perhaps after
   `<|python_tag|>`; its arguments may be called `arguments`. Plain: any number,
   with other text around them; a JSON object with a name and arguments is one
   too. If there are tags of Hermes, only the text in them counts.
3. A call that cannot be read is returned as well, with the reason in one line,
   for the model. No text raises an exception.
"""

import dataclasses
import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple

FORMATS = ('hermes', 'llama3', 'plain')
MAX_CALLS = 32  # of a turn; the first one above them is an error
MAX_DEPTH = 64  # of nested arguments

_OPEN, _CLOSE, _PYTHON = '<tool_call>', '</tool_call>', '<|python_tag|>'
_TAG = re.compile(r'</?tool_call>')
_TAGGED = re.compile(r'<tool_call>(.*?)(?:</tool_call>|$)', re.DOTALL)
_SPACE = re.compile(r'\s*')
# Start of a Llama 3 call whose JSON cannot be read; other objects are answers.
_LLAMA_START = re.compile(r'\s*\{\s*"(?:name|type)"\s*:')
# Start of a possible plain call, followed by JSON.
_PLAIN_START = re.compile(r'\b([A-Za-z_]\w*)\(\s*|(?=\{)')
_HOW = 'write NAME({"ARGUMENT": VALUE, ...}), the arguments as one JSON object'
_CUT = 'the turn was cut off before the end of the call'


def _integer(digits: str) -> float:
  """Reads an integer; Python refuses those of thousands of digits."""
  return int(digits) if len(digits) < 1000 else float(digits)


_DECODER = json.JSONDecoder(parse_int=_integer)


@dataclasses.dataclass(frozen=True)
class Call:
  """A tool's name and arguments."""

  name: str  # '' if it cannot be read
  arguments: Mapping[str, Any]  # {} if they cannot be read
  error: str = ''  # why the call is malformed; '' = it is not


def parse(
  text: str, format: str, names: Collection[str], truncated: bool = False
) -> list[Call]:
  """Returns the calls in a text, in order; never raises an exception.

  Args:
    text: an assistant turn, without its stop token.
    format: one of `FORMATS`.
    names: the tools' names. A call of another name is returned as it is.
    truncated: whether the turn was cut off before its end.
  """
  calls = []
  for call in _READERS[format](_answer(text), names):
    if len(calls) == MAX_CALLS:
      calls.append(_malformed(f'a turn must have at most {MAX_CALLS} calls'))
      break
    calls.append(call)
  is_open = text.rfind(_OPEN) >= text.rfind(_CLOSE)
  if truncated and is_open and calls and calls[-1].error:
    calls[-1] = dataclasses.replace(calls[-1], error=_CUT)
  return calls


def _answer(text: str) -> str:
  """Returns the text after a thought; '' if the thought does not end.

  The prompt may have opened it. A turn that begins with a call has none; its
  arguments may have a `</think>`.
  """
  start = text.lstrip()
  if start.startswith((_OPEN, _PYTHON, '{')):
    return text
  _, end, answer = text.partition('</think>')
  if end:
    return answer
  return '' if start.startswith('<think>') else text


def _hermes(text: str, names: Collection[str]) -> Iterator[Call]:
  del names
  position = 0
  while tag := _TAG.search(text, position):
    position = tag.end()
    if tag[0] == _CLOSE:
      yield _malformed(f'a call must begin with {_quoted(_OPEN)}')
      continue
    read = _read(text, position)
    end = _skip(text, read.end)
    if read.error:
      yield _malformed(read.error)
    elif text.startswith(_CLOSE, end):
      yield _call(read.value, ('arguments',))
    else:
      yield _malformed(f'a call must end with {_quoted(_CLOSE)}')
    # The closing tag of a malformed call is not another error.
    after = _TAG.search(text, end)
    if after is None:
      return
    position = after.end() if after[0] == _CLOSE else after.start()


def _llama3(text: str, names: Collection[str]) -> Iterator[Call]:
  text = text.strip()
  tagged = text.startswith(_PYTHON)
  position = _skip(text, len(_PYTHON) if tagged else 0)
  if not tagged and not text.startswith('{', position):
    return
  read = _read(text, position)
  if read.error:
    if tagged or _LLAMA_START.match(text, position):
      yield _malformed(read.error)
    return
  if not tagged and not (
    'parameters' in read.value or _is_call(read.value, names)
  ):
    return  # an answer in JSON
  while not read.error:
    yield _call(read.value, ('parameters', 'arguments'))
    position = _skip(text, read.end)
    if position == len(text):
      return
    if text[position] != ';':
      yield _malformed('a call must be followed by nothing, or by ; and a call')
      return
    position = _skip(text, position + 1)
    if position == len(text):
      return
    read = _read(text, position)
  yield _malformed(read.error)


def _plain(text: str, names: Collection[str]) -> Iterator[Call]:
  tagged = _TAGGED.findall(text)
  if not tagged:
    yield from _scan(text, names)
  for part in tagged:
    # Not a list of all: a part may hold any number of calls.
    some = False
    for call in _scan(part, names):
      some = True
      yield call
    if not some:
      yield _malformed(f'a call must be one that can be read: {_HOW}')


def _scan(text: str, names: Collection[str]) -> Iterator[Call]:
  position = 0
  while match := _PLAIN_START.search(text, position):
    name, begin = match[1], match.end()
    read = _read(text, begin)
    position = max(read.end, begin + (name is None))
    if name is None:
      if not read.error and _is_call(read.value, names):
        yield _call(read.value, ('arguments', 'parameters'))
    elif isinstance(read.value, dict):
      yield _with_depth(name, read.value)
    elif text.startswith(')', begin) and name in names:
      yield Call(name, {})
    elif name in names:
      yield _malformed(f'a call must be one that can be read: {_HOW}', name)


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
  begin = _skip(text, begin)
  try:
    return _Json(*_DECODER.raw_decode(text, begin))
  except json.JSONDecodeError as error:
    is_open = error.msg.startswith('Unterminated')
    reason = f'{error.msg} at character {error.pos - begin + 1} of its JSON'
    return _Json(
      None,
      len(text) if is_open else error.pos,
      f'a call must be one that can be read: {reason}',
    )
  except RecursionError:
    return _Json(None, len(text), _too_deep())


def _is_call(value: Any, names: Collection[str]) -> bool:
  """Returns whether a JSON value is meant as a call."""
  if not isinstance(value, dict) or not isinstance(value.get('name'), str):
    return False
  return value['name'] in names or 'arguments' in value or 'parameters' in value


def _call(value: Any, keys: tuple[str, ...]) -> Call:
  """Returns the call of a JSON value.

  Args:
    value: an object with a name.
    keys: names of the arguments in it.
  """
  form = f'{{"name": NAME, "{keys[0]}": {{...}}}}'
  if not isinstance(value, dict):
    return _malformed(f'a call must be {form}: got {_kind(value)}')
  name = value.get('name')
  if not isinstance(name, str) or not name:
    return _malformed(f'a call must be {form}: got no name')
  key = next((key for key in keys if key in value), None)
  if key is None:
    other = next((x for x in ('arguments', 'parameters') if x in value), None)
    if other is None:
      return Call(name, {})
    return _malformed(f'a call must be {form}: got {_quoted(other)}', name)
  if not isinstance(value[key], dict):
    got = _kind(value[key])
    return _malformed(f'{_quoted(key)} must be an object: got {got}', name)
  return _with_depth(name, value[key])


def _with_depth(name: str, arguments: dict[str, Any]) -> Call:
  """Returns a call, malformed if its arguments are nested too deeply."""
  level: list[Any] = [arguments]
  for _ in range(MAX_DEPTH):
    level = [
      item
      for value in level
      if isinstance(value, dict | list)
      for item in (value.values() if isinstance(value, dict) else value)
    ]
    if not level:
      return Call(name, arguments)
  return _malformed(_too_deep(), name)


def _too_deep() -> str:
  return f'a call must be nested at most {MAX_DEPTH} levels deep'


def _malformed(error: str, name: str = '') -> Call:
  return Call(name, {}, error)


def _skip(text: str, position: int) -> int:
  """Returns the place of the next character that is no space."""
  match = _SPACE.match(text, position)
  assert match is not None
  return match.end()


def _kind(value: Any) -> str:
  names = {
    dict: 'an object',
    list: 'a list',
    str: 'a string',
    bool: 'a boolean',
  }
  if value is None:
    return 'null'
  return names.get(type(value), 'a number')


def _quoted(text: str) -> str:
  return f'{text!r:.80}'
