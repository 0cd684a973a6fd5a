"""Blocks of code parse or not; nothing runs, and no text does harm."""

import warnings

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rewards import texts


def block(text, language='python'):
  return f'Here it is:\n\n```{language}\n{text}\n```\nDone.'


@pytest.mark.parametrize(
  'text, value',
  [
    ('```\nprint(\n```', None),  # no language
    (block('print(1)'), 1),
    (block('print('), 0),
    (block(''), 1),  # an empty program
    (block('x = (', 'pycon'), None),
    (block('{"a": [1, 2.5, null]}', 'json'), 1),
    (block("{'a': 1}", 'json'), 0),
    (block('NaN', 'json'), 0),
    (block('x = 1') + block('x = (') + block('[1]', 'json'), 2 / 3),
    # An open block, as one that the token budget cuts.
    ('```python\nprint(1)', 0),
    (block('x = 1') + '\n```json\n1', 1 / 2),
    # Longer fences hold shorter ones; others' blocks hide what is in them.
    ('````python\n"""\n```\n"""\n````', 1),
    ('````\n```python\n(\n```\n````', None),
    # Indented, as within a list.
    ('1. This:\n   ```python\n   if x:\n     y\n   ```', 1),
    ('\t```python\n\tx\n\t```', 1),
    (block('"\\d"'), 1),  # a doubtful escape
    (block('\ud800 = 1'), 0),
    (block('9' * 10_000), 0),  # more digits than Python converts
    (block('(' * 19_000), 0),
    (block('[' * 19_000, 'json'), 0),
    (block('(' * 20_001), None),  # too long to parse
  ],
)
def test_the_share_of_blocks_that_parse(text, value):
  assert texts.code_syntax(text) == value


def test_no_warning_is_shown(recwarn):
  with warnings.catch_warnings():
    warnings.simplefilter('always')
    assert texts.code_syntax(block('"\\d" is 1')) == 1
  assert not recwarn.list


def test_nothing_is_executed(tmp_path):
  path = tmp_path / 'file'
  assert texts.code_syntax(block(f'open({str(path)!r}, "w")')) == 1
  assert texts.code_syntax(block('import no_such_module; 1 / 0')) == 1
  assert not path.exists()


@given(st.text('`pyjson \n(){}"1\t', max_size=80))
@settings(max_examples=300, deadline=None)
def test_every_text_has_a_value(text):
  value = texts.code_syntax(text)
  assert value is None or 0 <= value <= 1
