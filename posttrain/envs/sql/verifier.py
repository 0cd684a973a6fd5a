"""Comparison of answers with gold rows, by answer type.

1. Readings: the answer, and the rest of it without a code fence, without
   `Answer:`, without quotes around it. One correct reading suffices.
2. A reading is split into rows of cells (`dialogue.read_rows`). In plain text
   a comma may or may not end a cell, so a list is read both ways, and a table
   with `|` and with commas. This cannot make a wrong answer correct: in either
   way, its cells must be exactly the gold cells. But a plain cell with a comma,
   in a list separated by commas, is two cells; it needs quotes there.
3. Rows compare as a multiset: in any order, with equal counts. Where the order
   counts, those of each rank do (`questions.Question.ranks`).
4. Two cells that are both numbers compare as numbers: exactly, or within 1 % of
   a gold float. Other cells compare as text, ignoring case, white space and
   quotes around them. NULL equals only NULL.

A string like 1999 is a number here; 007 is text. Of several golds, an answer
must equal one.
"""

import collections
import decimal
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.envs.sql import database, dialogue

ANSWER_TYPES = ('integer', 'float', 'string', 'list', 'table')
REL, ABS = 0.01, 1e-9  # tolerances of a gold float
# Largest number of rows with floats and equal text that are matched in all
# ways; more rows are compared in sorted order only.
_MAX_MATCHED = 256
_NUMBER = re.compile(
  r'[+-]?(?:(?:0|[1-9][0-9]{0,2}(?:,[0-9]{3})+|[1-9][0-9]*)(?:\.[0-9]*)?'
  r'|\.[0-9]+)(?:e[+-]?[0-9]{1,3})?'
)
_DIGITS = 64  # maximum characters of a number; a longer one is text
_QUOTES = frozenset('"\'`')
# A quoted cell that is not the last one.
_FIRST_CELL = re.compile(
  r"""(?:"(?:[^"\\]++|\\.)*+"|'[^']*+'|`[^`]*+`)\s*+[|;,\n]"""
)
_FENCE = re.compile(r'(?:(?:text|csv|sql|json)?[^\S\n]*\n)?')
_PREFIX = re.compile(r'(?:final\s+)?answer\s*:', re.IGNORECASE)

# The key by which a cell compares: NULL, text, or the (smallest, largest) equal
# number, the same number twice unless it is a gold float.
Span = tuple[decimal.Decimal | float, decimal.Decimal | float]
Key = None | str | Span
Row = tuple[Key, ...]


def answer(gold: database.Rows) -> str:
  """Writes the gold answer on one line.

  Args:
    gold: the gold rows; one row of one cell unless the type is list or table.

  Returns:
    A text that is `correct`, unless the gold has a float that is not finite.
  """
  return '; '.join(map(dialogue.row, gold))


def equals_any(text: str, info: Mapping[str, Any]) -> bool:
  """Returns whether an answer equals one of a question's golds.

  Args:
    text: the answer, any text.
    info: fields of `questions.Question`. A further gold with another number of
      rows than the first has no ties, where the order counts.
  """
  first, others = info['gold_rows'], info.get('other_golds') or ()
  ranks = info.get('ranks') or ()
  for gold in (first, *others):
    order = ranks if len(gold) == len(first) else range(len(gold))
    if correct(text, gold, info['answer_type'], order if ranks else ()):
      return True
  return False


def correct(
  text: str, gold: database.Rows, answer_type: str, ranks: Sequence[int] = ()
) -> bool:
  """Returns whether an answer equals the gold rows.

  No answer equals a gold infinity, and no text many times longer than the gold
  is correct.

  Args:
    text: the answer, any text.
    gold: the gold rows; one row of one cell unless the type is list or table.
    answer_type: one of `ANSWER_TYPES`. `integer` and `float`
      determine how numbers compare, independent of the type of the gold cell.
    ranks: position of each gold row's key, ascending; () = any order.
  """
  if len(text) > 10_000 + 10 * len(answer(gold)):
    return False
  gold_rows = [
    tuple(_gold_key(cell, answer_type) for cell in row) for row in gold
  ]
  parts = collections.defaultdict(list)  # rank -> indices of its rows
  for i in range(len(gold)):
    parts[ranks[i] if ranks else 0].append(i)
  outer, inner = None, text.strip()
  for _ in range(5):  # layers of wrapping
    if inner == outer:
      return False
    for rows in _split(inner, answer_type):
      keys = [tuple(map(_key, row)) for row in rows]
      if len(keys) == len(gold) and all(
        _same([keys[i] for i in part], [gold_rows[i] for i in part])
        for part in parts.values()
      ):
        return True
    outer = inner
    if len(inner) > 6 and inner[:3] == inner[-3:] == '```':
      inner = inner[_FENCE.match(inner, 3).end() : -3].strip()
    elif match := _PREFIX.match(inner):
      inner = inner[match.end() :].strip()
    elif _unquote(inner).strip().lower() != dialogue.NULL:
      inner = _unquote(inner).strip()  # a quoted null is a string
  return False


