"""Whether an answer is right; asked for by an answer type.

1. `_readings`: what was said, and what is left of it without a code fence,
   without `Answer:`, without quotes around it. One right reading suffices.
2. A reading is split into rows of cells (`cells.read`). Plain text leaves
   open whether a comma ends a cell, so a list is read both ways, and so is a
   table with `|` or with commas. This cannot make a wrong answer right: every
   way, all of its cells must be all of the gold cells. But a plain cell with
   a comma, in a list said with commas, is two cells; there it needs quotes.
3. Rows count as a multiset: in any order, each as often as in the gold.
4. Two cells that are both numbers compare as numbers: exactly, but within
   1 % of a gold float. Others compare as text, without regard to case, white
   space and quotes around them. NULL is only NULL.

A string such as 1999 is a number here; 007 is text.
"""

import collections
import decimal
import heapq
import itertools
import math
import re
from collections.abc import Callable, Iterator, Sequence

from posttrain.envs.sql import cells, record

REL, ABS = 0.01, 1e-9  # of a gold float
# Rows with several floats, but the same text, that are matched in all ways;
# more of them are right only if they are when both are sorted.
_MATCHED = 256
_NUMBER = re.compile(
  r'[+-]?(?:(?:0|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]*)(?:\.[0-9]*)?'
  r'|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?'
)
_DIGITS = 64  # a number has so many characters at most; what is longer is text
_QUOTES = frozenset('"\'`')
_FENCE = re.compile(r'(?:(?:text|csv|sql|json)?[^\S\n]*\n)?')
_PREFIX = re.compile(r'(?:final\s+)?answer\s*:', re.IGNORECASE)

# A cell as it compares: NULL, text, or the least and the most that a number may
# be (twice itself, unless it is a gold float).
Span = tuple[decimal.Decimal | float, decimal.Decimal | float]
Key = None | str | Span
Row = tuple[Key, ...]


def answer(gold: record.Rows, answer_type: str) -> str:
  """Writes the gold answer as an agent should say it, on one line.

  Args:
    gold: rows; one with one cell unless the type is list or table.
    answer_type: of `record.ANSWER_TYPES`.

  Returns:
    Text that is `correct`, unless the gold has a float without a value.
  """
  _check(gold, answer_type)
  return '; '.join(map(cells.row, gold))


def correct(said: str, gold: record.Rows, answer_type: str) -> bool:
  """Returns whether an answer says the gold rows.

  Nothing is right for a gold infinity, nor text many times as long as the
  gold.

  Args:
    said: anything.
    gold: rows; one with one cell unless the type is list or table.
    answer_type: of `record.ANSWER_TYPES`. `integer` and `float` fix how the
      number compares, whatever type the gold cell has.
  """
  _check(gold, answer_type)
  if len(said) > 10_000 + 10 * len(answer(gold, answer_type)):
    return False
  key = {'integer': _exact, 'float': _about}.get(answer_type, _gold_key)
  want = [tuple(map(key, values)) for values in gold]
  for text in _readings(said):
    for rows in _split(text, answer_type):
      if len(rows) == len(want) and _same(
        [tuple(map(_key, values)) for values in rows], want
      ):
        return True
  return False


def _check(gold: record.Rows, answer_type: str) -> None:
  assert answer_type in record.ANSWER_TYPES, answer_type
  assert gold and (answer_type == 'table' or len(gold[0]) == 1), gold
  assert answer_type in ('list', 'table') or len(gold) == 1, gold


def _readings(said: str) -> Iterator[str]:
  """Yields a text, then what is left of it as its wrapping comes off."""
  text, inner = None, said.strip()
  for _ in range(5):
    if inner == text:
      return
    yield inner
    text, inner = inner, _unwrap(inner).strip()


def _unwrap(text: str) -> str:
  if len(text) > 6 and text[:3] == text[-3:] == '```':
    return text[_FENCE.match(text, 3).end() : -3]
  if found := _PREFIX.match(text):
    return text[found.end() :]
  inner = _unquote(text)  # but what is quoted is not NULL
  return text if inner.strip().lower() == cells.NULL else inner


def _unquote(text: str) -> str:
  quoted = len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES
  return text[1:-1] if quoted else text


def _split(text: str, answer_type: str) -> Iterator[list[list[str | None]]]:
  """Yields the rows of a text, in every way to read it."""
  if answer_type == 'table':
    yield from (cells.read(text, between=between) for between in '|,')
    return
  if answer_type == 'list':
    yield [[said] for row in cells.read(text, between=',') for said in row]
  elif text:  # one cell, so that nothing in it separates
    yield [[None if text.lower() == cells.NULL else text]]
  yield cells.read(text, between='')


