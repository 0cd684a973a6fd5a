"""Checks of numbers from outside."""

import pytest

from posttrain.util import floats


@pytest.mark.parametrize(
  ('value', 'finite'),
  [
    (0, True),
    (-1.5e308, True),
    (2**1023, True),
    (2**1024, False),
    (-(10**400), False),
    (float('inf'), False),
    (float('nan'), False),
  ],
)
def test_numbers_that_are_finite_as_floats(value, finite):
  assert floats.is_finite(value) is finite
