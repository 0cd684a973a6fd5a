"""Actions as text: the grammar, SQL over several lines; rows as text."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.envs.sql import dialogue


@pytest.mark.parametrize(
  'text, kind, argument',
  [
    ('DESCRIBE: owl', 'DESCRIBE', 'owl'),
    ('query:SELECT 1;', 'QUERY', 'SELECT 1;'),
    ('ANSWER: a | b; "c;d"', 'ANSWER', 'a | b; "c;d"'),
    # The first line that is an action, whatever stands around it.
    ('I look at it first.\nDESCRIBE: owl\nQUERY: SELECT 1', 'DESCRIBE', 'owl'),
    ('ANSWER: 3\n4', 'ANSWER', '3'),
    # Names of tables.
    ("SAMPLE ['owl']", 'SAMPLE', 'owl'),
    ('QUERY: SELECT a\n FROM t\n \nIt counts.', 'QUERY', 'SELECT a\n FROM t'),
    ('QUERY: SELECT a\n  answer 3', 'QUERY', 'SELECT a'),
    (
      'QUERY:\n\n```sql\nSELECT 1\nFROM t\n```\nDone.',
      'QUERY',
      'SELECT 1\nFROM t',
    ),
    ('QUERY: ```SELECT 1```', 'QUERY', 'SELECT 1'),
  ],
)
def test_an_action_is_read(text, kind, argument):
  assert dialogue.parse(text) == dialogue.Action(kind, argument, parsed=True)


@pytest.mark.parametrize('text', ['SELECT 1', '', 'ANSWERS: 3'])
def test_text_without_an_action_is_read_as_sql(text):
  assert dialogue.parse(text) == dialogue.Action(
    'QUERY', text.strip(), parsed=False
  )


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
    (1 / 3, '0.333333'),
    (-0.0, '0'),
    (1234567.0, '1234567'),
    ('', '""'),
    ('a;b', '"a;b"'),
    ('a\nb', '"a\\nb"'),
    ('5" pipe', '"5\\" pipe"'),
    ('null', '"null"'),
    ('nullable', 'nullable'),
  ],
)
def test_a_cell_is_written(value, text):
  assert dialogue.cell(value) == text


ADA, ABC = [('Ada', 3), ('b;c', None)], [('abc', 1), ('def', 2)]


@pytest.mark.parametrize(
  'rows, style, more, text',
  [
    (ADA, 'compact', False, 'Ada | 3; "b;c" | null'),
    (ADA, 'verbose', False, 'Ada | 3\n"b;c" | null'),
    (ABC, 'verbose', True, 'abc | 1\ndef | 2 ...'),
    ([('a' * 500,)], 'compact', False, 'a' * 396 + ' ...'),
    # No white space before the mark but its own.
    ([('a' * 395,), ('bcde',)], 'compact', False, 'a' * 395 + '; ...'),
  ],
)
def test_rows_are_written_and_cut(rows, style, more, text):
  shown = dialogue.WRITERS[style]('tool').rows(rows, more)
  assert shown == text


@given(ROWS, st.sampled_from(['; ', '\n']))
@settings(deadline=None, derandomize=True)
def test_written_rows_are_read_back(rows, between):
  text = between.join(map(dialogue.row, rows)) or dialogue.EMPTY
  assert dialogue.read_rows(text) == [
    [x if x is None or isinstance(x, str) else dialogue.cell(x) for x in row]
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
    ('"empty"', [['empty']]),
    # Quotes that are none.
    ('"a', [['"a']]),
    ('"a" b | c', [['"a" b', 'c']]),
  ],
)
def test_text_is_read(text, rows):
  assert dialogue.read_rows(text) == rows


@pytest.mark.parametrize('piece', ['"a;', '\\"'])
def test_long_texts_are_read_in_linear_time(piece):
  """A quadratic pattern would take minutes."""
  text = piece * (300_000 // len(piece))
  assert dialogue.read_rows(text) and dialogue.read_rows('"' + text)
