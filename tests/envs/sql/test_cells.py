"""Rows as text: literal cells, quotes, cuts, round trips."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.envs.sql import cells
from tests.envs.sql import growth

TEXT = st.text(max_size=12) | st.text('|;,"\\ \n\tnulempty', max_size=8)
CELLS = st.none() | st.integers() | st.floats() | TEXT
ROWS = st.integers(1, 4).flatmap(
  lambda width: st.lists(
    st.lists(CELLS, min_size=width, max_size=width), max_size=5
  )
)


@pytest.mark.parametrize(
  'value, text',
  [
    (None, 'null'),
    (0, '0'),
    (-7, '-7'),
    (2**63 - 1, '9223372036854775807'),
    (2.5, '2.5'),
    (1 / 3, '0.333333'),
    (3.0, '3'),
    (-0.0, '0'),
    (1234567.0, '1234567'),
    (1234567.8, '1234568'),
    (99999.96, '100000'),
    (1e20, '1e+20'),
    (1.5e-7, '1.5e-07'),
    ('Ada', 'Ada'),
    ('5', '5'),
    ("it's", "it's"),
    ('a b', 'a b'),
    ('é', 'é'),
    ('', '""'),
    (' a', '" a"'),
    ('a\t', '"a\\t"'),
    ('a;b', '"a;b"'),
    ('a|b', '"a|b"'),
    ('a, b', '"a, b"'),
    ('a\nb', '"a\\nb"'),
    ('5" pipe', '"5\\" pipe"'),
    ('a\\b', 'a\\b'),
    ('null', '"null"'),
    ('Null', '"Null"'),
    ('EMPTY', '"EMPTY"'),
    ('nullable', 'nullable'),
    ('é;', '"é;"'),
  ],
)
def test_a_cell_is_written(value, text):
  assert cells.cell(value) == text


def test_rows_are_written_in_two_styles():
  rows = [('Ada', 3), ('b;c', None)]
  assert cells.write(rows, style='compact', limit=99) == (
    'Ada | 3; "b;c" | null',
    False,
  )
  assert cells.write(rows, style='verbose', limit=99) == (
    'Ada | 3\n"b;c" | null',
    False,
  )
  assert cells.row(rows[0]) == 'Ada | 3'


@pytest.mark.parametrize('style', cells.STYLES)
def test_a_result_without_rows_is_written_as_empty(style):
  assert cells.write([], style=style, limit=9) == ('empty', False)
  assert cells.read('empty') == cells.read(' Empty\n') == []
  assert cells.read('') == cells.read(' ;\n; ') == []


def test_a_text_is_cut_at_the_limit():
  rows = [('abc', 1), ('def', 2)]  # 16 characters
  assert cells.write(rows, style='compact', limit=16) == (
    'abc | 1; def | 2',
    False,
  )
  assert cells.write(rows, style='compact', limit=15) == (
    'abc | 1; de ...',
    True,
  )
  # No white space before the mark but its own.
  assert cells.write(rows, style='compact', limit=13) == ('abc | 1; ...', True)
  assert cells.write(rows, style='compact', limit=4) == (' ...', True)


def test_cut_of_any_text():
  assert cells.cut('abc def', 7) == 'abc def'
  assert cells.cut('abc defg', 7) == 'abc ...'
  assert cells.cut('abc  defg', 8) == 'abc ...'


def test_missing_rows_are_marked():
  rows = [('abc', 1)]
  assert cells.write(rows, style='verbose', limit=99, more=True) == (
    'abc | 1 ...',
    True,
  )
  assert cells.write(rows, style='verbose', limit=11, more=True)[0] == (
    'abc | 1 ...'
  )
  assert cells.write(rows, style='verbose', limit=10, more=True)[0] == (
    'abc | ...'
  )


def test_rows_far_beyond_the_limit_are_not_written():
  class Trap:
    def __iter__(self):
      raise AssertionError('a row that nobody will read')

  text, cut = cells.write(
    [('a' * 50,), ('b',), Trap()], style='compact', limit=20
  )
  assert text == 'a' * 16 + ' ...' and cut


@given(ROWS, st.sampled_from(cells.STYLES), st.integers(4, 80), st.booleans())
@settings(deadline=None, derandomize=True)
def test_a_cut_text_is_a_prefix_of_the_whole_one(rows, style, limit, more):
  whole, _ = cells.write(rows, style=style, limit=10**6)
  text, cut = cells.write(rows, style=style, limit=limit, more=more)
  assert len(text) <= limit
  assert cut == (more or len(whole) > limit)
  if cut:
    assert text.endswith(' ...') and whole.startswith(text[:-4])
  else:
    assert text == whole


@given(ROWS, st.sampled_from(cells.STYLES))
@settings(deadline=None, derandomize=True)
def test_written_rows_are_read_back(rows, style):
  text, _ = cells.write(rows, style=style, limit=10**6)
  assert cells.read(text) == [
    [x if x is None or isinstance(x, str) else cells.cell(x) for x in row]
    for row in rows
  ]


@pytest.mark.parametrize(
  'text, rows',
  [
    ('a', [['a']]),
    ('a | b ; c|d\n e|', [['a', 'b'], ['c', 'd'], ['e', '']]),
    ('a;;b;\n', [['a'], ['b']]),
    ('""; "" | ""', [[''], ['', '']]),
    ('null | "null" | NULL', [[None, 'null', None]]),
    ('empty | 1', [['empty', '1']]),
    ('"empty"', [['empty']]),
    (' "a;b"  |  c', [['a;b', 'c']]),
    ('a\r\nb', [['a'], ['b']]),
    # Quotes that are none.
    ('"a', [['"a']]),
    ('"a; b', [['"a'], ['b']]),
    ('"a" b | c', [['"a" b', 'c']]),
    ('5" pipe; 6" pipe', [['5" pipe'], ['6" pipe']]),
    ('"\\x" | c', [['"\\x"', 'c']]),
    ('"a\\', [['"a\\']]),
  ],
)
def test_text_is_read(text, rows):
  assert cells.read(text) == rows


def test_cells_are_separated_by_commas_or_stand_alone():
  text = 'a, "b,c"; d|e, f'
  assert cells.read(text, between=',') == [['a', 'b,c'], ['d|e', 'f']]
  assert cells.read(text, between='') == [['a, "b,c"'], ['d|e, f']]


@given(st.text() | st.text('|;,"\\ \nau', max_size=40))
@settings(deadline=None, derandomize=True)
def test_any_text_is_read(text):
  for between in ('|', ',', ''):
    rows = cells.read(text, between=between)
    assert all(rows)
    assert '""' in text or [''] not in rows


@pytest.mark.parametrize(
  'piece', ['a', ' ', '"', '"a;', '\\"', '"\\', ';"', '" "', '|', ' \n', '\n "']
)
def test_reading_is_linear_in_the_length(piece):
  text = piece * (25_000 // len(piece))
  assert growth.ratio(cells.read, text) < 10
  assert growth.ratio(lambda x: cells.read('"' + x), text) < 10
