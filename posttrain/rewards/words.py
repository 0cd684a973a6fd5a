r"""English words that change the value of a number.

1. Signs: `negative 5` is -5 anywhere; `minus 5` is -5 only without a minuend:
   at the start of the text, after `=`, `:`, `is` and similar words.
2. Scales multiply: `5 million`, `5\text{ Thousand}`, `2.5 hundred million`,
   `2 dozen`, `5-billion`, `5k`. More than three scales, or a scale next to
   other number words (`5 thousand 300`, `5 hundred-dollar bills`,
   `a hundred and 5`), cannot be read.
3. Operations: a short list of words that change an adjacent number (`half of`,
   `twice`, `at least`, `squared`) or, like `plus`, any number in a box.
   Numbers with them are not read. `about 5` and `5 or so` are 5.

All other words change nothing. In the last result of a text a dozen is a unit
(the answer to "how many dozens" is `24 / 12 = 2 dozen`), and only signs and
scales are read.
"""

import fractions
import math
import re

SCALES = {
  'hundred': 100,
  'thousand': 10**3,
  'million': 10**6,
  'billion': 10**9,
  'trillion': 10**12,
  'dozen': 12,
  'k': 10**3,
}

_PLACE = '|'.join(name for name in SCALES if name not in ('dozen', 'k'))
_SCALE = rf'(?ai:{_PLACE}|dozen)'
_SPELLED = (
  'one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|half'
  '|(?:thir|four|fif|six|seven|eigh|nine)teen'
  f'|(?:twen|thir|for|fif|six|seven|eigh|nine)ty|(?:a )?(?:{_PLACE})'
)
_SPACE = r'[^\S\n]'
_GAP = rf'(?:{_SPACE}|[{{}}$*)])*+\n?(?:{_SPACE}|[{{}}$*])*+-?'

_SIGN = re.compile(
  r"""
    ( (?<![A-Za-z0-9_-]) (?P<negative>negative)
    | (?P<before>
        (?: \A | [=:] | \b(?:is|are|was|be|to|at|of|about|equals)\b )
        [\s{}(*$]*+
      ) (?: minus | (?P<plus>plus) )
    ) [\s{}]++ (?= [$£€]?\ ?\.?[0-9] )""",
  re.VERBOSE | re.IGNORECASE,
)
_SCALED = re.compile(
  rf'(?:[{{}}$*]*+(?ai:k)(?![^\W_]))?(?:{_GAP}{_SCALE}(?ai:s?)(?![^\W_]))*'
)
_NAMES = re.compile(rf'{_SCALE}|(?ai:k)')
_ADDED = re.compile(
  rf'[{{}}$*]*+(?:{_SPACE}++and)?{_SPACE}++(?:[0-9]|(?:{_SPELLED})\b)', re.I
)
_ADJOINED = re.compile(
  rf'(?:{_PLACE})s?}}?(?:{_SPACE}{{1,3}}and)?{_SPACE}{{1,3}}\Z', re.I
)
_COMPOUND = re.compile(r'-[^\W\d_]')  # `5 hundred-dollar bills`
_BY_NUMBER = rf'\s+(?:(?:{_SPELLED})\b(?!-)|[b-hj-z]\b)'  # `times two`, `by x`
_BEFORE = re.compile(
  r"""
    \b (?: half | twice | thrice | double | triple | quadruple | times | not
      | than | at\ (?:least|most) | up\ to | (?<!-)negative
      | (?: thirds? | quarters? | fourths? | fifths? | tenths? | percent
        | square | cube | root ) \s+ of )
    (?: \s+ (?:of|the|an?|about|exactly|or\ equal\ to) )*+ [\s{}($£€]* \Z""",
  re.VERBOSE | re.IGNORECASE,
)
_AFTER = re.compile(
  rf"""
    (?-i: [{{}}$*]*+ (?:[mMbB]|bn)(?![^\W_]|\^|/s\b) )  # metres, millions?
    | [\s{{}})$*-]*+ (?: and\s+ )?
      (?: squared | cubed | factorial | halves | a\ half | one\ half
      | (?:an?|one|two|three)\ (?:third|quarter|fourth|fifth|tenth)s?
      | (?:third|fourth|fifth|sixth|eighth|tenth)s | tenth | bn | quadrillions?
      | at\ (?:least|most) | or\ (?:more|less|fewer|greater|above|below)
      | (?:times|point|over|by|more\ than|less\ than){_BY_NUMBER} )\b
    | [\s{{}}()$*-]*+ (?:{_PLACE}|dozen)(?:ths?|s)?(?![a-z])""",
  re.VERBOSE | re.IGNORECASE,
)
_ANYWHERE = re.compile(
  r'\b(?:plus|minus|(?:divided|multiplied)\s+by'
  rf'|in\s+(?:{_PLACE}|dozen)s?)\b',
  re.I,
)


def signed(text: str) -> str:
  """Returns a text with the written signs of numbers as characters."""
  return _SIGN.sub(
    lambda m: f'{m["before"] or ""}{"+" if m["plus"] else "-"}', text
  )


def scale(
  text: str, start: int, end: int, *, dozens: bool
) -> tuple[fractions.Fraction | None, int]:
  """Reads the scale of the number at `text[start:end]`.

  Args:
    text: a plain text.
    start: start of the number, with its sign and currency.
    end: end of the number.
    dozens: whether a dozen is 12; otherwise it is a unit.

  Returns:
    (factor, end of the scale). The factor is 1 if there is no scale and None if
    it cannot be read.
  """
  adjoined = _ADJOINED.search(text, max(start - 20, 0), start)
  match = _SCALED.match(text, end)
  names = [name.lower() for name in _NAMES.findall(match[0])]
  end = match.end()
  if adjoined or len(names) > 3:
    return None, end
  if names and names[-1] not in ('dozen', 'k') and _ADDED.match(text, end):
    return None, end
  if names and '-' not in match[0] and _COMPOUND.match(text, end):
    return None, end
  factors = [SCALES[name] for name in names if dozens or name != 'dozen']
  return fractions.Fraction(math.prod(factors)), end


def operate(before: str, after: str) -> bool:
  """Returns whether words around a number change its value."""
  return bool(
    _BEFORE.search(before)
    or _AFTER.match(after)
    or _ANYWHERE.search(before)
    or _ANYWHERE.search(after)
  )
