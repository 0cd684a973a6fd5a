"""Search for stop strings in a text that arrives piece by piece.

Each string has the table of Knuth, Morris and Pratt, made once per request. A
search remembers how much of each string the text ends with, so that a piece
costs time linear in its own length, whatever the lengths of the strings.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Match(NamedTuple):
  """A stop string in the text."""

  start: int  # from the piece's first character; < 0 = in an earlier piece
  string: str


class Strings:
  """Stop strings with their tables; any number of searches share them."""

  def __init__(self, strings: Sequence[str] = ()):
    self.tables = tuple((x, _table(x)) for x in strings)


class Search:
  """A search through one text."""

  def __init__(self, strings: Strings, matched: Sequence[int] | None = None):
    """Starts at a text's beginning.

    Args:
      strings: the stop strings.
      matched: characters of each string that the text ends with; None = 0.
    """
    self._strings = strings
    self._matched = list(matched or [0] * len(strings.tables))

  def copy(self) -> 'Search':
    """Returns a search that continues from here on its own."""
    return Search(self._strings, self._matched)

  @property
  def held(self) -> int:
    """Characters at the text's end that may begin a stop string."""
    return max(self._matched, default=0)

  def feed(self, piece: str) -> Match | None:
    """Reads the next piece; returns the match that starts first, if any."""
    matches = []
    for index, (string, table) in enumerate(self._strings.tables):
      self._matched[index], end = _advance(
        piece, string, table, self._matched[index]
      )
      if end is not None:
        matches.append(Match(end - len(string), string))
    return min(matches, default=None)


def _table(string: str) -> list[int]:
  """Returns, per prefix, the length of its longest border."""
  table = [0]
  for character in string[1:]:
    length = table[-1]
    while length and string[length] != character:
      length = table[length - 1]
    table.append(length + (string[length] == character))
  return table


def _advance(
  piece: str, string: str, table: list[int], matched: int
) -> tuple[int, int | None]:
  """Returns (characters matched at the end, the end of the first match)."""
  place = 0
  while place < len(piece):
    if matched:
      character = piece[place]
      while matched and string[matched] != character:
        matched = table[matched - 1]
      matched += string[matched] == character
    else:
      place = piece.find(string[0], place)
      if place < 0:
        return 0, None
      matched = 1
    place += 1
    if matched == len(string):
      return matched, place
  return matched, None
