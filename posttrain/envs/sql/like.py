"""LIKE, instr and trim(x, y) that say what a call costs.

Within one instruction SQLite's own may take the length of a text times that of
a pattern. These give the same results, and first `spend` instructions in that
proportion. Only the letters of ASCII are alike in both cases. Blobs are read as
text, but LIKE matches none. Text that is not UTF-8 does not get here: Python
cannot pass it on.
"""

from collections.abc import Callable

Value = str | bytes | int | float | None
Spend = Callable[[int], None]

_ANY, _ONE = '\0', '\ud800'  # of a pattern; no other character is like these


def like(
  spend: Spend, pattern: Value, text: Value, *escape: Value
) -> bool | None:
  """Returns whether a text is like a pattern.

  Args:
    spend: is told the instructions that this is worth.
    pattern: as LIKE has it.
    text: what it should match.
    *escape: after ESCAPE, if that is there: the character that makes the next
      one no wildcard.

  Raises:
    ValueError: `escape` is no single character, or of `spend`.
  """
  if None in (pattern, text, *escape):
    return None
  if isinstance(pattern, bytes) or isinstance(text, bytes):
    return False
  # SQLite's texts end at a NUL here.
  pattern = _text(pattern).partition('\0')[0]
  text = _text(text).partition('\0')[0]
  _pay(spend, pattern, text, pattern.count('_') * len(text))
  if escape:
    spend(4 * len(pattern))
    pattern = _escaped(pattern, _text(*escape))
  else:
    pattern = pattern.replace('%', _ANY).replace('_', _ONE)
  return pattern is not None and _match(_fold(pattern), _fold(text))


def instr(spend: Spend, text: Value, part: Value) -> int | None:
  """Returns where a part of a text begins: from 1 on; 0 = nowhere."""
  if text is None or part is None:
    return None
  text, part = _text(text), _text(part)
  _pay(spend, part, text)
  return text.find(part) + 1


def trim(spend: Spend, text: Value, characters: Value) -> str | None:
  """Returns a text without these characters at both of its ends."""
  if text is None or characters is None:
    return None
  text, characters = _text(text), _text(characters).partition('\0')[0]
  _pay(spend, characters, text)
  return text.strip(characters)


# (name, arguments, function), for `Connection.create_function`.
FUNCTIONS = (
  ('like', 2, like),
  ('like', 3, like),
  ('instr', 2, instr),
  ('trim', 2, trim),
)


def _pay(spend: Spend, pattern: str, text: str, more: int = 0) -> None:
  """Spends ten instructions for the call, one for a hundred comparisons.

  The 50 stand for what each part of a pattern costs, however short the text is.
  """
  spend(10 + len(pattern) * (50 + len(text)) // 100 + more)


def _text(value: Value) -> str:
  """Writes a value as SQLite does."""
  if isinstance(value, bytes):
    return value.decode('utf-8', 'replace')
  if not isinstance(value, float):
    return str(value)
  if value in (float('inf'), float('-inf')):
    return 'Inf' if value > 0 else '-Inf'
  # There is no -0.
  digits, e, power = f'{value + 0.0:.15g}'.partition('e')
  return digits + ('' if '.' in digits else '.0') + e + power


def _fold(text: str) -> str:
  """Lowers the letters of ASCII, as only bytes do."""
  if text.isascii():
    return text.lower()
  return (
    text.encode('utf-8', 'surrogatepass')
    .lower()
    .decode('utf-8', 'surrogatepass')
  )


def _escaped(pattern: str, escape: str) -> str | None:
  """Marks what is a wildcard; None if it ends within an escape."""
  if len(escape) != 1:
    raise ValueError('ESCAPE expression must be a single character')
  found, rest = [], iter(pattern)
  for character in rest:
    if character == escape:
      character = next(rest, None)
      if character is None:
        return None
      found.append(character)
    else:
      found.append({'%': _ANY, '_': _ONE}.get(character, character))
  return ''.join(found)


def _match(pattern: str, text: str) -> bool:
  """Whether a pattern with marked wildcards is like a whole text.

  Between two `_ANY`, each part may as well be where it can be first.
  """
  first, *rest = pattern.split(_ANY)
  if not rest:
    return len(first) == len(text) and _find(first, text, 0) == 0
  if _find(first, text[: len(first)], 0) != 0:
    return False
  at = len(first)
  for part in rest[:-1]:
    start = _find(part, text, at)
    if start < 0:
      return False
    at = start + len(part)
  start = len(text) - len(rest[-1])
  return start >= at and _find(rest[-1], text[start:], 0) == 0


def _find(part: str, text: str, start: int) -> int:
  """Returns where a part with `_ONE` first is in a text, or -1."""
  if _ONE not in part:
    return text.find(part, start)
  at, pieces = 0, []
  for piece in part.split(_ONE):
    if piece:
      pieces.append((at, piece))
    at += len(piece) + 1
  skip, piece = pieces.pop(0) if pieces else (0, '')
  while (found := text.find(piece, start + skip)) >= 0:
    start = found - skip
    if start + len(part) > len(text):
      return -1
    if all(text.startswith(piece, start + at) for at, piece in pieces):
      return start
    start += 1
  return -1
