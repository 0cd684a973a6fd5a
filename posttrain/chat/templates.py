"""Chat templates: messages -> text; the built-in one and HuggingFace's Jinja.

Jinja runs in a sandbox. A template can read the variables of transformers
(`messages`, `tools`, `add_generation_prompt`, the tokenizer's special tokens)
and those of `config.tokenizer.template_variables`, but no clock, so that runs
do not depend on the date: `strftime_now` formats the variable `today`, such as
2025-01-31, and is undefined without it. Many templates then have a default
date.
"""

import copy
import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain import types
from posttrain.chat import layout, meter
from posttrain.util import foreign

# For every role. {end} is the tokenizer's eos; the markers are single ids if
# the tokenizer has them as special tokens (the byte tokenizer does), otherwise
# ordinary text. A conversation begins with the tokenizer's bos, if it has one.
BUILT_IN = '<|{role}|>{content}{end}'
# The same template in Jinja, for other tools.
BUILT_IN_JINJA = (
  "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>"
  "{{ m['content'] }}{{ eos_token }}{% endfor %}"
  '{% if add_generation_prompt %}<|assistant|>{% endif %}'
)

MAX_SOURCE = 256 * 1024  # characters of a Jinja template


class BuiltIn:
  """The built-in template, `BUILT_IN`.

  A conversation's text is that of its messages, joined: what follows is
  rendered without the messages before, and contents need not be looked for.
  """

  def __init__(self, bos: str, eos: str):
    self._bos, self._eos = bos, eos

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages; with `prompt`, adds the header of an assistant turn.

    Raises:
      ValueError: a message has tool calls.
    """
    text = ''.join(self._turns(messages, 0))
    if prompt:
      text += _header('assistant')
    return self._bos + text if text else text

  def extended(
    self,
    text: str,
    messages: types.Messages,
    start: int,
    *,
    opened: bool,
    prompt: bool = False,
  ) -> str:
    """Returns the text of messages, given that of those before `start`.

    Args:
      text: the text of messages[:start].
      messages: the whole conversation.
      start: index of the first message that the text has not.
      opened: whether the text ends in the header of an assistant turn.
      prompt: whether to add one.

    Raises:
      ValueError: as `text`.
    """
    turns = self._turns(messages[start:], start)
    if opened and messages[start:] and messages[start]['role'] == 'assistant':
      turns[0] = turns[0].removeprefix(_header('assistant'))
    elif opened or not text:  # not a continuation
      return self.text(messages, prompt)
    return text + ''.join(turns) + (_header('assistant') if prompt else '')

  def pieces(
    self,
    messages: types.Messages,
    text: str,
    *,
    prompt: bool,
    start: int,
    skip: int,
  ) -> list[layout.Piece]:
    """Splits a text; gives what `layout.pieces` gives."""
    lengths = [len(turn) for turn in self._turns(messages[start:], start)]
    rest = len(_header('assistant')) if prompt else 0
    end = len(text) - sum(lengths) - rest  # of the message before
    position, pieces = skip, []
    if start:
      position = max(skip, end)
      role = messages[start - 1]['role']
      pieces.append(layout.Piece(text[skip:position], role, message=start - 1))
    for i, length in enumerate(lengths, start):
      role, end = messages[i]['role'], end + length
      close = end - len(self._eos)
      begin = close - len(messages[i]['content'])
      pieces += [
        layout.Piece(text[position:begin], role, message=i),
        layout.Piece(text[begin:close], role, True, message=i),
        layout.Piece(text[close:end], role, message=i),
      ]
      position = end
    last = 'assistant' if prompt or not messages else messages[-1]['role']
    return [*pieces, layout.Piece(text[position:], last)]

  def last_span(self, messages: types.Messages, text: str) -> tuple[int, int]:
    """Returns the range of the last message's content within its text."""
    end = len(text) - len(self._eos)
    return end - len(messages[-1]['content']), end

  def _turns(self, messages: types.Messages, start: int) -> list[str]:
    for index, message in enumerate(messages, start):
      if message.get('tool_calls'):
        raise ValueError(
          f'messages[{index}] must be plain text under the built-in '
          'template: got tool_calls; write the call into content, or set '
          'config.tokenizer.chat_template'
        )
    return [
      BUILT_IN.format(role=m['role'], content=m['content'], end=self._eos)
      for m in messages
    ]


def _header(role: str) -> str:
  return BUILT_IN.partition('{content}')[0].format(role=role)


class Jinja:
  """A chat template, in jinja2's sandbox."""

  def __init__(self, source: str, variables: Mapping[str, Any]):
    """Compiles a template.

    Args:
      source: the template's source.
      variables: variables to render with, such as bos_token.

    Raises:
      ValueError: the source is no Jinja template.
    """
    import jinja2.meta  # here: the built-in template does not need it

    from posttrain.chat import formats, sandbox

    self._variables = dict(variables)
    if 'today' in variables:
      day = datetime.date.fromisoformat(variables['today'])
      self._variables['strftime_now'] = lambda text: day.strftime(
        formats.day_format(text)
      )
    if len(source) > MAX_SOURCE:
      raise ValueError(
        'config.tokenizer.chat_template must be a Jinja template of at most '
        f'{MAX_SOURCE} characters: got {len(source)}'
      )
    environment = sandbox.Environment({'tojson': _tojson})
    environment.globals['raise_exception'] = _raise
    try:
      with meter.metered({}):
        parsed = environment.parse(source)
        self._template = environment.from_string(parsed)
        meta = jinja2.meta.find_undeclared_variables(parsed)
    except RecursionError as error:
      raise ValueError(
        'config.tokenizer.chat_template must be a Jinja template: its '
        'expressions are nested too deeply'
      ) from error
    except Exception as error:  # also of the compiler of its code
      raise ValueError(
        'config.tokenizer.chat_template must be a Jinja template: '
        f'{foreign.text(error)}'
      ) from error
    self.reads = frozenset(meta)  # names of variables

  def with_tools(self, tools: Sequence[Mapping[str, Any]]) -> 'Jinja':
    """Returns the template with a value of its variable `tools`."""
    template = copy.copy(self)
    template._variables = {**self._variables, 'tools': tools}
    return template

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages; with `prompt`, adds the header of an assistant turn.

    Raises:
      ValueError: the template raises an error.
    """
    variables = {
      'tools': None,
      'documents': None,
      **self._variables,
      'messages': list(messages),
      'add_generation_prompt': prompt,
    }
    try:
      with meter.metered(variables):
        return self._template.render(variables)
    except meter.Limit as error:
      raise ValueError(
        'config.tokenizer.chat_template must render within the limits of '
        f'templates: {foreign.text(error)}'
      ) from error
    except MemoryError:
      raise
    except Exception as error:  # a template may raise any error
      hint = ''
      if 'strftime_now' in str(error):
        hint = (
          '; it reads the date, which config.tokenizer.template_variables'
          '=\'{"today": "2025-01-31"}\' sets'
        )
      roles = foreign.quote([m['role'] for m in messages])
      raise ValueError(
        'messages must be ones that config.tokenizer.chat_template renders: '
        f'got roles {roles}; its error: {foreign.text(error)}{hint}'
      ) from error


def _raise(message: str):
  import jinja2

  raise jinja2.TemplateError(message)


def _tojson(
  x, ensure_ascii=False, indent=None, separators=None, sort_keys=False
) -> str:
  """Returns a value's JSON; the parameters are those of transformers."""
  return json.dumps(
    x,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )
