"""Tokens -> text that can be sent at once: stop strings, partial UTF-8.

1. New tokens are decoded together with those before them, in a window that
   moves along: tokens decoded one by one may give another text, and all of them
   decoded again for every token would cost their square.
2. Text that may still change is held back: replacement characters at the end,
   and a possible beginning of a stop string.
3. A stop string ends the choice with the token that completed it; the text
   ends before the string. Chunk boundaries make no difference.
4. The last tokens are decoded with all others, once.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

_REPLACEMENT = '\ufffd'  # decodes bytes that are no character (yet)
FINISH = {'eos': 'stop', 'max_tokens': 'length', 'overflow': 'length'}


class _Window(NamedTuple):
  """The tokens that are decoded again with new ones."""

  start: int = 0  # index of its first token
  last: int = 0  # index of the first token that was new at the last move
  text: str = ''  # the part of its text that is final


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
    self._window = _Window()
    self._held = ''  # final, but a stop string may begin in it
    self.text = ''  # as far as it has been sent
    self.ids: list[int] = []
    self.logprobs: list[float] = []  # of the ids
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
    window = self._window
    self.ids += ids
    self.logprobs += logprobs
    self.finish = reason and FINISH[reason]
    if self.finish is None:
      text, self._window = self._more(window, len(self.ids))
    else:
      text = self._decode(self.ids)[len(self.text) + len(self._held) :]
    text = self._held + text
    if (match := self._match(text)) is not None:
      # The fewest tokens whose text has a match.
      low, high = window.start, len(self.ids)
      while high - low > 1:
        count = (low + high) // 2
        shorter = self._held + self._more(window, count)[0]
        if (earlier := self._match(shorter)) is None:
          low = count
        else:
          high, text, match = count, shorter, earlier
      del self.ids[high:], self.logprobs[high:]
      self.finish = 'stop'
      end, self.stop = match
    else:
      end = len(text) - (0 if self.finish else self._possible(text))
    self._held = text[end:]
    self.text += text[:end]
    return text[:end]

  def _more(self, window: _Window, count: int) -> tuple[str, _Window]:
    """Returns the text that became final with `count` tokens, and the window.

    Args:
      window: the window before.
      count: tokens of the choice to read.
    """
    decoded = self._decode(self.ids[window.start : count])
    final = decoded.rstrip(_REPLACEMENT)
    # A decoder may revise earlier text; wait until it repeats it.
    if not final.startswith(window.text):
      return '', window
    new = final[len(window.text) :]
    if not new or len(final) < len(decoded):
      return new, window._replace(text=final)
    # The new tokens have text of their own: they are context enough.
    context = self._decode(self.ids[window.last : count])
    return new, _Window(window.last, count, context)

  def _match(self, text: str) -> tuple[int, str] | None:
    """Returns (start, string) of the stop string that starts first, if any."""
    found = ((text.find(stop), stop) for stop in self._stops)
    return min((x for x in found if x[0] >= 0), default=None)

  def _possible(self, text: str) -> int:
    """Returns the characters at the end that may begin a stop string."""
    sizes = (
      size
      for stop in self._stops
      for size in range(1, len(stop))
      if text.endswith(stop[:size])
    )
    return max(sizes, default=0)
