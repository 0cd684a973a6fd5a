"""Attribution of a rendered conversation: text pieces by role and content.

1. The template renders the whole conversation.
2. It renders the conversation again with a mark in place of each content in
   turn: the text around the mark surrounds the content, also if a template
   trims the content or renders only a part of it.
3. The text between two contents is split where the conversation up to the
   first one ends; if that is unknown, it belongs to the second.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from posttrain import types

_MARK = '\uf8ffcontent\uf8ff'  # private-use characters: in no template


class Rewritten(ValueError):
  """A template that renders earlier turns differently after later ones."""


class Template(Protocol):
  """A chat template: messages to text."""

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages; with `prompt`, adds the header of an assistant turn."""


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
  start: int = 0,
  skip: int = 0,
) -> list[Piece]:
  """Splits the text that the messages from `start` on add to a conversation.

  Args:
    template: the template.
    messages: the whole conversation.
    text: its rendered text.
    prompt: whether the text ends in the header of an assistant turn.
    start: index of the first message to split.
    skip: characters of the text that have been split before.

  Returns:
    Pieces whose texts join to text[skip:].

  Raises:
    ValueError: a content is rendered not exactly once, or out of order; names
      its message.
  """
  result, position = [], skip
  if start:
    position = _end(template, messages, start - 1, text, skip, len(text))
    role = messages[start - 1]['role']
    result.append(Piece(text[skip:position], role, message=start - 1))
  spans = [
    span(template, messages, i, text, prompt=prompt)
    for i in range(start, len(messages))
  ]
  for i, (begin, end) in enumerate(spans, start):
    role = messages[i]['role']
    if begin is None:  # an empty content that is not rendered
      continue
    following = (a for a, _ in spans[i + 1 - start :] if a is not None)
    limit = next(following, len(text))
    if not position <= begin <= end <= limit:
      raise ValueError(
        'config.tokenizer.chat_template must show contents in their order: '
        f'got that of messages[{i}] at {begin} to {end} of {text!r}'
      )
    result += [
      Piece(text[position:begin], role, message=i),
      Piece(text[begin:end], role, True, message=i),
    ]
    position = _end(template, messages, i, text, end, limit)
    result.append(Piece(text[end:position], role, message=i))
  last = 'assistant' if prompt or not messages else messages[-1]['role']
  return [*result, Piece(text[position:], last)]


def span(
  template: Template,
  messages: types.Messages,
  index: int,
  text: str,
  *,
  prompt: bool = False,
) -> tuple[int | None, int | None]:
  """Returns the range (begin, end) of a message's content within the text.

  If the template trims or cuts the content, the range of its rest; (None,
  None) for an empty content that is not rendered.

  Raises:
    ValueError: the content is rendered not exactly once.
  """
  content = messages[index]['content']
  marked = _marked(template, messages, index, _MARK, prompt)
  count = marked.count(_MARK)
  if not count and not content.strip():
    return None, None
  if count != 1:
    raise ValueError(
      'config.tokenizer.chat_template must show each content once: it shows '
      f'that of messages[{index}] ({messages[index]["role"]}) {count} times'
    )
  before, _, after = marked.partition(_MARK)
  for variant in (content, content.strip()):
    if text == before + variant + after:
      return len(before), len(before) + len(variant)
  # Some templates (Qwen3) read how a content begins and ends, and render other
  # turns accordingly: both stay, with the mark in the middle.
  half = len(content) // 2
  head, tail = content[:half], content[half:]
  marked = _marked(template, messages, index, head + _MARK + tail, prompt)
  middle = marked.find(_MARK)
  for a, b in ((head, tail), (head.lstrip(), tail.rstrip())):
    if marked == text[:middle] + _MARK + text[middle:] and (
      text[:middle].endswith(a) and text[middle:].startswith(b)
    ):
      return middle - len(a), middle + len(b)
  begin = _common(before, text)
  return begin, len(text) - _common(after[::-1], text[begin:][::-1])


def _marked(template, messages, index: int, content: str, prompt: bool) -> str:
  """Renders the messages with another content in place of one."""
  other = {**messages[index], 'content': content}
  messages = (*messages[:index], other, *messages[index + 1 :])
  return template.text(messages, prompt)


def _end(template, messages, index, text, low: int, high: int) -> int:
  """Returns where a message ends, including the scaffold after its content."""
  try:
    prefix = template.text(messages[: index + 1])
  except ValueError:  # the template refuses conversations that end here
    return low
  ends = text.startswith(prefix) and low <= len(prefix) <= high
  return len(prefix) if ends else low


def _common(a: Sequence[str], b: Sequence[str]) -> int:
  """Returns the length of the longest common prefix."""
  pairs = enumerate(zip(a, b, strict=False))
  return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
