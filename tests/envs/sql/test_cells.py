"""Rows as text: literal cells, quotes, cuts, round trips."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.envs.sql import cells

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
    (2**63 - 1, '9223372036854775807'),
    (2.5, '2.5'),
    (1 / 3, '0.333333'),
    (-0.0, '0'),
    (1234567.0, '1234567'),
    (1e20, '1e+20'),
    ('Ada', 'Ada'),
    ('', '""'),
    ('a;b', '"a;b"'),
    ('a, b', '"a, b"'),
    ('a\nb', '"a\\nb"'),
    ('5" pipe', '"5\\" pipe"'),
    ('null', '"null"'),
    ('nullable', 'nullable'),
  ],
)
def test_a_cell_is_written(value, text):
  assert cells.cell(value) == text


ADA, ABC = [('Ada', 3), ('b;c', None)], [('abc', 1), ('def', 2)]


@pytest.mark.parametrize(
  'rows, style, limit, more, text',
  [
    (ADA, 'compact', 99, False, 'Ada | 3; "b;c" | null'),
    (ADA, 'verbose', 99, False, 'Ada | 3\n"b;c" | null'),
    ([], 'compact', 9, False, 'empty'),
    (ABC, 'compact', 16, False, 'abc | 1; def | 2'),
    (ABC, 'compact', 15, False, 'abc | 1; de ...'),
    # No white space before the mark but its own.
    (ABC, 'compact', 13, False, 'abc | 1; ...'),
    (ABC[:1], 'verbose', 99, True, 'abc | 1 ...'),
    # Rows far beyond the limit are not written: a number has no cells.
    ([('a' * 50,), ('b',), 7], 'compact', 20, False, 'a' * 16 + ' ...'),
  ],
)
def test_rows_are_written_and_cut(rows, style, limit, more, text):
  assert cells.write(rows, style=style, limit=limit, more=more) == text


@given(ROWS, st.sampled_from(cells.STYLES))
@settings(deadline=None, derandomize=True)
def test_written_rows_are_read_back(rows, style):
  text = cells.write(rows, style=style, limit=10**6)
  assert cells.read(text) == [
    [x if x is None or isinstance(x, str) else cells.cell(x) for x in row]
    for row in rows
  ]


@pytest.mark.parametrize(
  'text, rows',
  [
    ('', []),
    (' Empty\n', []),
    ('a | b ; c|d\n e|', [['a', 'b'], ['c', 'd'], ['e', '']]),
    ('""; "" | ""', [[''], ['', '']]),
    ('null | "null" | NULL', [[None, 'null', None]]),
    ('empty | 1', [['empty', '1']]),
    ('"empty"', [['empty']]),
    (' "a;b"  |  c', [['a;b', 'c']]),
    # Quotes that are none.
    ('"a', [['"a']]),
    ('"a" b | c', [['"a" b', 'c']]),
    ('"\\x" | c', [['"\\x"', 'c']]),
  ],
)
def test_text_is_read(text, rows):
  assert cells.read(text) == rows


def test_cells_are_separated_by_commas_or_stand_alone():
  text = 'a, "b,c"; d|e, f'
  assert cells.read(text, between=',') == [['a', 'b,c'], ['d|e', 'f']]
  assert cells.read(text, between='') == [['a, "b,c"'], ['d|e, f']]


@pytest.mark.parametrize('piece', ['"a;', '\\"', '"\\', '\n "'])
def test_long_texts_are_read_in_linear_time(piece):
  """A quadratic pattern would take minutes."""
  text = piece * (300_000 // len(piece))
  assert cells.read(text) and cells.read('"' + text)