def _key(cell: str | None) -> Key:
  """Returns a cell as it compares: a number if it reads as one, or text."""
  if cell is None:
    return None
  text = ' '.join(_unquote(cell.strip()).casefold().split())
  if len(text) <= _DIGITS and _NUMBER.fullmatch(text):
    number = decimal.Decimal(text.replace(',', ''))
    if math.isfinite(float(number)):
      return (number, number)
  return text


def _gold_key(gold: record.Cell) -> Key:
  return _about(gold) if isinstance(gold, float) else _exact(gold)


def _exact(gold: record.Cell) -> Key:
  plain = gold is None or isinstance(gold, str)
  return _key(gold if plain else cells.cell(gold))


def _about(gold: record.Cell) -> Key:
  exact = _exact(gold)
  if not isinstance(gold, float) and not isinstance(exact, tuple):
    return exact
  value = float(gold if isinstance(gold, float) else exact[0])
  if not math.isfinite(value):
    return (1.0, 0.0)  # no number lies between
  slack = REL * abs(value) + ABS
  return (value - slack, value + slack)


def _same(said: list[Row], want: list[Row]) -> bool:
  """Returns whether the rows are the same multiset.

  Rows with the same text and NULLs in the same columns come together; among
  them only the numbers are left to compare.
  """

  def divide(row: Row) -> tuple[tuple, Row]:
    rest = tuple(0 if isinstance(value, tuple) else value for value in row)
    return rest, tuple(value for value in row if isinstance(value, tuple))

  return _each_group(said, want, divide, _match)


def _match(said: list[Row], want: list[Row]) -> bool:
  """Does so for numbers; a column without floats divides the rows further."""
  exact = [all(lo == hi for lo, hi in spans) for spans in _columns(want)]
  about = [not is_exact for is_exact in exact]

  def divide(row: Row) -> tuple[Row, Row]:
    key = tuple(itertools.compress(row, exact))
    return key, tuple(itertools.compress(row, about))

  return _each_group(said, want, divide, _match_about)


def _match_about(said: list[Row], want: list[Row]) -> bool:
  """Does so for columns with floats, where a number may do for several."""
  columns = [*zip(_columns(said), _columns(want), strict=True)]
  if not all(_sweep(*column) for column in columns):
    return False
  if len(columns) < 2:
    return True
  if len(said) > _MATCHED:
    return all(map(_holds, sorted(want), sorted(said)))
  return _pair(said, want)


def _columns(rows: list[Row]) -> list[tuple[Key, ...]]:
  return list(zip(*rows, strict=True))


def _each_group(
  said: list[Row],
  want: list[Row],
  divide: Callable[[Row], tuple[tuple, Row]],
  match: Callable[[list[Row], list[Row]], bool],
) -> bool:
  """Returns whether `match` is true of the rows of each key.

  Args:
    divide: from a row to its key and what is left of it.
  """
  groups = collections.defaultdict(lambda: ([], []))
  for side, rows in enumerate((said, want)):
    for key, rest in map(divide, rows):
      groups[key][side].append(rest)
  return all(len(a) == len(b) and match(a, b) for a, b in groups.values())


def _sweep(said: Sequence[Span], want: Sequence[Span]) -> bool:
  """Returns whether each number of a column can have a span of its own.

  In order, each takes the span that ends first of those that hold it: whatever
  later number would need that one could have the other instead.
  """
  waiting, ends = sorted(want, reverse=True), []
  for number, _ in sorted(said):
    while waiting and waiting[-1][0] <= number:
      heapq.heappush(ends, waiting.pop()[1])
    if not ends or heapq.heappop(ends) < number:
      return False
  return True


def _holds(want: Row, said: Row) -> bool:
  return all(
    lo <= number <= hi for (lo, hi), (number, _) in zip(want, said, strict=True)
  )


def _pair(said: list[Row], want: list[Row]) -> bool:
  """Returns whether each row can have a gold row of its own.

  One row after the other takes a gold row, from an earlier one if that can
  move on to another.

  References:
    H. W. Kuhn, The Hungarian Method for the Assignment Problem, 1955.
  """
  holders: dict[int, int] = {}  # gold row -> row
  fits = [
    [i for i, gold in enumerate(want) if _holds(gold, row)] for row in said
  ]

  def place(row: int, seen: set[int]) -> bool:
    for gold in fits[row]:
      if gold not in seen:
        seen.add(gold)
        if gold not in holders or place(holders[gold], seen):
          holders[gold] = row
          return True
    return False

  return all(place(row, set()) for row in range(len(said)))
