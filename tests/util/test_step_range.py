"""Ranges of steps: both ends included, and mistakes by name."""

import pytest

from posttrain.util import step_range


@pytest.mark.parametrize(
  ('text', 'steps'), [('1:1', [1]), ('3:5', [3, 4, 5]), ('09:10', [9, 10])]
)
def test_both_ends_are_included(text, steps):
  assert list(step_range.parse(text, '--profile')) == steps


@pytest.mark.parametrize(
  'text',
  ['', '3', '0:2', '5:3', '-1:2', '1:2:3', '1:x', ' 1:2', '1:9999999999'],
)
def test_another_text_is_refused_by_name(text):
  with pytest.raises(ValueError, match='--profile must be FROM:TO.*got') as e:
    step_range.parse(text, '--profile')
  assert repr(text) in str(e.value)
