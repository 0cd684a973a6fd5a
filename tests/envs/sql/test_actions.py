"""Actions as text: the grammar, SQL over several lines, any text at all."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.envs.sql import actions
from tests.envs.sql import growth

LINE = st.text(
  st.characters(blacklist_categories=('Cs',), blacklist_characters='\n')
)


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
  assert actions.parse(text) == actions.Action(kind, argument, parsed=True)


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
  assert actions.parse(text) == actions.Action(
    'QUERY', text.strip(), parsed=False
  )


def test_an_action_is_written():
  assert actions.write('SAMPLE', 'owl', colon=True) == 'SAMPLE: owl'
  assert actions.write('SAMPLE', 'owl', colon=False) == 'SAMPLE owl'
  assert actions.write('ANSWER', '', colon=True) == 'ANSWER:'
  assert actions.write('ANSWER', '', colon=False) == 'ANSWER'
  with pytest.raises(AssertionError):
    actions.write('answer', '3', colon=True)


@given(LINE)
@settings(deadline=None, derandomize=True)
def test_a_written_answer_is_read_back(argument):
  text = actions.write('ANSWER', argument, colon=True)
  assert actions.parse(text) == actions.Action('ANSWER', argument.strip())


@given(
  st.sampled_from(actions.TYPES),
  st.from_regex('[a-z][a-z0-9_ ]*[a-z]'),
  st.booleans(),
)
@settings(deadline=None, derandomize=True)
def test_a_written_action_is_read_back(kind, argument, colon):
  argument = argument.strip()
  text = actions.write(kind, argument, colon=colon)
  assert actions.parse(text) == actions.Action(kind, argument)


@given(st.text() | st.text('ANSWERQUY:`\n s', max_size=60))
@settings(deadline=None, derandomize=True, max_examples=300)
def test_any_text_is_an_action(text):
  action = actions.parse(text)
  assert action.type in actions.TYPES
  assert action.argument == action.argument.strip()


@pytest.mark.parametrize(
  'piece',
  [
    'a',
    ' ',
    '\n',
    ' \n',
    '`',
    'QUERY',
    'QUERY ',
    '\nQUERX ',
    ':',
    '\n ',
    '"',
    '\r',
    '\u2028',
  ],
)
@pytest.mark.parametrize('before', ['', 'QUERY:', 'QUERY: SELECT', 'SAMPLE '])
def test_parsing_is_linear_in_the_length(before, piece):
  text = piece * (10**5 // len(piece))
  assert growth.ratio(lambda x: actions.parse(before + x), text) < 10
