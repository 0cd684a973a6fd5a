"""Chat templates: messages -> text; the built-in one and HuggingFace's Jinja.

Jinja runs in a sandbox. A template can read the variables of transformers
(`messages`, `tools`, `add_generation_prompt`, the tokenizer's special tokens)
and those of `config.tokenizer.template_variables`, but no clock, so that runs
do not depend on the date: `strftime_now` formats the variable `today`, such as
2025-01-31, and is undefined without it. Many templates then have a default
date.
"""

import datetime
import json
from collections.abc import Mapping
from typing import Any

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


class BuiltIn:
  """The built-in template, `BUILT_IN`."""

  def __init__(self, bos: str, eos: str):
    self._bos, self._eos = bos, eos

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages; with `prompt`, adds the header of an assistant turn.

    Raises:
      ValueError: a message has tool calls.
    """
    text = ''
    for index, message in enumerate(messages):
      if message.get('tool_calls'):
        raise ValueError(
          f'messages[{index}] must be plain text under the built-in '
          'template: got tool_calls; write the call into content, or set '
          'config.tokenizer.chat_template'
        )
      text += BUILT_IN.format(
        role=message['role'], content=message['content'], end=self._eos
      )
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
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
      """`{% generation %}` marks trained text; ignored, `layout` finds it."""

      tags = frozenset(['generation'])

      def parse(self, parser):
        next(parser.stream)
        end = ('name:endgeneration',)
        return parser.parse_statements(end, drop_needle=True)

    self._error = jinja2.TemplateError
    self._variables = dict(variables)
    if 'today' in variables:
      day = datetime.date.fromisoformat(variables['today'])
      self._variables['strftime_now'] = day.strftime
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
      trim_blocks=True,
      lstrip_blocks=True,
      extensions=[Generation, 'jinja2.ext.loopcontrols'],
    )
    sandbox.filters['tojson'] = _tojson
    sandbox.globals['raise_exception'] = self._raise
    try:
      self._template = sandbox.from_string(source)
    except self._error as error:
      raise ValueError(
        f'config.tokenizer.chat_template must be a Jinja template: {error}'
      ) from error

    meta = jinja2.meta.find_undeclared_variables(sandbox.parse(source))
    self.reads = frozenset(meta)  # names of variables

  def _raise(self, message: str):
    raise self._error(message)

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages; with `prompt`, adds the header of an assistant turn.

    Raises:
      ValueError: the template raises an error.
    """
    try:
      return self._template.render(
        messages=list(messages),
        add_generation_prompt=prompt,
        **{'tools': None, 'documents': None, **self._variables},
      )
    except Exception as error:  # a template may raise any error
      hint = ''
      if 'strftime_now' in str(error):
        hint = (
          '; it reads the date, which config.tokenizer.template_variables'
          '=\'{"today": "2025-01-31"}\' sets'
        )
      raise ValueError(
        'messages must be ones that config.tokenizer.chat_template renders: '
        f'got roles {[m["role"] for m in messages]}; its error: {error}{hint}'
      ) from error


def _tojson(value, **options) -> str:
  return json.dumps(value, ensure_ascii=False, **options)
