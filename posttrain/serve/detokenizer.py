"""Tokens -> text that can be sent at once: stop strings, partial UTF-8.

1. All tokens of a choice are decoded together: tokens decoded one by one may
   give another text.
2. Text that may still change is held back: replacement characters at the end,
   and a possible beginning of a stop string.
3. A stop string ends the choice with the token that completed it; the text
   ends before the string. Chunk boundaries make no difference.
"""

from collections.abc import Callable, Sequence

_REPLACEMENT = '\ufffd'  # decodes bytes that are no character (yet)
FINISH = {'eos': 'stop', 'max_tokens': 'length', 'overflow': 'length'}


class Detokenizer:
  """The tokens and the text of one choice."""

  def __init__(
    self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()
  ):
    """Starts a text without tokens.

    Args:
      decode: returns the text of ids.
      stops: stop strings.
    """
    self._decode, self._stops = decode, stops
    self.ids: list[int] = []
    self.logprobs: list[float] = []  # of the ids
    self.text = ''  # as far as it is final
    self.finish: str | None = None  # 'stop' or 'length', when it has ended
    self.stop: str | None = None  # the stop string that ended it

  def append(
    self, ids: Sequence[int], logprobs: Sequence[float], reason: str | None
  ) -> str:
    """Appends tokens; returns the text that became final.

    Args:
      ids: the new tokens.
      logprobs: one per new token.
      reason: the stop reason if these are the last tokens, as in
        `requests.Completion`; None = more follow.
    """
    assert self.finish is None, 'no token follows the end'
    before = len(self.ids)
    self.ids += ids
    self.logprobs += logprobs
    text = self._decode(self.ids)
    self.finish = reason and FINISH[reason]
    if any(stop in text for stop in self._stops):
      text = self._cut(before, text)
    if self.finish is None:
      text = self._final(text)
    # A decoder may revise earlier text; wait until it repeats the sent part.
    if not text.startswith(self.text) and self.finish is None:
      return ''
    new = text[len(self.text) :]
    self.text += new
    return new

  def _cut(self, before: int, text: str) -> str:
    """Ends with the token that completes the first stop string."""
    for count in range(before + 1, len(self.ids) + 1):
      prefix = self._decode(self.ids[:count])
      stops = [(prefix.index(x), x) for x in self._stops if x in prefix]
      if stops:
        index, self.stop = min(stops)
        self.finish = 'stop'
        del self.ids[count:], self.logprobs[count:]
        return prefix[:index]
    return text

  def _final(self, text: str) -> str:
    """Returns the part of a text that later tokens cannot change."""
    text = text.rstrip(_REPLACEMENT)
    held = max(
      (
        size
        for stop in self._stops
        for size in range(1, len(stop))
        if text.endswith(stop[:size])
      ),
      default=0,
    )
    return text[: len(text) - held]
