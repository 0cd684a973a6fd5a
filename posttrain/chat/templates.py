"""Chat templates: messages -> text, and the pieces of the text by message.

The built-in template, and Jinja templates of HuggingFace in jinja2's sandbox. A
Jinja template can read the variables of transformers (`messages`, `tools`,
`add_generation_prompt`, the tokenizer's special tokens) and those of
`config.tokenizer.template_variables`, but no clock, so that runs do not depend
on the date: `strftime_now` formats the variable `today`, such as 2025-01-31,
and is undefined without it. Many templates then have a default date.

`pieces` attributes a rendered text to messages:

1. The template renders the conversation again with a mark in place of a
   content: the text around the mark surrounds the content (`span`).
2. The text between two contents is split where the conversation up to the first
   one ends; if it does not end there, it belongs to the second.
"""

import copy
import datetime
import functools
import json
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from posttrain import types

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
# `config.tokenizer.chat_template='raw'`, for base models.
RAW = (
  "{{ bos_token }}{% for m in messages %}{{ m['content'] }}"
  "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)

# Contents by which a template is examined.
MARK = '\uf8ffanswer\uf8ff'
QUESTION = {'role': 'user', 'content': 'question'}


class BuiltIn:
  """The built-in template, `BUILT_IN`."""

  reads = fields = frozenset()

  def __init__(self, bos: str, eos: str):
    self._bos = bos
    self._form = BUILT_IN.format(
      role='%s', content='%s', end=eos.replace('%', '%%')
    )

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages without tool calls.

    Args:
      messages: the messages.
      prompt: whether to add the header of an assistant turn.
    """
    text = ''.join(self._form % (m['role'], m['content']) for m in messages)
    if prompt:
      text += BUILT_IN.partition('{content}')[0].format(role='assistant')
    return self._bos + text if text else text


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
    import jinja2.ext  # here: the built-in template does not need it
    import jinja2.meta
    import jinja2.nodes
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
      """`{% generation %}` marks trained text; ignored, `span` finds it."""

      tags = frozenset(['generation'])

      def parse(self, parser):
        next(parser.stream)
        return parser.parse_statements(
          ('name:endgeneration',), drop_needle=True
        )

    def raise_exception(message: str):
      raise jinja2.TemplateError(message)

    self._variables = dict(variables)
    if 'today' in variables:
      day = datetime.date.fromisoformat(variables['today'])
      self._variables['strftime_now'] = day.strftime
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[Generation, 'jinja2.ext.loopcontrols'],
    )
    # Its parameters are those of transformers.
    environment.filters['tojson'] = functools.partial(
      json.dumps, ensure_ascii=False
    )
    environment.globals['raise_exception'] = raise_exception
    try:
      parsed = environment.parse(source)
      self._template = environment.from_string(parsed)
    except (jinja2.TemplateError, RecursionError) as error:
      raise ValueError(
        f'config.tokenizer.chat_template must be a Jinja template: {error}'
      ) from error
    # Names of variables.
    self.reads = jinja2.meta.find_undeclared_variables(parsed)
    if 'strftime_now' in self.reads:
      self.reads.add('today')
    # Names of attributes and items, so all fields of messages that it reads.
    self.fields = {
      str(getattr(node, 'attr', None) or node.value)
      for node in parsed.find_all((jinja2.nodes.Getattr, jinja2.nodes.Const))
    }

  def with_variables(self, variables: Mapping[str, Any]) -> 'Jinja':
    """Returns the template with values of further variables."""
    template = copy.copy(self)
    template._variables = {**self._variables, **variables}
    return template

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages; raises ValueError if the template raises an error."""
    variables = {
      'tools': None,
      'documents': None,
      **self._variables,
      'messages': list(messages),
      'add_generation_prompt': prompt,
    }
    try:
      return self._template.render(variables)
    except Exception as error:  # a template may raise any error
      hint = (
        '; put the text of the system turn in front of the first user turn, or '
        'name the file of a template that has one: '
        'config.tokenizer.chat_template=FILE'
      )
      raise ValueError(
        'messages must be ones that config.tokenizer.chat_template renders: '
        f'got roles {[m["role"] for m in messages]!r:.200}; its error: '
        f'{error!s:.200}{hint * ("system" in f"{error}".lower())}'
      ) from error


class Described:
  """A template whose first message has a description before or after it."""

  def __init__(self, template: Jinja, description: str):
    self._template, self._description = template, description
    system = {'role': 'system', 'content': MARK}
    answer = {'role': 'assistant', 'content': 'answer'}
    one = rendered(template, system, QUESTION)
    two = rendered(template, system, QUESTION, answer, QUESTION)
    # Some templates show a system message before the last question only.
    self._has_system = one.find(MARK) == two.find(MARK) >= 0

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


Template = BuiltIn | Jinja | Described


def rendered(
  template: Template, *messages: Mapping[str, Any], prompt: bool = False
) -> str:
  """Renders messages; '' where the template refuses them."""
  try:
    return template.text(messages, prompt)
  except ValueError:
    return ''


class Piece(NamedTuple):
  """A piece of rendered text with its attribution."""

  text: str
  role: str
  is_content: bool = False  # False = template scaffold
  sampled: bool = False  # the policy would sample it
  message: int = -1  # its message's index; -1 = a generation prompt


def pieces(
  template: Template,
  messages: types.Messages,
  text: str,
  *,
  prompt: bool,
  start: int,
  skip: int,
  closed: bool,
) -> list[Piece]:
  """Splits the text that the messages from `start` on add to a conversation.

  Args:
    template: the template.
    messages: the whole conversation.
    text: its rendered text.
    prompt: whether the text ends in the header of an assistant turn.
    start: index of the first message to split.
    skip: characters of the text that have been split before.
    closed: whether these are the text of the messages before `start`.

  Returns:
    Pieces whose texts join to text[skip:].

  Raises:
    ValueError: a content is rendered not exactly once, or out of order; names
      its message.
  """
  result, position = [], skip
  if start:
    if not closed:
      place = skip, len(text)
      position = _end(template, messages, start - 1, text, prompt, place)
    role = messages[start - 1]['role']
    result.append(Piece(text[skip:position], role, message=start - 1))
  spans = [
    (index, *place)
    for index in range(start, len(messages))
    if (place := span(template, messages, index, text, prompt=prompt))
  ]
  starts = [*(begin for _, begin, _ in spans), len(text)]
  for (index, begin, end), limit in zip(spans, starts[1:], strict=True):
    if not position <= begin <= end <= limit:
      raise ValueError(
        'config.tokenizer.chat_template must show contents in their order: '
        f'got that of messages[{index}] at {begin} to {end} of {text!r:.200}'
      )
    role = messages[index]['role']
    after = _end(template, messages, index, text, prompt, (end, limit))
    result += [
      Piece(text[position:begin], role, message=index),
      Piece(text[begin:end], role, True, message=index),
      Piece(text[end:after], role, message=index),
    ]
    position = after
  last = 'assistant' if prompt or not messages else messages[-1]['role']
  return [*result, Piece(text[position:], last)]


def span(
  template: Template,
  messages: types.Messages,
  index: int,
  text: str,
  *,
  prompt: bool = False,
) -> tuple[int, int] | None:
  """Returns the range (begin, end) of a message's content within the text.

  If the template trims or cuts the content, the range of its rest; None for an
  empty content that is not rendered.

  Raises:
    ValueError: the content is rendered not exactly once.
  """
  content = messages[index]['content']
  texts = [text, *(message['content'] for message in messages)]
  mark = MARK
  while any(mark in x for x in texts):
    mark += '\uf8ff'

  def marked(content: str) -> str:
    changed = {**messages[index], 'content': content}
    return template.text(
      (*messages[:index], changed, *messages[index + 1 :]), prompt
    )

  replaced = marked(mark)
  count = replaced.count(mark)
  if not count and not content.strip():
    return None
  if count != 1:
    raise ValueError(
      'config.tokenizer.chat_template must show each content once: it shows '
      f'that of messages[{index}] ({messages[index]["role"]}) {count} times'
    )
  before, _, after = replaced.partition(mark)
  for variant in (content, content.strip()):
    if text == before + variant + after:
      return len(before), len(before) + len(variant)
  # Some templates (Qwen3) read how a content begins and ends, and render other
  # turns accordingly: both stay, with the mark in the middle.
  half = len(content) // 2
  head, tail = content[:half], content[half:]
  inserted = marked(head + mark + tail)
  middle = inserted.find(mark)
  if inserted == text[:middle] + mark + text[middle:]:
    for a, b in ((head, tail), (head.lstrip(), tail.rstrip())):
      if text.endswith(a, 0, middle) and text.startswith(b, middle):
        return middle - len(a), middle + len(b)
  begin = len(os.path.commonprefix([before, text]))
  rest = os.path.commonprefix([after[::-1], text[begin:][::-1]])
  return begin, len(text) - len(rest)


def _end(
  template: Template,
  messages: types.Messages,
  index: int,
  text: str,
  prompt: bool,
  place: tuple[int, int],
) -> int:
  """Returns where the conversation up to a message ends within the text.

  It is the begin of the `place` if that conversation is another text, or ends
  outside of the place.
  """
  low, high = place
  if low == high:
    return low
  if index == len(messages) - 1 and not prompt:
    return high if high == len(text) else low
  try:
    prefix = template.text(messages[: index + 1])
  except ValueError:  # the template refuses conversations that end here
    return low
  ends = low <= len(prefix) <= high and text.startswith(prefix)
  return len(prefix) if ends else low
