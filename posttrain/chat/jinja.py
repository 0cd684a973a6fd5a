"""HuggingFace-style Jinja chat templates, cut into text pieces per turn.

1. `messages[:k]` and `messages[:k + 1]` are rendered; the first text must be
   a prefix of the second, and the rest is what turn k adds. A template that
   rewrites earlier turns (say, drops their thoughts) breaks this and is
   refused: training on such a history would not be what was sampled.
2. Turn k is rendered again with a mark as its content, which tells template
   text from content even where one repeats the other.
3. The text under `add_generation_prompt` is the header of an assistant turn.
"""

import dataclasses
import json

from posttrain import types

_MARK = '\uf8ffcontent\uf8ff'  # private use: no template says this


@dataclasses.dataclass(frozen=True)
class Turn:
  """Text of one message, in the order in which it is laid out."""

  header: str  # template text; of an assistant: its generation prompt
  content: str  # what the message says
  end: str  # template text that closes it, up to and with eos
  lead: str = ''  # template text between an assistant's header and content
  tail: str = ''  # template text behind eos


class Jinja:
  """A chat template, in jinja2's sandbox."""

  def __init__(self, source: str, bos: str, eos: str):
    """Args: source: the template; bos, eos: the tokenizer's, as text."""
    import jinja2.sandbox  # here, because the built-in template does without

    self._error = jinja2.TemplateError
    self._bos, self._eos = bos, eos
    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True,
        extensions=['jinja2.ext.loopcontrols'],
    )
    sandbox.filters['tojson'] = _tojson
    sandbox.globals['raise_exception'] = self._raise
    try:
      self._template = sandbox.from_string(source)
    except self._error as error:
      raise ValueError(
          f'config.tokenizer.chat_template must be a Jinja template: {error}'
      ) from error

  def _raise(self, message: str):
    raise self._error(message)

  def _text(self, messages: types.Messages, prompt: bool = False) -> str:
    try:
      return self._template.render(
          messages=list(messages), add_generation_prompt=prompt, tools=None,
          bos_token=self._bos, eos_token=self._eos,
      )
    except self._error as error:
      raise ValueError(
          'messages must be ones that config.tokenizer.chat_template renders: '
          f'got roles {[m["role"] for m in messages]}; it says: {error}'
      ) from error

  def _before(self, messages: types.Messages) -> str:
    return self._text(messages) if messages else ''

  def prompt(self, messages: types.Messages) -> str:
    """Returns the header of an assistant turn that follows `messages`."""
    return _rest(
        self._text(messages, prompt=True), self._before(messages),
        'append its generation prompt',
    )

  def turn(self, messages: types.Messages, index: int) -> Turn:
    """Returns what `messages[index]` adds to those before it.

    Raises:
      ValueError: the template rewrites earlier turns or contents, gives an
        assistant another header than its generation prompt, or closes its
        turn without eos.
    """
    before, message = messages[:index], messages[index]
    keep = f'keep earlier turns as they were (messages[{index}] changes them)'
    start = self._before(before)
    added = _rest(self._text((*before, message)), start, keep)
    marked = _rest(
        self._text((*before, {**message, 'content': _MARK})), start, keep
    )
    header, _, after = marked.partition(_MARK)
    content = next(
        (text for text in (message['content'], message['content'].strip())
         if added == header + text + after), None,
    )
    if content is None or _MARK in after:
      raise ValueError(
          'config.tokenizer.chat_template must show each content once and '
          f'unchanged: got {added!r} for messages[{index}]'
      )
    if message['role'] != 'assistant':
      return Turn(header=header, content=content, end=after)
    prompt = self.prompt(before)
    end, eos, tail = after.partition(self._eos)
    if not eos:
      raise ValueError(
          'config.tokenizer.chat_template must close an assistant turn with '
          f'config.tokenizer.eos: got {after!r}, expected {self._eos!r} in it'
      )
    lead = _rest(header, prompt, 'open an assistant turn as it prompts for one')
    return Turn(prompt, content, end + eos, lead, tail)


def _rest(text: str, prefix: str, must: str) -> str:
  if not text.startswith(prefix):
    raise ValueError(
        f'config.tokenizer.chat_template must {must}: got {text!r}, '
        f'expected it to begin with {prefix!r}; use a template that only '
        'appends'
    )
  return text[len(prefix):]


def _tojson(value, **options) -> str:
  return json.dumps(value, ensure_ascii=False, **options)
