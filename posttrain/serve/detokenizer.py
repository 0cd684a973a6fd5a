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

import dataclasses
from collections.abc import Callable, Sequence

from posttrain.serve import stop_strings

_REPLACEMENT = '\ufffd'  # decodes bytes that are no character (yet)
_LONG_WINDOW = 32  # tokens of a window that are decoded again for every new one
FINISH = {'eos': 'stop', 'max_tokens': 'length', 'overflow': 'length'}


@dataclasses.dataclass(frozen=True)
class _Window:
  """The tokens that are decoded again with new ones."""

  start: int = 0  # index of its first token
  last: int = 0  # index of the first token that was new at the last move
  text: str = ''  # the part of its text that is final
  least: int = 0  # tokens that there must be before it is decoded again


class Detokenizer:
  """The tokens and the text of one choice."""

  def __init__(
    self,
    decode: Callable[[Sequence[int]], str],
    stops: stop_strings.Strings | None = None,
  ):
    """Starts a text without tokens.

    Args:
      decode: returns the text of ids.
      stops: stop strings; None = none.
    """
    self._decode = decode
    self._search = stop_strings.Search(stops or stop_strings.Strings())
    self._window = _Window()
    self._sent: list[str] = []
    self._held = ''  # final, but a stop string may begin in it
    self.ids: list[int] = []
    self.logprobs: list[float] = []  # of the ids
    self.finish: str | None = None  # 'stop' or 'length', when it has ended
    self.stop: str | None = None  # the stop string that ended it

  @property
  def text(self) -> str:
    """The text as far as it has been sent."""
    return ''.join(self._sent)

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
    window, search = self._window, self._search.copy()
    self.ids += ids
    self.logprobs += logprobs
    self.finish = reason and FINISH[reason]
    if self.finish is None:
      text, self._window = self._more(window, len(self.ids))
    else:
      text = self._decode(self.ids)[len(self.text) + len(self._held) :]
    match = self._search.feed(text)
    if match is not None:
      return self._cut(window, search, text, match)
    text = self._held + text
    final = len(text) - (0 if self.finish else self._search.held)
    self._held = text[final:]
    self._sent.append(text[:final])
    return text[:final]

  def _more(
    self, window: _Window, count: int, *, must: bool = False
  ) -> tuple[str, _Window]:
    """Returns the text that became final with `count` tokens, and the window.

    Args:
      window: the window before.
      count: tokens of the choice to read.
      must: decode also if the window waits for more tokens.
    """
    if count < window.least and not must:
      return '', window
    decoded = self._decode(self.ids[window.start : count])
    final = decoded.rstrip(_REPLACEMENT)
    size = count - window.start
    # Once a window is long, it is decoded when it has grown by a quarter, so
    # that the sum over all tokens stays linear.
    least = count + size // 4 if size > _LONG_WINDOW else 0
    # A decoder may revise earlier text; wait until it repeats it.
    if not final.startswith(window.text):
      return '', dataclasses.replace(window, least=least)
    new = final[len(window.text) :]
    if not new or len(final) < len(decoded):
      return new, dataclasses.replace(window, text=final, least=least)
    # The new tokens have text of their own: they are context enough.
    context = self._decode(self.ids[window.last : count])
    return new, _Window(window.last, count, context)

  def _cut(
    self,
    window: _Window,
    search: stop_strings.Search,
    text: str,
    match: stop_strings.Match,
  ) -> str:
    """Ends with the token that completes the first stop string.

    Args:
      window: the window before the last tokens.
      search: the search before them.
      text: their text, in which there is a match.
      match: the match.
    """
    low, high = window.start, len(self.ids)  # too few tokens; enough of them
    while high - low > 1:
      count = (low + high) // 2
      shorter, _ = self._more(window, count, must=True)
      shorter_match = search.copy().feed(shorter)
      if shorter_match is None:
        low = count
      else:
        high, text, match = count, shorter, shorter_match
    del self.ids[high:], self.logprobs[high:]
    self.finish, self.stop = 'stop', match.string
    text = (self._held + text)[: len(self._held) + match.start]
    self._held = ''
    self._sent.append(text)
    return text
