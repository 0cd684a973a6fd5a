"""LIKE, instr and trim(x, y) that pay for their cost in instructions.

SQLite's own functions may take time proportional to the length of a text times
that of a pattern within one instruction. These functions return the same
results, and first `spend` instructions in that proportion. Only ASCII letters
match in both cases. Blobs are read as text, but LIKE matches none. Text that is
not UTF-8 never arrives here: Python cannot pass it.
"""

from collections.abc import Callable

Value = str | bytes | int | float | None
Spend = Callable[[int], None]

_ANY, _ONE = '\0', '\ud800'  # wildcards; no text holds these characters


def like(
  spend: Spend, pattern: Value, text: Value, *escape: Value
) -> bool | None:
  """Returns whether a text matches a pattern.

  Args:
    spend: called with the cost of the call, in instructions.
    pattern: a pattern of LIKE.
    text: the text.
    *escape: the character after ESCAPE, if any; the character after it in the
      pattern is no wildcard.

  Raises:
    ValueError: `escape` is not one character, or `spend` raised it.
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
  """Returns the position of a part in a text, from 1; 0 = not found."""
  if text is None or part is None:
    return None
  text, part = _text(text), _text(part)
  _pay(spend, part, text)
  return text.find(part) + 1


def trim(spend: Spend, text: Value, characters: Value) -> str | None:
  """Returns a text without these characters at both ends."""
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
  """Spends ten instructions for the call, one per hundred comparisons.

  The 50 is the cost of each character of a pattern with an empty text.
  """
  spend(10 + len(pattern) * (50 + len(text)) // 100 + more)


def _text(value: Value) -> str:
  """Returns the text of a value, in SQLite's format."""
  if isinstance(value, bytes):
    return value.decode('utf-8', 'replace')
  if not isinstance(value, float):
    return str(value)
  if value in (float('inf'), float('-inf')):
    return 'Inf' if value > 0 else '-Inf'
  # SQLite writes no -0.
  digits, e, power = f'{value + 0.0:.15g}'.partition('e')
  return digits + ('' if '.' in digits else '.0') + e + power


def _fold(text: str) -> str:
  """Lowers ASCII letters only; `bytes.lower` does so."""
  if text.isascii():
    return text.lower()
  return (
    text.encode('utf-8', 'surrogatepass')
    .lower()
    .decode('utf-8', 'surrogatepass')
  )


def _escaped(pattern: str, escape: str) -> str | None:
  """Replaces wildcards by markers; None if the pattern ends in an escape."""
  if len(escape) != 1:
    raise ValueError('ESCAPE expression must be a single character')
  characters, rest = [], iter(pattern)
  for character in rest:
    if character == escape:
      character = next(rest, None)
      if character is None:
        return None
      characters.append(character)
    else:
      characters.append({'%': _ANY, '_': _ONE}.get(character, character))
  return ''.join(characters)


def _match(pattern: str, text: str) -> bool:
  """Returns whether a pattern with marked wildcards matches a whole text.

  A part between two `_ANY` is placed at its first match, without loss.
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
  """Returns the first position of a part with `_ONE` in a text, or -1."""
  if _ONE not in part:
    return text.find(part, start)
  at, pieces = 0, []
  for piece in part.split(_ONE):
    if piece:
      pieces.append((at, piece))
    at += len(piece) + 1
  skip, piece = pieces.pop(0) if pieces else (0, '')
  while (position := text.find(piece, start + skip)) >= 0:
    start = position - skip
    if start + len(part) > len(text):
      return -1
    if all(text.startswith(piece, start + at) for at, piece in pieces):
      return start
    start += 1
  return -1
