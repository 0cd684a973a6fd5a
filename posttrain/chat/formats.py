"""Checks of formats that a template uses: %, `format`, dates, attribute paths.

A width in a format makes a text of any size from a few characters.
"""

import re
import string
from typing import Any

from posttrain.chat import meter as meters

_PATH_LENGTH, _PATH_PARTS = 64, 8  # of an attribute's path
_DAY = 256  # characters of a format of a date
_DIRECTIVES = frozenset('aAbBcCdDeFgGhHIjmMnpPrRStTuUVwWxXyYzZ')
# What follows the % of a specifier; each text has a match at its start.
_SPECIFIER = re.compile(r'[-#0 +]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?')


def check_percent(meter: meters.Meter, text: str, values: Any) -> None:
  """Checks the widths of % specifiers, and what values may make of them.

  Args:
    meter: the rendering's budget.
    text: the format.
    values: its values.

  Raises:
    Limit: the text would be too large.
  """
  meter.charge(len(text) >> 3)
  specifiers = text.replace('%%', '').split('%')[1:]
  widths = []
  for specifier in specifiers:
    if specifier.startswith('('):
      key, closed, specifier = specifier[1:].partition(')')
      if not closed or '(' in key:
        raise meters.Limit("a key of a format must not have '(' or '%'")
    match = _SPECIFIER.match(specifier)
    widths += match.groups() if match else ()
  _check_format(meter, text, values, len(specifiers), widths)


def check_fields(meter: meters.Meter, text: str, values: Any) -> None:
  """Checks the widths of {} fields; else as `check_percent`."""
  meter.charge(len(text) >> 3)
  count, widths = 0, []
  for _, name, specifier, _ in string.Formatter().parse(text):
    if name is None:
      continue
    count += 1
    check_path(name)
    if specifier and ('{' in specifier or len(specifier) > _PATH_LENGTH):
      raise meters.Limit('a width of a format must be a literal number')
    widths += re.findall(r'\d+', specifier or '')
  _check_format(meter, text, values, count, widths)


def day_format(text: str) -> str:
  """Returns a format of a date; raises Limit where it has other directives."""
  if not isinstance(text, str) or len(text) > _DAY:
    raise meters.Limit(f'a date must have a format of {_DAY} characters')
  for directive in text.replace('%%', '').split('%')[1:]:
    letter = directive.removeprefix('-')[:1]
    if letter not in _DIRECTIVES:
      raise meters.Limit(f'a date cannot be formatted as %{directive[:9]}')
  return text


def _check_format(
  meter: meters.Meter, text: str, values, count: int, widths: list
) -> None:
  meter.charge(20 * count)
  total = 0
  for width in widths:
    if width == '*':
      raise meters.Limit('a width of a format must be a literal number')
    if width and len(width) > 4:
      raise meters.Limit(f'a width of a format is {width[:20]}')
    total += int(width or 0)
  size = meter.size(list(values) if isinstance(values, tuple) else values)
  meter.fits(len(text) + total + 10 * count * size, 'a formatted text')
  meter.charge(count * size >> 5)


def check_path(path: str) -> int:
  parts = 1 + path.count('.') + path.count('[')
  if len(path) > _PATH_LENGTH or parts > _PATH_PARTS:
    raise meters.Limit(
      f'the path of an attribute has {len(path)} characters and {parts} parts'
    )
  return parts
