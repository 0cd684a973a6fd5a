"""Places of all contents within a rendered conversation, by few renderings.

`spans.one` is the definition of a place; it renders the conversation for each
content. `find` gives the same places in a few renderings:

1. with a mark in place of every content: if the text is what stands between the
   marks, with the contents in it, the places are known;
2. otherwise with a mark within every content, at its end or in its middle: if
   the text is the rendering without these marks, their places in it are known,
   and each content is compared with what surrounds it in 1. on its own;
3. contents that differ from themselves in 1. (Qwen3 reads thoughts in them) get
   a second mark in their middle, as `spans.one` marks them;
4. each one that is left is rendered on its own, under a limit.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from posttrain import types
from posttrain.chat import spans


def find(
  template: spans.Template,
  messages: types.Messages,
  text: str,
  *,
  prompt: bool,
  start: int,
  work: spans.Work,
) -> list[spans.Span]:
  """Returns the places of the contents of the messages from `start` on.

  Args:
    template: the template.
    messages: the whole conversation.
    text: its rendered text.
    prompt: whether the text ends in the header of an assistant turn.
    start: index of the first message.
    work: counts renderings of single contents.

  Raises:
    ValueError: see `spans.one` and `spans.Work`.
  """
  indices = range(start, len(messages))
  spans_by_index: dict[int, spans.Span] = {}
  if len(indices) > 1:  # else a single rendering costs as much
    spans_by_index = _Finder(template, messages, text, prompt, indices).find()
  work.check(len(indices) - len(spans_by_index))
  for index in indices:
    if index not in spans_by_index:
      work.add(len(messages))
      place = spans.one(template, messages, index, text, prompt=prompt)
      spans_by_index[index] = spans.Span(*place, 'alone')
  return [spans_by_index[index] for index in indices]


class _Marked(NamedTuple):
  """A rendering with marks: texts[0], mark 0, texts[1], ..., texts[-1]."""

  texts: list[str]
  marks: list[tuple[int, bool]]  # index of the message, whether in its middle

  def places(self) -> list[int]:
    """Returns where the marks are in the text without them."""
    ends, end = [], 0
    for text in self.texts[:-1]:
      end += len(text)
      ends.append(end)
    return ends


class _Finder:
  """Places of many contents by few renderings."""

  def __init__(self, template, messages, text, prompt, indices: Sequence[int]):
    self._template, self._messages = template, messages
    self._text, self._prompt = text, prompt
    self._indices = indices
    self._contents = {i: messages[i]['content'] for i in indices}
    nonce = spans.nonce(messages, text)
    self._mark = f'{spans.MARK}{nonce}%s%d{spans.MARK}'
    self._split = re.compile(
      f'{spans.MARK}{nonce}(content|middle)([0-9]+){spans.MARK}'
    )

  def find(self) -> dict[int, spans.Span]:
    """Returns the known places, by the message's index."""
    replaced = self._render({i: self._name(i) for i in self._indices})
    unseen = set(self._indices) - {i for i, _ in replaced.marks}
    if len(replaced.marks) + len(unseen) != len(self._indices):
      return {}  # a content is rendered twice
    spans_by_index = {
      i: spans.Span(None, None) for i in unseen if not self._contents[i].strip()
    }
    if len(spans_by_index) != len(unseen):
      return spans_by_index
    whole = self._whole(replaced)
    if whole is not None:
      return {**spans_by_index, **whole}
    for cuts in self._cuts(i for i, _ in replaced.marks):
      inserted = self._render({i: self._cut(i, cut) for i, cut in cuts.items()})
      order = [i for i, _ in inserted.marks]
      shown = [i for i, _ in replaced.marks if i in cuts]
      if order == shown and ''.join(inserted.texts) == self._text:
        places = dict(zip(order, inserted.places(), strict=True))
        return {**spans_by_index, **self._each(replaced, cuts, places)}
    return spans_by_index

  def _whole(self, replaced: _Marked) -> dict[int, spans.Span] | None:
    """Returns all places, if the text is that around the marks."""
    spans_by_index, position = {}, 0
    texts, last = replaced.texts, len(replaced.texts) - 2
    if not self._text.startswith(texts[0]):
      return None
    for n, (index, _) in enumerate(replaced.marks):
      begin = position + len(texts[n])
      ends = self._ends(index, begin, texts[n + 1], n == last)
      if len(ends) != 1:
        return None
      (position,) = ends
      spans_by_index[index] = spans.Span(begin, position, 'whole')
    return spans_by_index

  def _ends(self, index: int, begin: int, after: str, last: bool) -> set[int]:
    """Returns where a content may end that begins there."""
    content, ends = self._contents[index], set()
    for variant in (content, content.strip()):
      end = begin + len(variant)
      if self._text.startswith(variant, begin) and self._follows(
        after, end, last
      ):
        ends.add(end)
    return ends

  def _follows(self, after: str, end: int, last: bool) -> bool:
    if last and end + len(after) != len(self._text):
      return False
    return self._text.startswith(after, end)

  def _cuts(self, indices):
    """Yields where to insert marks: the position in each content."""
    shown = [i for i in indices if self._contents[i].strip()]
    ends = {i: len(self._contents[i].rstrip()) for i in shown}
    middles = {}
    for i, end in ends.items():
      lead = len(self._contents[i]) - len(self._contents[i].lstrip())
      middles[i] = min(max(len(self._contents[i]) // 2, lead), end)
    role = {i: self._messages[i]['role'] for i in shown}
    yield ends
    yield middles
    yield {i: ends[i] if role[i] == 'assistant' else middles[i] for i in shown}

  def _each(
    self, replaced: _Marked, cuts: Mapping[int, int], places: Mapping[int, int]
  ) -> dict[int, spans.Span]:
    """Returns the places that agree with the surroundings of their content.

    Args:
      replaced: the rendering with marks in place of contents.
      cuts: where in its content each message has a mark.
      places: where in the text this is.
    """
    spans_by_index: dict[int, spans.Span] = {}
    others: list[int] = []
    last = len(replaced.marks) - 1
    for n, (index, _) in enumerate(replaced.marks):
      if index not in places:  # an empty content
        continue
      before, after = replaced.texts[n : n + 2]
      ranges = self._ranges(index, cuts[index], places[index])
      ranges = {
        (begin, end)
        for begin, end in ranges
        if begin >= len(before)
        and self._text.startswith(before, begin - len(before))
        and self._follows(after, end, n == last)
      }
      if len(ranges) == 1:
        spans_by_index[index] = spans.Span(*ranges.pop(), 'whole')
      elif not ranges:
        others.append(index)
    if others:
      spans_by_index |= self._middles(others, cuts, places)
    return self._rest(replaced, cuts, places, spans_by_index)

  def _ranges(self, index: int, cut: int, place: int) -> set[tuple[int, int]]:
    """Returns where a content may be that has its mark at `place`."""
    content, ranges = self._contents[index], set()
    lead = len(content) - len(content.lstrip())
    for variant, begin in (
      (content, place - cut),
      (content.strip(), place - cut + lead),
    ):
      if begin >= 0 and self._text.startswith(variant, begin):
        ranges.add((begin, begin + len(variant)))
    return ranges

  def _middles(
    self, indices: list[int], cuts: Mapping[int, int], places: Mapping[int, int]
  ) -> dict[int, spans.Span]:
    """Returns the places of contents by a mark in their middle."""
    contents = {i: self._cut(i, cut) for i, cut in cuts.items()}
    for i in indices:
      half, cut = len(self._contents[i]) // 2, cuts[i]
      shift = len(self._name(i)) if half > cut else 0
      text, at = contents[i], half + shift
      contents[i] = text[:at] + self._name(i, True) + text[at:]
    marked = self._render(contents)
    spans_by_index: dict[int, spans.Span] = {}
    wanted, begin, chunk, at = set(indices), 0, '', {}
    order = [*marked.marks, (-1, False)]
    ends = {**places, -1: len(self._text)}
    for (index, middle), text in zip(order, marked.texts, strict=True):
      chunk += text
      if middle:
        at[index] = begin + len(chunk)
        continue
      if index not in ends:
        return {}
      if chunk != self._text[begin : ends[index]]:
        if index not in wanted:
          return {}  # a mark changes another turn
        at.pop(index, None)
      begin, chunk = ends[index], ''
    for index, middle in at.items():
      span = spans.around(
        self._text, middle, *spans.halves(self._contents[index])
      )
      if span:
        spans_by_index[index] = spans.Span(*span, 'middle')
    return spans_by_index

  def _rest(
    self,
    replaced: _Marked,
    cuts: Mapping[int, int],
    places: Mapping[int, int],
    spans_by_index: dict[int, spans.Span],
  ) -> dict[int, spans.Span]:
    """Returns the places, with empty contents and contents cut at their begin.

    Places that overlap others are left out, with the empty ones next to them.
    """
    result: dict[int, spans.Span] = {}
    end: int | None = 0  # of the content before; None = unknown
    floor, last = 0, len(replaced.marks) - 1
    empty: list[int] = []  # before a content that confirms them
    for n, (index, _) in enumerate(replaced.marks):
      before, after = replaced.texts[n : n + 2]
      span = spans_by_index.get(index)
      begin = None
      if end is not None and self._text.startswith(before, end):
        begin = end + len(before)
      if index not in places:
        ends = set()
        if begin is not None:
          ends = self._ends(index, begin, after, n == last)
        end = None
        if len(ends) == 1:
          (end,) = ends
          result[index] = spans.Span(begin, end, 'whole')
          empty.append(index)
        continue
      if span is None and begin is not None:
        span = self._cut_span(index, cuts, places, begin, after, n == last)
      exact = span is not None and span.kind != 'middle' and begin is not None
      if empty and not (exact and span.begin == begin):
        for i in empty:
          del result[i]
      empty = []
      if (
        span is not None
        and span.begin >= floor
        and (not exact or span.begin == begin)
      ):
        result[index] = span
        end = floor = span.end
      else:
        end, floor = None, places[index]
    return result

  def _cut_span(
    self, index, cuts, places, begin: int, after: str, last: bool
  ) -> spans.Span | None:
    """Returns the place of a content of which the end is rendered."""
    content, end = self._contents[index], places[index]
    core = content.rstrip()
    if cuts[index] != len(core) or not begin <= end:
      return None
    space = content[len(core) :]
    ends = set()
    for rest in (space, ''):
      if self._text.startswith(rest, end) and self._follows(
        after, end + len(rest), last
      ):
        ends.add(end + len(rest))
    return spans.Span(begin, ends.pop(), 'cut') if len(ends) == 1 else None

  def _name(self, index: int, middle: bool = False) -> str:
    return self._mark % ('middle' if middle else 'content', index)

  def _cut(self, index: int, cut: int) -> str:
    content = self._contents[index]
    return content[:cut] + self._name(index) + content[cut:]

  def _render(self, contents: Mapping[int, str]) -> _Marked:
    text = spans.with_contents(
      self._template, self._messages, contents, self._prompt
    )
    parts = self._split.split(text)
    marks = [
      (int(index), kind == 'middle')
      for kind, index in zip(parts[1::3], parts[2::3], strict=True)
    ]
    return _Marked(parts[::3], marks)
