"""Text form of rows, shared by observations, answers and the verifier.

    NULL -> null    3 -> 3    2.5 -> 2.5    Ada -> Ada    a;b -> "a;b"

Cells are separated by ` | `, rows by `; ` (compact) or line ends (verbose); a
result without rows is `empty`. A string is quoted, as in JSON, only if its
plain text would be misread. So the text of an observation is a valid answer.
"""

import contextlib
import functools
import json
import re
from collections.abc import Iterable, Sequence

Cell = int | float | str | None
Rows = tuple[tuple[Cell, ...], ...]

NULL, EMPTY = 'null', 'empty'
CUT = ' ...'  # suffix of a cut text
_BETWEEN_ROWS = {'compact': '; ', 'verbose': '\n'}
STYLES = tuple(_BETWEEN_ROWS)
_SEPARATORS = frozenset('|;,\n"')


def cell(value: Cell) -> str:
  """Writes one value.

  A float has six digits, or all digits before its point: 2.5, 0.333333, 3,
  1234568, 1e+20. So a whole float looks like an integer.
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


def row(values: Iterable[Cell]) -> str:
  """Writes one row."""
  return ' | '.join(map(cell, values))


def write(
  rows: Sequence[Sequence[Cell]], *, style: str, limit: int, more: bool = False
) -> str:
  """Writes rows, cut to a number of characters.

  Args:
    rows: rows of equal length.
    style: one of `STYLES`.
    limit: maximum number of characters, ` ...` at the end of a cut text
      included.
    more: whether there are further rows, so that the text is always cut.
  """
  assert limit >= len(CUT), limit
  between, texts, length = _BETWEEN_ROWS[style], [], 0
  for values in rows:
    if length > limit:  # the other rows would be cut off
      break
    texts.append(row(values))
    length += len(texts[-1])
  text = between.join(texts) if texts else EMPTY
  if more or len(text) > limit:
    text = text[: limit - len(CUT)].rstrip() + CUT
  return text


def cut(text: str, limit: int) -> str:
  """Returns a text cut to `limit` characters, those of ` ...` included."""
  return text if len(text) <= limit else text[: limit - len(CUT)].rstrip() + CUT


def read(text: str, *, between: str = '|') -> list[list[str | None]]:
  """Reads rows.

  Rows end at `;` or a line end, outside of quotes; blank rows are skipped. A
  quote is plain text if it is not closed, or if other characters than white
  space follow it in its cell.

  Args:
    text: any text.
    between: the character between the cells of a row; '' if rows have one
      cell each.

  Returns:
    The cells of each row, without white space around them; None for `null`.
    Numbers stay text: 3 and "3" are both '3'.
  """
  if text.strip().lower() == EMPTY:
    return []
  rows: list[list[str | None]] = [[]]
  for match in _pattern(between).finditer(text):
    quote, plain, end = match.groups()
    value = None
    if quote is not None:
      with contextlib.suppress(ValueError):  # no valid JSON escape
        value = json.loads(quote, strict=False)
    quoted = value is not None
    if not quoted:
      value = (plain if quote is None else quote).strip()
      value = None if value.lower() == NULL else value
    rows[-1].append(value)
    if end and end == between:
      continue
    if rows[-1] == [''] and not quoted:
      rows.pop()
    if not end:
      break
    rows.append([])
  return rows


@functools.cache
def _pattern(between: str) -> re.Pattern:
  """Returns the pattern of one cell: quoted or plain, and its end.

  Possessive, so that matching is linear: a cell that begins with a quote is
  scanned at most to the next quote before it is matched again as plain text.
  """
  ends = re.escape(between) + r';\n'
  quoted = rf'("(?:[^"\\]++|\\.)*+")[^\S\n]*+(?![^{ends}])'
  return re.compile(
    rf'[^\S\n]*+(?:{quoted}|([^{ends}]*+))([{ends}]|\Z)', re.DOTALL
  )
