r"""The number that a text gives as its answer, as an exact fraction.

1. `final_answer` chooses the place of the answer: the last box, else GSM8K's
   `#### N`, else the last result of the text. Only the last such place counts:
   if it cannot be read there is no answer, and earlier ones are ignored, so
   that several guesses are worth no more than one.
2. `latex.plain` removes LaTeX: `\frac{3}{4}` becomes `3/4`.
3. `words.signed` replaces written signs: `minus 5` becomes `-5`.
4. `_NUMBER` matches numbers, `_read` returns their values, and `words.scale`
   the factor of a scale word: `5 million`.

A number: at most 64 ASCII digits, as in `7`, `1,234,567`, `1,234.50`, `.5`,
`3.`, `3/4`, `2 1/2`, `1.5e3`, `1.5 x 10^3`. `$`, `£` or `€` may precede it, `%`
(which changes nothing: 50% is 50) or a unit may follow it. A sign counts if it
directly precedes the number or its currency, and does not follow a digit,
letter, closing bracket, `%` or other sign: `5-3` and `COVID-19` hold no
negative number. Commas that do not group by three are separators. No number at
all: digits after a letter (`H2O`), exponents and indices (`cm^2`, `x_1`), clock
times and ratios (`5:30`). Numbers that cannot be read: `2^5`, `1/0`, `1.2.3`,
`5_000`, too many digits, `5²`, digits of other scripts beside ASCII digits.

Every value is a `Fraction`: no rounding, no infinity. No text raises an
exception, and none is slow: the patterns are linear, the lengths bounded.
"""

import fractions
import re
from collections.abc import Iterator
from typing import NamedTuple

from posttrain.rewards import latex, words

DIGITS = 64  # maximum digits of a number
LENGTH = 1000  # maximum characters of a box or a `####` line
TAIL = 10_000  # characters at the end that are searched for the last number

