"""How rows are written as text, and read back; one rule for all.

    NULL -> null    3 -> 3    2.5 -> 2.5    Ada -> Ada    a;b -> "a;b"

The cells of a row stand between ` | `; rows between `; ` (compact) or on lines
of their own (verbose); no rows at all are `empty`. A string is quoted, as in
JSON, only where its plain text would be misread. Observations, answers and
the verifier share this rule, so what an agent reads it can say.
"""

import functools
import json
import re
from collections.abc import Iterable, Iterator, Sequence

from posttrain.envs.sql import record

NULL, EMPTY = 'null', 'empty'
CUT = ' ...'  # ends a text that was cut
_BETWEEN_ROWS = {'compact': '; ', 'verbose': '\n'}
STYLES = tuple(_BETWEEN_ROWS)
_SEPARATORS = frozenset('|;,\n"')


def cell(value: record.Cell) -> str:
  """Writes one value.

  A float has six digits, or all those before its point: 2.5, 0.333333, 3,
  1234568, 1e+20. So a whole one reads as an integer does.
  """
  if value is None:
    return NULL
  if isinstance(value, float):
    whole = value.is_integer() or 1e5 <= abs(value)
    return str(round(value)) if whole and abs(value) < 1e15 else f'{value:.6g}'
  if isinstance(value, int):
    return str(value)
  plain = (
    value
    and value == value.strip()
    and _SEPARATORS.isdisjoint(value)
    and value.lower() not in (NULL, EMPTY)
  )
  return value if plain else json.dumps(value, ensure_ascii=False)


def row(values: Iterable[record.Cell]) -> str:
  """Writes one row."""
  return ' | '.join(map(cell, values))


def write(
  rows: Sequence[Sequence[record.Cell]],
  *,
  style: str,
  limit: int,
  more: bool = False,
) -> tuple[str, bool]:
  """Writes rows, at most so many characters of them.

  Args:
    rows: of equal length.
    style: of `STYLES`.
    limit: characters, with those of the mark ` ...` at the end of a text
      that was cut.
    more: whether there are rows beyond these, so that the text is cut anyway.

  Returns:
    (the text, whether rows or characters are missing).
  """
  assert limit >= len(CUT), limit
  between, texts, length = _BETWEEN_ROWS[style], [], 0
  for values in rows:
    if length > limit:  # the rest would be written only to be thrown away
      break
    texts.append(row(values))
    length += len(texts[-1])
  text = between.join(texts) if texts else EMPTY
  if not more and len(text) <= limit:
    return text, False
  return _marked(text, limit), True


def cut(text: str, limit: int) -> str:
  """Returns at most so many characters of a text, those of ` ...` included."""
  return text if len(text) <= limit else _marked(text, limit)


def _marked(text: str, limit: int) -> str:
  return text[: limit - len(CUT)].rstrip() + CUT


def read(text: str, *, between: str = '|') -> list[list[str | None]]:
  """Reads rows.

  Rows end at `;` or a line's end, outside of quotes; blank ones do not count.
  A quote that is not closed, or has more than white space after it in its
  cell, is plain text.

  Args:
    text: anything.
    between: the character between the cells of a row; '' if rows have one
      cell each.

  Returns:
    The cells of each row, without white space around them; None for `null`.
    Numbers are not told from strings here: 3 and "3" are both '3'.
  """
  if text.strip().lower() == EMPTY:
    return []
  rows: list[list[str | None]] = [[]]
  for said, quoted, end in _scan(text, between):
    rows[-1].append(said)
    if end and end == between:
      continue
    if rows[-1] == [''] and not quoted:
      rows.pop()
    rows.append([])
  return rows[:-1]


def _scan(text: str, between: str) -> Iterator[tuple[str | None, bool, str]]:
  """Yields every cell: (its text, whether it was quoted, what ended it)."""
  for found in _pattern(between).finditer(text):
    quote, plain, end = found.groups()
    said, quoted = plain, quote is not None
    if quoted:
      try:
        said = json.loads(quote, strict=False)
      except ValueError:  # an escape that JSON does not know
        said, quoted = quote, False
    if not quoted:
      said = said.strip()
      said = None if said.lower() == NULL else said
    yield said, quoted, end
    if not end:
      return


@functools.cache
def _pattern(between: str) -> re.Pattern:
  """Returns the pattern of one cell: quoted or plain, and what ends it.

  Possessive, so that it takes one pass: a cell that begins with a quote is
  looked through to the next cell that does, at most, before it is read anew
  as plain text.
  """
  ends = re.escape(between) + r';\n'
  quoted = rf'("(?:[^"\\]++|\\.)*+")[^\S\n]*+(?![^{ends}])'
  return re.compile(
    rf'[^\S\n]*+(?:{quoted}|([^{ends}]*+))([{ends}]|\Z)', re.DOTALL
  )
