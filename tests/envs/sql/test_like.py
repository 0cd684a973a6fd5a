"""LIKE, instr and trim, against SQLite's own functions."""

import sqlite3

import hypothesis
import pytest
from hypothesis import strategies as st

from posttrain.envs.sql import like

# Few letters, so that much matches; K and S have relatives beyond ASCII.
_LETTERS = st.text(st.sampled_from('aAbkKsS_%!\0\n éÉ\u212aſ\U0001f600'))
_ANY = st.text(st.characters(exclude_categories=['Cs', 'Cn']))
_NUMBERS = st.one_of(
  st.integers(-(2**63), 2**63 - 1),
  st.integers(-20, 20),
  st.integers(-(10**6), 10**6).map(lambda n: n / 64),
  st.sampled_from(
    [
      0.0,
      -0.0,
      1e20,
      -2e-7,
      1e15,
      1e14,
      123456789012345678.0,
      0.1 + 0.2,
      1e-4,
      1e-5,
      float('inf'),
      -float('inf'),
    ]
  ),
)
_VALUES = st.one_of(_LETTERS, _LETTERS, _ANY, _NUMBERS, st.none())
_OWN = sqlite3.connect(':memory:')
_OURS = sqlite3.connect(':memory:')
for _name, _count, _function in like.FUNCTIONS:
  _OURS.create_function(
    _name,
    _count,
    lambda *values, made=_function: made(lambda cost: None, *values),
  )


def _both(sql: str, *values) -> tuple:
  """Returns the results of SQLite's functions and of ours."""
  return tuple(
    db.execute(f'SELECT {sql}', values).fetchone()[0] for db in (_OWN, _OURS)
  )


_many = hypothesis.settings(
  max_examples=250, derandomize=True, deadline=None, database=None
)


@_many
@hypothesis.given(_VALUES, _VALUES)
def test_like_instr_and_trim_equal_those_of_sqlite(first, second):
  for sql in ('? LIKE ?', '? NOT LIKE ?', 'instr(?, ?)', 'trim(?, ?)'):
    own, ours = _both(sql, first, second)
    assert (own, type(own)) == (ours, type(ours)), sql


@_many
@hypothesis.given(
  _LETTERS, st.lists(st.sampled_from(['a', 'b', '_', '%', 'ab', 'é']))
)
def test_patterns_of_wildcards_match_as_in_sqlite(text, pattern):
  own, ours = _both('? LIKE ?', text, ''.join(pattern))
  assert own == ours


@_many
@hypothesis.given(_VALUES, _VALUES, st.sampled_from('!%_aAé\U0001f600'))
def test_escapes_match_as_in_sqlite(text, pattern, escape):
  own, ours = _both('? LIKE ? ESCAPE ?', text, pattern, escape)
  assert own == ours


@hypothesis.settings(_many, max_examples=150)
@hypothesis.given(st.text(st.sampled_from('aab'), max_size=30), st.data())
def test_a_text_matches_itself_with_wildcards(text, data):
  pattern = ''.join(
    data.draw(st.sampled_from([letter, letter, '_', '%', '%' + letter]))
    for letter in text
  )
  assert _both('? LIKE ?', text, pattern) == (1, 1)


@pytest.mark.parametrize(
  'sql, found',
  [
    ("'a' LIKE NULL", None),
    ("NULL LIKE 'a'", None),
    ("x'61' LIKE 'a'", 0),
    ("'a' LIKE x'61'", 0),
    ("'a' LIKE 'a' ESCAPE NULL", None),
    ("'' LIKE ''", 1),
    ("'' LIKE '%'", 1),
    ("'' LIKE '_'", 0),
    ("'É' LIKE 'é'", 0),
    ("'50%' LIKE '50!%' ESCAPE '!'", 1),
    ("'500' LIKE '50!%' ESCAPE '!'", 0),
    ("'a!' LIKE 'a!' ESCAPE '!'", 0),
    ("1.5 LIKE '1._'", 1),
    ("2.0 LIKE '2.0'", 1),
    ("12 LIKE '_2'", 1),
    ("instr('aé\U0001f600b', 'b')", 4),
    ("instr('abc', 'C')", 0),
    ("instr('abc', '')", 1),
    ("instr(NULL, 'a')", None),
    ("instr(x'6162', 'b')", 2),
    ("trim('xaxbx', 'yx')", 'axb'),
    ("trim('xax', '')", 'xax'),
    ('trim(0.50, 0)', '.5'),
    ("trim('a', NULL)", None),
  ],
)
def test_results_by_hand(sql, found):
  assert _both(sql)[1] == found


@pytest.mark.parametrize('escape', ['', 'ab', 12])
def test_an_escape_must_be_one_character(escape):
  with pytest.raises(ValueError, match='must be a single character'):
    like.like(lambda cost: None, 'a', 'a', escape)


@pytest.mark.parametrize(
  'function, values, cost',
  [
    (like.like, ('%a%', 'a' * 950), 10 + 30),
    (like.like, ('%_%', 'a' * 950), 10 + 30 + 950),
    (like.like, ('%a%', 'a' * 950, '!'), 10 + 30 + 12),
    (like.instr, ('a' * 1950, 'a' * 50), 10 + 1000),
    (like.trim, ('a' * 950, 'a'), 10 + 10),
    (like.instr, (1, 2), 10),
  ],
)
def test_costs_in_instructions(function, values, cost):
  spent = []
  function(spent.append, *values)
  assert sum(spent) == cost
