"""Whose is what of a rendered conversation: text pieces with their authors.

1. The template renders the conversation whole.
2. It renders it again with a mark in place of each content in turn: what
   stands around the mark stands around the content, also where a template
   trims the content, or shows only a part of it.
3. What stands between two contents is cut where the conversation up to the
   first of them ends; where that cannot be told, all of it is the second's.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from posttrain import types

_MARK = '\uf8ffcontent\uf8ff'  # private use: no template says this


class Rewritten(ValueError):
  """A template shows earlier turns otherwise once later ones follow."""


class Template(Protocol):
  """Turns messages into text."""

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages; `prompt`: with the header of an assistant turn."""


class Piece(NamedTuple):
  """Text, whose it is, and whether it is content or the template's."""

  text: str
  role: str
  is_content: bool = False
  sampled: bool = False  # the policy would say it
  message: int = -1  # its index; -1 = the header of a turn to come


def pieces(
  template: Template,
  messages: types.Messages,
  text: str,
  *,
  prompt: bool,
  start: int = 0,
  skip: int = 0,
) -> list[Piece]:
  """Cuts what the messages from `start` on add to a conversation.

  Args:
    template: renders it.
    messages: all of them.
    text: what the template makes of them.
    prompt: the text ends in the header of an assistant turn.
    start: the first message that is asked for.
    skip: characters of the text that are there already.

  Returns:
    Pieces that make up text[skip:].

  Raises:
    ValueError: a content is not shown, or twice; names its message.
  """
  found, at = [], skip
  if start:
    at = _end(template, messages, start - 1, text, skip, len(text))
    role = messages[start - 1]['role']
    found.append(Piece(text[skip:at], role, message=start - 1))
  spans = [
    span(template, messages, i, text, prompt=prompt)
    for i in range(start, len(messages))
  ]
  for i, (begin, end) in enumerate(spans, start):
    role = messages[i]['role']
    if begin is None:  # no content, and the template shows none
      continue
    following = (a for a, _ in spans[i + 1 - start :] if a is not None)
    limit = next(following, len(text))
    if not at <= begin <= end <= limit:
      raise ValueError(
        'config.tokenizer.chat_template must show contents in their order: '
        f'got that of messages[{i}] at {begin} to {end} of {text!r}'
      )
    found += [
      Piece(text[at:begin], role, message=i),
      Piece(text[begin:end], role, True, message=i),
    ]
    at = _end(template, messages, i, text, end, limit)
    found.append(Piece(text[end:at], role, message=i))
  last = 'assistant' if prompt or not messages else messages[-1]['role']
  return [*found, Piece(text[at:], last)]


def span(
  template: Template,
  messages: types.Messages,
  index: int,
  text: str,
  *,
  prompt: bool = False,
) -> tuple[int | None, int | None]:
  """Where in the text a message's content stands: (begin, end).

  Of a content that the template trims or cuts: what is left of it. (None,
  None) for an empty one that is not shown.

  Raises:
    ValueError: a content is not shown, or twice.
  """
  content = messages[index]['content']
  marked = _marked(template, messages, index, _MARK, prompt)
  shown = marked.count(_MARK)
  if not shown and not content.strip():
    return None, None
  if shown != 1:
    raise ValueError(
      'config.tokenizer.chat_template must show each content once: it shows '
      f'that of messages[{index}] ({messages[index]["role"]}) {shown} times'
    )
  before, _, after = marked.partition(_MARK)
  for kept in (content, content.strip()):
    if text == before + kept + after:
      return len(before), len(before) + len(kept)
  # Some look at how contents begin and end (Qwen3), and show other turns by it.
  half = len(content) // 2
  head, tail = content[:half], content[half:]
  marked = _marked(template, messages, index, head + _MARK + tail, prompt)
  at = marked.find(_MARK)
  for a, b in ((head, tail), (head.lstrip(), tail.rstrip())):
    if marked == text[:at] + _MARK + text[at:] and (
      text[:at].endswith(a) and text[at:].startswith(b)
    ):
      return at - len(a), at + len(b)
  begin = _common(before, text)
  return begin, len(text) - _common(after[::-1], text[begin:][::-1])


def _marked(template, messages, index: int, content: str, prompt: bool) -> str:
  """The text, with another content in place of one."""
  other = {**messages[index], 'content': content}
  messages = (*messages[:index], other, *messages[index + 1 :])
  return template.text(messages, prompt)


def _end(template, messages, index, text, low: int, high: int) -> int:
  """Where a message ends, with what the template sets behind its content."""
  try:
    upto = template.text(messages[: index + 1])
  except ValueError:  # it takes no conversation that ends here
    return low
  ends = text.startswith(upto) and low <= len(upto) <= high
  return len(upto) if ends else low


def _common(a: Sequence[str], b: Sequence[str]) -> int:
  """Length of the longest common beginning."""
  pairs = enumerate(zip(a, b, strict=False))
  return next((i for i, (x, y) in pairs if x != y), min(len(a), len(b)))
