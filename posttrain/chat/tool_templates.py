"""Tools in chat templates: their descriptions, and the format of calls.

1. A template that reads `tools` gets them and renders them itself.
   For others, and in the format `plain`, a description is put into the first
   message: after the text of a system message, in a system message of its own,
   or before the user's text if the template renders no system message.
2. The format of calls, if it is 'auto', is that in which the template renders
   a call of an assistant turn.
3. Results of calls are messages of role 'tool'; of role 'user' if the template
   does not render that role.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from posttrain import types
from posttrain.chat import spans, templates, tool_calls, tools
from posttrain.util import foreign

_ANSWER = f'{spans.MARK}answer{spans.MARK}'
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


class Described:
  """A template whose first message has a description before or after it."""

  def __init__(self, template: spans.Template, description: str):
    self._template, self._description = template, description
    system = {'role': 'system', 'content': _ANSWER}
    answer = {'role': 'assistant', 'content': 'answer'}
    one = _rendered(template, system, _QUESTION)
    two = _rendered(template, system, _QUESTION, answer, _QUESTION)
    # Some templates show a system message before the last question only.
    self._has_system = one.find(_ANSWER) == two.find(_ANSWER) >= 0

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


def make(
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
      f'the format of tool calls must be one of {formats}: got '
      f'{foreign.quote(format, 80)}'
    )
  schemas = tools.plain(described.schemas)
  built_in = isinstance(template, templates.BuiltIn)
  native = not built_in and 'tools' in template.reads and format != 'plain'
  if format == 'auto':
    format = _format(template, stops) if native else 'plain'
  if native:
    return template.with_tools(schemas), Style(format, _role(template))
  description = tools.describe(schemas, format)
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
  result = {'role': 'tool', 'name': 'probe', 'content': _ANSWER}
  text = _rendered(template, _QUESTION, answer, result)
  return 'tool' if text.count(_ANSWER) == 1 else 'user'


def _rendered(
  template: spans.Template, *messages: Mapping[str, Any], prompt: bool = False
) -> str:
  """Renders messages; '' where the template refuses them."""
  try:
    return template.text(messages, prompt)
  except ValueError:
    return ''