_Fraction = fractions.Fraction
_MARKS = re.compile(r'<<[^<>\n]*>>')
_HASHES = re.compile(r'(?<!#)####(?!#)[^\S\n]*([^\n]*)(\n?)')
_HEADING = re.compile(r'[*_]*[^\W\d_¼-¾⅐-⅞]')
_INT = r'(?:[1-9][0-9]{0,2}(?:,[0-9]{3})++(?![0-9])|[0-9]++)'
_NUMBER = re.compile(
  rf"""
    (?P<sign>[+-])? (?:[$£€]\ ?(?P<inner_sign>[+-])?)?
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
_PARTS = 'whole', 'over', 'under'

# Invalid beside the number of a box: operations, commands, a minus outside of
# words,
_OPERATION = re.compile(r'[\\+*<>|!×÷√π∞±≠≤≥≈]|(?<![^\W\d_])-|-(?![^\W\d_])')
_INDEXED = re.compile(r'_\{?[^\W_]')  # 5_000, 101_2
_DIVIDES = re.compile(r'/\s*\Z')  # before it,
# after it: a power, a division except by a unit, a second sentence.
_CONTINUES = re.compile(r'[\s})\]]*\^|\s*/(?!\s*[^\W\d_])|\.\s*\w')


class _Numbers(NamedTuple):
  """A number, or several joined by commas, and its position."""

  values: list[_Fraction | None]  # None if it cannot be read
  start: int
  end: int


def final_answer(
  text: str, *, lenient: bool = True, truncated: bool = False
) -> _Fraction | None:
  r"""Returns the number that a text gives as its answer.

  Calculator marks (`<<48/2=24>>`) are removed first. The first of these places
  that the text has is read:

  1. The last `\boxed{...}`, which must hold one number (`parse`).
  2. The last `#### N`; a heading (`#### Step 3`) does not count.
  3. The last result in the last 10,000 characters: in the last sentence with a
     number, the number after its last `=`, or else its last number.

  An unclosed box, or one without exactly one number, cannot be read.

  Args:
    text: any text.
    lenient: whether place 3 counts.
    truncated: whether the text was cut off. Then place 3 does not count, nor
      does a `#### N` without a line end, which may lack digits.

  Returns:
    The number; None if there is none or it cannot be read.
  """
  text = without_marks(text)
  box = _box(text)
  if box is not None:
    return parse(box)
  marked = None
  for match in _HASHES.finditer(text):
    if not _HEADING.match(words.signed(match[1])):
      marked = match
  if marked is not None:
    return None if truncated and not marked[2] else parse(marked[1])
  if not lenient or truncated:
    return None
  if len(text) > TAIL:
    # Starts at a space, so that no number is cut in two.
    text = re.sub(r'\A\S*', '', text[-TAIL:])
  plain = words.signed(latex.plain(text))
  runs = list(_numbers(plain, dozens=False))
  if not runs:
    return None
  # 50 in `5 * 10 = 50 miles in 7 hours`.
  end = runs[-1].start
  start = max((m.end() for m in _SENTENCE.finditer(plain, 0, end)), default=0)
  equals = plain.rfind('=', start, end)
  if equals < 0:
    return runs[-1].values[-1]
  return next(x for x in runs if x.start > equals).values[0]


def boxed(text: str) -> _Fraction | None:
  r"""Returns the number in the last `\boxed{...}`; None if there is none."""
  box = _box(without_marks(text))
  return None if box is None else parse(box)


def parse(text: str) -> _Fraction | None:
  r"""Returns the only number in a short text, LaTeX or plain.

  Words and units may stand beside it (`x = 5`, `5 \text{ km/h}`). None if there
  is a second number, an operation (`5!`, `\sqrt{5}`, `x - 5`), words that
  operate on it (`half of 5`, `at least 5`, `5 squared`: `words.operate`), a
  letter that may mean metres or millions (`5m`), or an unknown LaTeX command.

  Args:
    text: any text; None is returned for more than 1000 characters.
  """
  if len(text) > LENGTH:
    return None
  plain = latex.plain(text).strip(' \t\r\n*')
  plain = re.sub(r'\A([+-])\s+', r'\1', plain)
  plain = words.signed(plain)
  plain = re.sub(r'(?<=[0-9])\s*/\s*(?=[0-9])', '/', plain)
  runs = list(_numbers(plain, dozens=True))
  if len(runs) != 1 or len(runs[0].values) != 1:
    return None
  before, after = plain[: runs[0].start], plain[runs[0].end :]
  if (
    _OPERATION.search(f'{before} {after}')
    or _DIVIDES.search(before)
    or _CONTINUES.match(after)
    or words.operate(before, after)
  ):
    return None
  return runs[0].values[0]


def without_marks(text: str) -> str:
  """Returns a text without calculator marks: `<<48/2=24>>24` -> `24`."""
  return _MARKS.sub('', text)


def equal(a: _Fraction | None, b: _Fraction | None) -> bool:
  """Returns whether two numbers are the same; None equals nothing."""
  return a is not None and b is not None and a == b


def _box(text: str) -> str | None:
  r"""Returns the text in the last `\boxed{`: '' if unclosed, None if none."""
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


def _numbers(text: str, *, dozens: bool) -> Iterator[_Numbers]:
  """Yields the numbers of a plain text, in order."""
  for match in _NUMBER.finditer(text):
    start, end = match.span()
    scale, end = words.scale(text, start, end, dozens=dozens)
    before, after = text[max(start - 4, 0) : start], text[end : end + 3]
    last, digit = before[-1:], _is_digit(before[-2:-1])
    if (
      last in ('^', '_')
      or (
        match[0][0] != '.'
        and match['digits'] == match[0]
        and _is_letter(last)
        and not (digit and last in ('x', 'X'))
      )  # 3x4
      or (last == ':' and digit)
      or (after[:1] == ':' and _is_digit(after[1:2]))
    ):
      continue
    run = _read(match, before, after)
    if scale is None:
      run.values[-1] = None
    elif run.values[-1] is not None:
      run.values[-1] *= scale
    yield run._replace(end=end)


def _read(match: re.Match, before: str, after: str) -> _Numbers:
  """Reads a match of `_NUMBER`.

  Args:
    match: the match.
    before: up to four characters before it.
    after: up to three characters after it.
  """
  start = match.start('digits')
  signs = (match['sign'] or '') + (match['inner_sign'] or '')
  last = before.rstrip('$}')[-1:]  # $5$-$3$, {5}-3, \text{now }-3
  tied = _is_digit(last) or _is_letter(last) or last in tuple(')]%+-')
  signed = len(signs) == 1 and not tied
  if match['over']:  # a fraction or a mixed number; `3 5/2` is two numbers
    whole, over, under = (_exact(match[k] or '0') for k in _PARTS)
    value = over / under if over is not None and under else None
    if whole is None or value is None:
      values = [None]
    elif match['whole'] is None or value < 1:
      values = [whole + value]
    else:
      values = [whole, value]
  else:  # one decimal number, or several separated by commas
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
      values[-1] = (
        values[-1] * _Fraction(10) ** int(exponent) if small else None
      )
  if (
    after[:1] == '^'
    or _INDEXED.match(after)
    or any(x.isnumeric() and not x.isascii() for x in (before[-1:], after[:1]))
  ):
    values = [None]
  if signs == '-' and signed and values[0] is not None:
    values[0] = -values[0]
  return _Numbers(values, match.start() if signed else start, match.end())


def _exact(piece: str) -> _Fraction | None:
  digits = piece.replace(',', '')
  short = len(digits) - digits.count('.') <= DIGITS
  return _Fraction(digits) if short and _DECIMAL.fullmatch(digits) else None


def _is_digit(char: str) -> bool:
  return '0' <= char <= '9'


def _is_letter(char: str) -> bool:
  """Returns whether a character has two cases.

  Scripts without case, such as Chinese, write no spaces around numbers.
  """
  return char.lower() != char.upper()
