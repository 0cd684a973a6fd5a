r"""Numbers in answers: which one a text ends on, exactly.

1. `final_answer` chooses the place that says the answer: the last box, else
   GSM8K's `#### N`, else the last result of the text. The last such place is
   meant: where it cannot be read there is no answer, and an earlier one does
   not help, because guesses do not add up.
2. `latex.plain` takes the LaTeX off: `\frac{3}{4}` is `3/4`.
3. `words.signed` makes characters of written signs: `minus 5` is `-5`.
4. `_NUMBER` finds what looks like a number, `_found` says what it is worth,
   and `words.scale` what it is multiplied by: `5 million`.

What a number is: ASCII digits, 64 at most, as `7`, `1,234,567`, `1,234.50`,
`.5`, `3.`, `3/4`, `2 1/2`, `1.5e3`, `1.5 x 10^3`; `$`, `£` or `€` may come
before it, `%` (which changes nothing: 50% is 50) or a unit after it. A sign
counts where it stands directly before the number or its currency, and behind
no digit, letter, closing bracket, `%` or other sign: `5-3` and `COVID-19`
hold no negative number. Commas that do not group by three separate. What is
no number at all: digits behind a letter (`H2O`), exponents and indices
(`cm^2`, `x_1`), clock times and ratios (`5:30`). What is one that cannot be
read: `2^5`, `1/0`, `1.2.3`, `5_000`, too many digits, `5²`, digits of other
scripts beside ASCII ones.

Everything is a `Fraction`: no rounding, no infinity. No text raises, and
none is slow: the patterns are linear, the lengths have bounds.
"""

import fractions
import re
from collections.abc import Iterator
from typing import NamedTuple

from posttrain.rewards import latex, words

DIGITS = 64  # of a number at most
LENGTH = 1000  # of a box or `####` line at most, in characters
TAIL = 10_000  # characters at the end in which the last number is looked for

_Fraction = fractions.Fraction
_MARKS = re.compile(r'<<[^<>\n]*>>')
_HASHES = re.compile(r'(?<!#)####(?!#)[^\S\n]*([^\n]*)(\n?)')
_HEADING = re.compile(r'[*_]*[^\W\d_¼-¾⅐-⅞]')
_INT = r'(?:[1-9][0-9]{0,2}(?:,[0-9]{3})++(?![0-9])|[0-9]++)'
_NUMBER = re.compile(
  rf"""
    (?P<sign>[+-])? (?:[$£€]\ ?(?P<late>[+-])?)?
    (?P<digits>
      (?:(?P<whole>{_INT})\ )? (?<![0-9]/) (?P<over>{_INT}) / (?P<under>{_INT})
      (?! [0-9] | [./][0-9] )
    |
      (?P<run>\.?[0-9](?:[.,]?[0-9])*+)
      (?: [eE](?P<exp>[+-]?[0-9]++)(?![0-9A-Za-z])
        | \ ?[x×*]\ ?10\^(?P<power>[+-]?[0-9]++) )?
    )""",
  re.VERBOSE,
)
_SENTENCE = re.compile(r'[\n!?]|\.\s')  # its end
_GROUPED = re.compile(r'[1-9][0-9]{0,2}(?:,[0-9]{3})+(?:\.[0-9]+)?')
_DECIMAL = re.compile(r'[0-9]*\.?[0-9]+')

# Beside the number of a box: operations, commands, a minus outside of words;
_OPERATION = re.compile(r'[\\+*<>|!×÷√π∞±≠≤≥≈]|(?<![^\W\d_])-|-(?![^\W\d_])')
_INDEXED = re.compile(r'_\{?[^\W_]')  # 5_000, 101_2
_DIVIDES = re.compile(r'/\s*\Z')  # before it,
# behind it: a power, a division by no unit, a sentence after the first one.
_GOES_ON = re.compile(r'[\s})\]]*\^|\s*/(?!\s*[^\W\d_])|\.\s*\w')


class _Found(NamedTuple):
  """A number, or several that commas join, and where it stands."""

  values: list[_Fraction | None]  # None: cannot be read
  start: int
  end: int


def final_answer(
  text: str, *, lenient: bool = True, truncated: bool = False
) -> _Fraction | None:
  r"""Returns the number that a text gives as its answer.

  Calculator marks (`<<48/2=24>>`) are removed first. Then, in this order:

  1. The last `\boxed{...}`, if it holds one number (`parse`).
  2. The last `#### N`, which a heading (`#### Step 3`) is not.
  3. The last result of the text, in its last 10,000 characters: of the last
     sentence with a number, what its last `=` gives, or else its last number.

  The first of these that is there decides. An unclosed box, or one that holds
  no single number, is an answer that cannot be read.

  Args:
    text: anything.
    lenient: whether the third counts.
    truncated: the text was cut off: its last result may be anything, and that
      of a line that was not ended may lack digits; neither counts.

  Returns:
    The number; None if there is none, or it cannot be read.
  """
  text = without_marks(text)
  box = _box(text)
  if box is not None:
    return parse(box)
  marked = None
  for found in _HASHES.finditer(text):
    if not _HEADING.match(words.signed(found[1])):
      marked = found
  if marked is not None:
    return None if truncated and not marked[2] else parse(marked[1])
  return _last(text) if lenient and not truncated else None


def boxed(text: str) -> _Fraction | None:
  r"""Returns the number of the last `\boxed{...}`; None where it has none."""
  box = _box(without_marks(text))
  return None if box is None else parse(box)


def parse(text: str) -> _Fraction | None:
  r"""Returns the one number that a short text holds, LaTeX or plain.

  Words and units may stand beside it (`x = 5`, `5 \text{ km/h}`); a second
  number, an operation (`5!`, `\sqrt{5}`, `x - 5`), words that operate on it
  (`half of 5`, `at least 5`, `5 squared`: `words.operate`), a letter that may
  be metres or millions (`5m`) or an unknown LaTeX command makes it none.

  Args:
    text: of 1000 characters at most; a longer one holds none.
  """
  if len(text) > LENGTH:
    return None
  plain = latex.plain(text).strip(' \t\r\n*')
  plain = re.sub(r'\A([+-])\s+', r'\1', plain)
  plain = words.signed(plain)
  plain = re.sub(r'(?<=[0-9])\s*/\s*(?=[0-9])', '/', plain)
  found = list(_numbers(plain, dozens=True))
  if len(found) != 1 or len(found[0].values) != 1:
    return None
  before, after = plain[: found[0].start], plain[found[0].end :]
  if (
    _OPERATION.search(f'{before} {after}')
    or _DIVIDES.search(before)
    or _GOES_ON.match(after)
    or words.operate(before, after)
  ):
    return None
  return found[0].values[0]


def without_marks(text: str) -> str:
  """Returns a text without calculator marks: `<<48/2=24>>24` -> `24`."""
  return _MARKS.sub('', text)


def equal(a: _Fraction | None, b: _Fraction | None) -> bool:
  """Returns whether two numbers are the same; None equals nothing."""
  return a is not None and b is not None and a == b


def _last(text: str) -> _Fraction | None:
  """Returns the last result of a text, None where it cannot be read.

  That is 50 in `5 * 10 = 50 miles in 7 hours`.
  """
  if len(text) > TAIL:
    # From a space on, so that no number is cut in two.
    text = re.sub(r'\A\S*', '', text[-TAIL:])
  plain = words.signed(latex.plain(text))
  found = list(_numbers(plain, dozens=False))
  if not found:
    return None
  end = found[-1].start
  start = max((m.end() for m in _SENTENCE.finditer(plain, 0, end)), default=0)
  equals = plain.rfind('=', start, end)
  if equals < 0:
    return found[-1].values[-1]
  return next(x for x in found if x.start > equals).values[0]


def _box(text: str) -> str | None:
  r"""Returns what the last `\boxed{` holds: '' if unclosed, None if none."""
  start = text.rfind('\\boxed{')
  if start < 0:
    return None
  start, depth, skip = start + len('\\boxed{'), 1, False
  for i, char in enumerate(text[start : start + LENGTH + 1]):
    if skip:
      skip = False
    elif char == '\\':
      skip = True
    elif char in '{}':
      depth += 1 if char == '{' else -1
      if not depth:
        return text[start : start + i]
  return ''


def _numbers(text: str, *, dozens: bool) -> Iterator[_Found]:
  """Yields what a plain text has of numbers, in order."""
  for match in _NUMBER.finditer(text):
    start, end = match.span()
    scale, end = words.scale(text, start, end, dozens=dozens)
    before, after = text[max(start - 4, 0) : start], text[end : end + 3]
    behind, digit = before[-1:], _is_digit(before[-2:-1])
    if (
      behind in ('^', '_')
      or (
        match[0][0] != '.'
        and match['digits'] == match[0]
        and _is_letter(behind)
        and not (digit and behind in ('x', 'X'))
      )  # 3x4
      or (behind == ':' and digit)
      or (after[:1] == ':' and _is_digit(after[1:2]))
    ):
      continue
    found = _found(match, before, after)
    if scale is None:
      found.values[-1] = None
    elif found.values[-1] is not None:
      found.values[-1] *= scale
    yield found._replace(end=end)


def _found(match: re.Match, before: str, after: str) -> _Found:
  """Reads a match, given a few characters before it and three after."""
  start = match.start('digits')
  signs = (match['sign'] or '') + (match['late'] or '')
  behind = before.rstrip('$}')[-1:]  # $5$-$3$, {5}-3, \text{now }-3
  tied = _is_digit(behind) or _is_letter(behind) or behind in tuple(')]%+-')
  signed = len(signs) == 1 and not tied
  values = _ratio(match) if match['over'] else _decimals(match, tied)
  if (
    after[:1] == '^'
    or _INDEXED.match(after)
    or _is_foreign(before[-1:])
    or _is_foreign(after[:1])
  ):
    values = [None]
  if signs == '-' and signed and values[0] is not None:
    values[0] = -values[0]
  return _Found(values, match.start() if signed else start, match.end())


def _ratio(match: re.Match) -> list[_Fraction | None]:
  """Returns a fraction or mixed number; `3 5/2` is none, but two."""
  over, under = _exact(match['over']), _exact(match['under'])
  value = over / under if over is not None and under else None
  if match['whole'] is None:
    return [value]
  whole = _exact(match['whole'])
  if value is None or whole is None:
    return [None]
  return [whole + value] if value < 1 else [whole, value]


def _decimals(match: re.Match, tied: bool) -> list[_Fraction | None]:
  """Returns the numbers of a run: one, or those that commas separate."""
  run = match['run']
  if (
    run[0] == '.'
    and match[0] == match['digits']
    and (tied or match.string[match.start() - 1 : match.start()] == '.')
  ):
    run = run[1:]  # `Rs.500`, `...5`: a full stop
  pieces = [run] if _GROUPED.fullmatch(run) else run.split(',')
  values = [_exact(piece) for piece in pieces]
  exponent = match['exp'] or match['power']
  if exponent is not None and values[-1] is not None:
    small = len(exponent) <= 3
    values[-1] = values[-1] * _Fraction(10) ** int(exponent) if small else None
  return values


def _exact(piece: str) -> _Fraction | None:
  digits = piece.replace(',', '')
  short = len(digits) - digits.count('.') <= DIGITS
  return _Fraction(digits) if short and _DECIMAL.fullmatch(digits) else None


def _is_digit(char: str) -> bool:
  return '0' <= char <= '9'


def _is_letter(char: str) -> bool:
  """Of an alphabet with two cases; Chinese writes no spaces around numbers."""
  return char.lower() != char.upper()


def _is_foreign(char: str) -> bool:
  return char.isnumeric() and not char.isascii()
