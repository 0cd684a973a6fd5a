"""Ranges of steps in command-line arguments."""

import re

from posttrain.util import foreign


def parse(text: str, name: str) -> range:
  """Returns the steps of a text FROM:TO, both included.

  Args:
    text: the range.
    name: its name in errors, such as '--profile'.

  Raises:
    ValueError: it is no range, or not 1 <= FROM <= TO.
  """
  numbers = re.fullmatch(r'(\d{1,9}):(\d{1,9})', text, re.ASCII)
  first, last = map(int, numbers.groups()) if numbers else (0, 0)
  if not 1 <= first <= last:
    raise ValueError(
      f'{name} must be FROM:TO, two steps with 1 <= FROM <= TO, as in 3:5: got '
      f'{foreign.quote(text)}'
    )
  return range(first, last + 1)
