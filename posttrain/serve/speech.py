"""Tokens -> text that can be sent at once: stop strings, UTF-8 in pieces.

1. All tokens of a choice are decoded together, since text of tokens one by one
   may be another.
2. What may still change is held back: the signs of a character that is not
   whole yet, and what may be the beginning of a stop string.
3. A stop string ends the choice with the token that completed it; the text
   ends before the string. Chunks make no difference.
"""

from collections.abc import Callable, Sequence

_BROKEN = '\ufffd'  # stands for bytes that are no character (yet)
FINISH = {'eos': 'stop', 'max_tokens': 'length', 'overflow': 'length'}


class Speech:
  """What a choice has said."""

  def __init__(
    self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()
  ):
    """Args: decode: ids -> text; stops: strings that end it."""
    self._decode, self._stops = decode, stops
    self.ids: list[int] = []
    self.logprobs: list[float] = []  # of the ids
    self.text = ''  # as far as it is sure
    self.finish: str | None = None  # 'stop' or 'length', when it has ended
    self.stop: str | None = None  # the string that ended it

  def hear(
    self, ids: Sequence[int], logprobs: Sequence[float], reason: str | None
  ) -> str:
    """Adds tokens; returns the text that is sure by them.

    Args:
      ids: new ones.
      logprobs: of those.
      reason: they are the last, because of it (`requests.Completion`).
    """
    assert self.finish is None, 'nothing is said behind the end'
    before = len(self.ids)
    self.ids += ids
    self.logprobs += logprobs
    text = self._decode(self.ids)
    self.finish = reason and FINISH[reason]
    if any(stop in text for stop in self._stops):
      text = self._cut(before, text)
    if self.finish is None:
      text = self._sure(text)
    # A decoder may take back what it said; nothing is sent until it is again.
    if not text.startswith(self.text) and self.finish is None:
      return ''
    new = text[len(self.text) :]
    self.text += new
    return new

  def _cut(self, before: int, text: str) -> str:
    """Ends with the token that completes the first stop string."""
    for count in range(before + 1, len(self.ids) + 1):
      said = self._decode(self.ids[:count])
      found = [(said.index(x), x) for x in self._stops if x in said]
      if found:
        at, self.stop = min(found)
        self.finish = 'stop'
        del self.ids[count:], self.logprobs[count:]
        return said[:at]
    return text

  def _sure(self, text: str) -> str:
    text = text.rstrip(_BROKEN)
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