def _unquote(text: str) -> str:
  """Removes quotes around a whole text; those of `"a"; "b"` stay."""
  quoted = len(text) > 1 and text[0] == text[-1] and text[0] in _QUOTES
  return text[1:-1] if quoted and not _FIRST_CELL.match(text) else text


def _split(text: str, answer_type: str) -> Iterator[list[list[str | None]]]:
  """Yields the rows of a text, in every way to read it."""
  if answer_type == 'table':
    yield from (dialogue.read_rows(text, between=between) for between in '|,')
    return
  if answer_type == 'list':
    yield [
      [value] for row in dialogue.read_rows(text, between=',') for value in row
    ]
  elif text:  # one cell, so that no character separates
    yield [[None if text.lower() == dialogue.NULL else text]]
  yield dialogue.read_rows(text, between='')


def _key(cell: str | None) -> Key:
  """Returns the key of a cell: a number if it has the form of one, or text."""
  if cell is None:
    return None
  text = ' '.join(_unquote(cell.strip()).casefold().split())
  if len(text) <= _DIGITS and _NUMBER.fullmatch(text):
    number = decimal.Decimal(text.replace(',', ''))
    if math.isfinite(float(number)):
      return (number, number)
  return text


def _gold_key(gold: database.Cell, answer_type: str) -> Key:
  """Returns the key of a gold cell.

  A float is an interval, and so is any number where the type is float; a float
  where the type is integer is a number.
  """
  text = gold is None or isinstance(gold, str)
  exact = _key(gold if text else dialogue.cell(gold))
  is_float = isinstance(gold, float)
  approximate = is_float and answer_type != 'integer' or answer_type == 'float'
  if not approximate or not (is_float or isinstance(exact, tuple)):
    return exact
  value = float(gold if is_float else exact[0])
  if not math.isfinite(value):
    return (1.0, 0.0)  # an empty interval
  slack = REL * abs(value) + ABS
  return (value - slack, value + slack)


def _same(rows: list[Row], gold: list[Row]) -> bool:
  """Returns whether the rows are the same multiset.

  Rows are grouped by text and NULLs per column; within a group only the numbers
  are compared.
  """
  groups = collections.defaultdict(lambda: ([], []))
  for side, side_rows in enumerate((rows, gold)):
    for row in side_rows:
      rest = tuple(0 if isinstance(value, tuple) else value for value in row)
      numbers = tuple(value for value in row if isinstance(value, tuple))
      groups[rest][side].append(numbers)
  return all(len(a) == len(b) and _match(a, b) for a, b in groups.values())


def _match(rows: list[Row], gold: list[Row]) -> bool:
  """Returns whether each row of numbers can get a distinct gold row.

  In sorted order, if all of them fit so. A number may fit several gold floats:
  then rows are matched one by one along augmenting paths, where a row may take
  the gold row of an earlier row that can get another.

  References:
    H. W. Kuhn, The Hungarian Method for the Assignment Problem, 1955.
  """

  def holds(gold_row: Row, row: Row) -> bool:
    return all(
      lo <= number <= hi
      for (lo, hi), (number, _) in zip(gold_row, row, strict=True)
    )

  def centers(gold_row: Row) -> list:
    return [lo if lo == hi else (lo + hi) / 2 for lo, hi in gold_row]

  ordered = sorted(gold, key=centers)
  if all(map(holds, ordered, sorted(rows))):
    return True
  if len(rows) > _MAX_MATCHED:
    return False
  holders: dict[int, int] = {}  # gold row -> row
  fits = [[i for i, x in enumerate(gold) if holds(x, row)] for row in rows]

  def place(row: int, visited: set[int]) -> bool:
    for i in fits[row]:
      if i not in visited:
        visited.add(i)
        if i not in holders or place(holders[i], visited):
          holders[i] = row
          return True
    return False

  return all(place(row, set()) for row in range(len(rows)))
