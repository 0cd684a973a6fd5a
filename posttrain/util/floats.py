"""Checks of numbers from outside, which may be integers of any size."""

import math


def is_finite(value: int | float) -> bool:
  """Returns whether a number is finite as a float: 10**400 is not."""
  try:
    return math.isfinite(value)
  except OverflowError:
    return False
