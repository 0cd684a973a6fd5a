"""Actions as text: the grammar, SQL over several lines, any text at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.envs.sql import dialogue


@pytest.mark.parametrize(
  'text, kind, argument',
  [
    ('DESCRIBE: owl', 'DESCRIBE', 'owl'),
    ('describe owl', 'DESCRIBE', 'owl'),
    ('query:SELECT 1;', 'QUERY', 'SELECT 1;'),
    ('ANSWER: a | b; "c;d"', 'ANSWER', 'a | b; "c;d"'),
    ('ANSWER:', 'ANSWER', ''),
    # The first line that is an action, whatever stands around it.
    ('I look at it first.\nDESCRIBE: owl\nQUERY: SELECT 1', 'DESCRIBE', 'owl'),
    ('ANSWER: 3\n4', 'ANSWER', '3'),
    # Names of tables.
    ('DESCRIBE: `owl`;', 'DESCRIBE', 'owl'),
    ("SAMPLE ['owl']", 'SAMPLE', 'owl'),
    ('QUERY: SELECT a\n FROM t\n \nIt counts.', 'QUERY', 'SELECT a\n FROM t'),
    ('QUERY: SELECT a\n  answer 3', 'QUERY', 'SELECT a'),
    ('QUERY:\nSELECT 1', 'QUERY', 'SELECT 1'),
    (
      'QUERY:\n\n```sql\nSELECT 1\nFROM t\n```\nDone.',
      'QUERY',
      'SELECT 1\nFROM t',
    ),
    ('QUERY: ```SELECT 1```', 'QUERY', 'SELECT 1'),
    ('QUERY: `SELECT 1`', 'QUERY', 'SELECT 1'),
  ],
)
def test_an_action_is_read(text, kind, argument):
  assert dialogue.parse(text) == dialogue.Action(kind, argument, parsed=True)


@pytest.mark.parametrize(
  'text',
  ['SELECT 1', '', 'ANSWERS: 3', 'DESCRIBED owl', '```sql\nSELECT 1\n```'],
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


@pytest.mark.parametrize('piece', [' \n', '\nQUERX ', '\n '])
@pytest.mark.parametrize('before', ['', 'QUERY:', 'QUERY: SELECT', 'SAMPLE '])
def test_long_texts_are_parsed_in_linear_time(before, piece):
  """A quadratic pattern would take minutes."""
  assert dialogue.parse(before + piece * (10**6 // len(piece)))
