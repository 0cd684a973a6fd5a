"""Actions as text: the grammar, SQL over several lines, any text at all."""

import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.envs.sql import database, dialogue


@pytest.mark.parametrize(
  'text, kind, argument',
  [
    ('DESCRIBE: owl', 'DESCRIBE', 'owl'),
    ('describe owl', 'DESCRIBE', 'owl'),
    ('  Sample :owl  ', 'SAMPLE', 'owl'),
    ('QUERY SELECT 1', 'QUERY', 'SELECT 1'),
    ('query:SELECT 1;', 'QUERY', 'SELECT 1;'),
    ('ANSWER: a | b; "c;d"', 'ANSWER', 'a | b; "c;d"'),
    ('ANSWER: a: b', 'ANSWER', 'a: b'),
    ('ANSWER:', 'ANSWER', ''),
    ('answer', 'ANSWER', ''),
    ('SAMPLE\nowl', 'SAMPLE', ''),
    # The first line that is an action, whatever stands around it.
    ('I look at it first.\nDESCRIBE: owl\nQUERY: SELECT 1', 'DESCRIBE', 'owl'),
    ('```\nANSWER: 3\n```', 'ANSWER', '3'),
    ('ANSWER: 3\n4', 'ANSWER', '3'),
    ('My answer: 3\nANSWER: 4', 'ANSWER', '4'),
    # Names of tables.
    ('DESCRIBE: `owl`;', 'DESCRIBE', 'owl'),
    ('DESCRIBE: "Grey Owl".', 'DESCRIBE', 'Grey Owl'),
    ("SAMPLE ['owl']", 'SAMPLE', 'owl'),
    ('SAMPLE: main.owl', 'SAMPLE', 'main.owl'),
    # SQL over several lines.
    ('QUERY: SELECT a\nFROM t', 'QUERY', 'SELECT a\nFROM t'),
    ('QUERY: SELECT a\n FROM t\n \nIt counts.', 'QUERY', 'SELECT a\n FROM t'),
    ('QUERY: SELECT a\nFROM t\nANSWER: 3', 'QUERY', 'SELECT a\nFROM t'),
    ('QUERY: SELECT a\n  answer 3', 'QUERY', 'SELECT a'),
    (
      'QUERY: SELECT\n  answer, sample\nFROM t',
      'QUERY',
      'SELECT\n  answer, sample\nFROM t',
    ),
    ('QUERY:\nSELECT 1', 'QUERY', 'SELECT 1'),
    ('QUERY:\n\nSELECT 1', 'QUERY', ''),
    ('QUERY:\nANSWER: 3', 'QUERY', ''),
    (
      'QUERY:\n\n```sql\nSELECT 1\nFROM t\n```\nDone.',
      'QUERY',
      'SELECT 1\nFROM t',
    ),
    ('QUERY: ```SELECT 1```', 'QUERY', 'SELECT 1'),
    ('QUERY: ```SQL SELECT 1``` and', 'QUERY', 'SELECT 1'),
    ('```\nQUERY: SELECT 1\n```', 'QUERY', 'SELECT 1'),
    ('QUERY: `SELECT 1`', 'QUERY', 'SELECT 1'),
    ('QUERY: SELECT `a` FROM `t`', 'QUERY', 'SELECT `a` FROM `t`'),
    ('QUERY: `', 'QUERY', '`'),
  ],
)
def test_an_action_is_read(text, kind, argument):
  assert dialogue.parse(text) == dialogue.Action(kind, argument, parsed=True)


@pytest.mark.parametrize(
  'text',
  [
    'SELECT 1',
    ' \nSELECT 1\n',
    '',
    'ANSWERS: 3',
    'answer=3',
    'an answer 3',
    'DESCRIBED owl',
    '```sql\nSELECT 1\n```',
    'QUERY_1: x',
  ],
)
def test_text_without_an_action_is_read_as_sql(text):
  assert dialogue.parse(text) == dialogue.Action(
    'QUERY', text.strip(), parsed=False
  )


@pytest.mark.parametrize('colon', [True, False])
@pytest.mark.parametrize('kind', dialogue.TYPES)
def test_a_written_action_is_read_back(kind, colon):
  text = dialogue.write(kind, 'a b_1', colon=colon)
  assert text == f'{kind}{":" * colon} a b_1'
  assert dialogue.parse(text) == dialogue.Action(kind, 'a b_1')
  assert dialogue.write(kind, '', colon=colon) == f'{kind}{":" * colon}'


@given(st.text() | st.text('ANSWERQUY:`\n s', max_size=60))
@settings(deadline=None, derandomize=True, max_examples=100)
def test_any_text_is_an_action(text):
  action = dialogue.parse(text)
  assert action.type in dialogue.TYPES
  assert action.argument == action.argument.strip()


@pytest.mark.parametrize('piece', ['a', ' \n', '`', '\nQUERX ', '\n ', '"'])
@pytest.mark.parametrize('before', ['', 'QUERY:', 'QUERY: SELECT', 'SAMPLE '])
def test_long_texts_are_parsed_in_linear_time(before, piece):
  """A quadratic pattern would take minutes."""
  assert dialogue.parse(before + piece * (10**6 // len(piece)))


def test_a_wide_table_is_cut_with_a_mark():
  connection = sqlite3.connect(':memory:')
  columns = ', '.join(f'column_{i} INTEGER' for i in range(150))
  connection.execute(f'CREATE TABLE wide ({columns})')
  wide = database.Database.from_bytes(connection.serialize())
  connection.close()
  for style, limit in (('compact', 400), ('verbose', 2000)):
    text = dialogue.Writer(style, 'tool').table(wide, 'wide')
    assert limit - 20 < len(text) <= limit and text.endswith(' ...')
  wide.close()
