"""The place of one content within a rendered conversation.

The template renders the conversation again with a mark in place of the content:
the text around the mark surrounds the content.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from typing import NamedTuple, Protocol

from posttrain import types
from posttrain.chat import meter
from posttrain.util import foreign

MARK = '\uf8ff'  # a private-use character


class Template(Protocol):
  """A chat template: messages to text."""

  def text(self, messages: types.Messages, prompt: bool = False) -> str:
    """Renders messages; with `prompt`, adds the header of an assistant turn."""


class Span(NamedTuple):
  """The range of a content within the text; None = not rendered."""

  begin: int | None
  end: int | None
  kind: str = ''  # how it is found: 'whole', 'middle', 'cut', 'alone'


class Limits(NamedTuple):
  """Bounds of the work for one conversation, in units of `Work`."""

  total: tuple[int, int]  # a constant, and per message
  exact: tuple[int, int]  # up to which each end is found by a rendering
  checks: int  # inferred ends that are verified by a rendering


TRAINING = Limits((100_000, 32), (8000, 2), 8)
SERVING = Limits((4000, 4), (2000, 0), 4)  # exact up to 60 messages


@dataclasses.dataclass
class Work:
  """Renderings of one conversation beyond a fixed number, counted.

  A unit is about the time of rendering one short message.
  """

  messages: types.Messages
  text: str
  units: int = 0
  limits: Limits = TRAINING

  def add(self, count: int) -> None:
    """Counts a rendering of the first `count` messages.

    Raises:
      ValueError: they are too many.
    """
    self.units += self._units(count)
    self.check(0)
    try:
      meter.check_chat()
    except meter.Limit as error:
      raise ValueError(
        'config.tokenizer.chat_template must render within the limits of '
        f'templates: {foreign.text(error)}'
      ) from error

  def _units(self, count: int) -> int:
    whole = max(len(self.messages), 1)
    return 1 + (count + len(self.text) // 10_000 * count // whole)

  def check(self, renderings: int) -> None:
    """Checks that so many renderings of the conversation may follow.

    Raises:
      ValueError: they are too many.
    """
    whole = max(len(self.messages), 1)
    constant, each = self.limits.total
    units = self.units + renderings * self._units(whole)
    if units > constant + each * (whole + len(self.text) // 10_000):
      raise ValueError(
        'messages must be fewer for config.tokenizer.chat_template, which '
        f'renders turns by what is in other turns: got {whole} messages, each '
        'of which needs a rendering of the whole conversation'
      )


def one(
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
  mark = f'{MARK}{nonce(messages, text)}content{MARK}'
  marked = with_contents(template, messages, {index: mark}, prompt)
  count = marked.count(mark)
  if not count and not content.strip():
    return None, None
  if count != 1:
    raise ValueError(
      'config.tokenizer.chat_template must show each content once: it shows '
      f'that of messages[{index}] ({messages[index]["role"]}) {count} times'
    )
  before, _, after = marked.partition(mark)
  for variant in (content, content.strip()):
    if text == before + variant + after:
      return len(before), len(before) + len(variant)
  # Some templates (Qwen3) read how a content begins and ends, and render other
  # turns accordingly: both stay, with the mark in the middle.
  head, tail = halves(content)
  marked = with_contents(
    template, messages, {index: head + mark + tail}, prompt
  )
  middle = marked.find(mark)
  if marked == text[:middle] + mark + text[middle:]:
    span = around(text, middle, head, tail)
    if span:
      return span
  begin = _common(before, text)
  return begin, len(text) - _common(after[::-1], text[begin:][::-1])


def nonce(messages: types.Messages, text: str) -> str:
  """Returns a text that makes marks differ from all that is in the messages.

  A text with the character of the marks would have to have its own hash in it.
  """
  contents = [message['content'] for message in messages]
  if MARK not in text and not any(MARK in content for content in contents):
    return ''
  digest = hashlib.sha256(text.encode('utf-8', 'surrogatepass'))
  for content in contents:
    digest.update(content.encode('utf-8', 'surrogatepass'))
  return digest.hexdigest()


def with_contents(
  template, messages, contents: Mapping[int, str], prompt: bool
) -> str:
  """Renders the messages with other contents in place of some."""
  changed = list(messages)
  for index, content in contents.items():
    changed[index] = {**messages[index], 'content': content}
  return template.text(tuple(changed), prompt)


def halves(content: str) -> tuple[str, str]:
  half = len(content) // 2
  return content[:half], content[half:]


def around(text: str, middle: int, head: str, tail: str):
  """Returns the range of head + tail around a place, trimmed or not."""
  for a, b in ((head, tail), (head.lstrip(), tail.rstrip())):
    if text.endswith(a, 0, middle) and text.startswith(b, middle):
      return middle - len(a), middle + len(b)
  return None


def _common(a: str, b: str) -> int:
  """Returns the length of the longest common prefix."""
  low, high = 0, min(len(a), len(b))
  if a[:high] == b[:high]:
    return high
  while high - low > 1:  # equal up to low, different before high
    middle = (low + high) // 2
    if a[low:middle] == b[low:middle]:
      low = middle
    else:
      high = middle
  return low
