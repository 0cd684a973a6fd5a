"""Attribution of a rendered conversation: text pieces by role and content.

1. The template renders the whole conversation.
2. `finder` finds each content in the text, also if a template trims the content
   or renders only a part of it.
3. The text between two contents is split where the conversation up to the
   first one ends; if that is unknown, it belongs to the second.

For 3. the template renders the conversation up to each message, in the first
part of a long conversation. In the rest, messages that follow the same roles
and the same scaffold end as those before; a sample of them is rendered too.
"""

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

from posttrain import types
from posttrain.chat import finder, spans
from posttrain.util import foreign

Template = spans.Template
Encode = Callable[[str], Sequence[int]]

_OPENING, _CLOSING = tuple('<[{'), tuple('>]}')


class Rewritten(ValueError):
  """A template that renders earlier turns differently after later ones."""


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
  closed: bool = False,
  limits: spans.Limits = spans.TRAINING,
  encode: Encode | None = None,
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
    limits: bounds of the work.
    encode: tokenizes scaffold. With it, ends that are known to give the same
      ids may stand for each other: attribution of scaffold is not exact.

  Returns:
    Pieces whose texts join to text[skip:].

  Raises:
    ValueError: a content is rendered not exactly once, or out of order; names
      its message. Or the template needs too many renderings.
  """
  work = spans.Work(messages, text, limits=limits)
  ends = _Ends(template, messages, text, prompt, work, encode)
  result, position = [], skip
  if start:
    if not closed:
      position += ends.rendered(start - 1, skip, len(text))
    role = messages[start - 1]['role']
    result.append(Piece(text[skip:position], role, message=start - 1))
  content_spans = finder.find(
    template, messages, text, prompt=prompt, start=start, work=work
  )
  gaps = _gaps(messages, text, position, content_spans, start)
  for gap, length in zip(gaps, ends.lengths(gaps), strict=True):
    role, end = messages[gap.index]['role'], gap.begin + length
    result += [
      Piece(text[position : gap.span.begin], role, message=gap.index),
      Piece(text[gap.span.begin : gap.begin], role, True, message=gap.index),
      Piece(text[gap.begin : end], role, message=gap.index),
    ]
    position = end
  last = 'assistant' if prompt or not messages else messages[-1]['role']
  return [*result, Piece(text[position:], last)]


class _Gap(NamedTuple):
  """A content and the text between it and the next one."""

  index: int  # of the message
  span: spans.Span  # of its content
  end: int  # where the next content begins

  @property
  def begin(self) -> int:
    return self.span.end


def _gaps(messages, text, position, content_spans, start: int) -> list[_Gap]:
  """Returns the contents that are rendered; checks their order."""
  shown = [
    (i, span)
    for i, span in enumerate(content_spans, start)
    if span.begin is not None  # else an empty content that is not rendered
  ]
  limits = [*(span.begin for _, span in shown), len(text)][1:]
  for (i, (begin, end, _)), limit in zip(shown, limits, strict=True):
    if not position <= begin <= end <= limit:
      raise ValueError(
        'config.tokenizer.chat_template must show contents in their order: '
        f'got that of messages[{i}] at {begin} to {end} of '
        f'{foreign.quote(text)}'
      )
    position = end
  return [_Gap(*item, limit) for item, limit in zip(shown, limits, strict=True)]


class _Ends:
  """Finds how much scaffold after a content belongs to its message."""

  def __init__(
    self,
    template,
    messages,
    text,
    prompt,
    work: spans.Work,
    encode: Encode | None,
  ):
    self._template, self._messages, self._text = template, messages, text
    self._prompt, self._work = prompt, work
    units, per_message = work.limits.exact
    self._exact = units + per_message * len(messages)
    self._same = None if encode is None else _Same(encode)

  def rendered(self, index: int, low: int, high: int) -> int:
    """Returns the length of the text from `low` to a message's end.

    It is 0 if the conversation up to the message is another text, or ends
    beyond `high`.
    """
    if low == high:
      return 0
    if index == len(self._messages) - 1 and not self._prompt:
      return len(self._text) - low if high == len(self._text) else 0
    self._work.add(index + 1)
    try:
      prefix = self._template.text(self._messages[: index + 1])
    except ValueError:  # the template refuses conversations that end here
      return 0
    ends = low <= len(prefix) <= high and self._text.startswith(prefix)
    return len(prefix) - low if ends else 0

  def lengths(self, gaps: list[_Gap]) -> list[int]:
    """Returns, for each gap, the length that belongs to its message."""
    lengths, inferred = self._by_signature(gaps)
    for i in inferred[:: max(len(inferred) // self._work.limits.checks, 1)]:
      gap = gaps[i]
      length = self.rendered(gap.index, gap.begin, gap.end)
      after = self._text[gap.begin : gap.end]
      if not self._equal(after, length, lengths[i]):
        return [self.rendered(g.index, g.begin, g.end) for g in gaps]
    return lengths

  def _equal(self, after: str, *lengths: int) -> bool:
    """Returns whether ends within a scaffold may stand for each other."""
    if len(set(lengths)) == 1:
      return True
    return self._same is not None and self._same(after, *lengths)

  def _by_signature(self, gaps: list[_Gap]) -> tuple[list[int], list[int]]:
    """Returns each gap's length, and the positions of inferred lengths.

    An inferred length is that of an earlier gap: one with the same signature,
    or one whose scaffold has the same ids wherever it is split.
    """
    known: dict[tuple, int] = {}
    seen: dict[tuple, set[int]] = {}  # lengths per (role, scaffold)
    lengths, inferred, begin = [], [], 0
    recent = collections.deque(maxlen=4)
    budget = self._work.units + self._exact
    for i, gap in enumerate(gaps):
      before = self._text[begin : gap.span.begin]
      after = self._text[gap.begin : gap.end]
      message = self._messages[gap.index]
      role, content = message['role'], message['content']
      following = gaps[i + 1].index if i + 1 < len(gaps) else -1
      signature = (
        role,
        gap.span.kind,
        content[:1] in _OPENING,  # templates look for tags there
        content[-1:] in _CLOSING,
        before,
        after,
        following >= 0 and self._messages[following]['role'],
        following - gap.index,
        tuple(recent),
      )
      length = known.get(signature)
      others = seen.setdefault((role, after), set())
      if length is None and self._same and others:
        if self._work.units >= budget and self._equal(after, *others):
          length = min(others)
      if length is None or self._work.units < budget:
        length = self.rendered(gap.index, gap.begin, gap.end)
        known[signature] = length
        others.add(length)
      else:
        inferred.append(i)
      lengths.append(length)
      recent.append((role, gap.span.kind, after, length))
      begin = gap.begin
    return lengths, inferred


class _Same:
  """Compares the ids of a scaffold that is split at different places."""

  def __init__(self, encode: Encode):
    self._encode = encode
    self._ids: dict[tuple[str, int], list[int]] = {}

  def __call__(self, text: str, *ends: int) -> bool:
    first, *rest = (self._split(text, end) for end in ends)
    return all(ids == first for ids in rest)

  def _split(self, text: str, end: int) -> list[int]:
    ids = self._ids.get((text, end))
    if ids is None:
      ids = [*self._encode(text[:end]), *self._encode(text[end:])]
      self._ids[text, end] = ids
    return ids
