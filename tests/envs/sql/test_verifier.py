"""Correct and wrong answers by type; multisets, tolerances, quotes."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.envs.sql import dialogue, verifier

TEXT = st.text(max_size=10) | st.text('|;,"\'`\\ \nnulempty1', max_size=8)
FLOATS = st.floats(allow_nan=False, allow_infinity=False)
CELLS = st.none() | st.integers(-(2**63), 2**63 - 1) | FLOATS | TEXT
GOLDS = st.integers(1, 4).flatmap(
  lambda width: st.lists(st.tuples(*[CELLS] * width), min_size=1, max_size=5)
)
PROPERTY = settings(deadline=None, derandomize=True, max_examples=60)


def judge(said, gold, answer_type):
  """Grades against a gold cell, a list of cells or a list of tuples."""
  if answer_type == 'list':
    gold = [(cell,) for cell in gold]
  elif answer_type != 'table':
    gold = [(gold,)]
  return verifier.correct(said, tuple(gold), answer_type)


RIGHT = [
  (
    'integer',
    42,
    [
      '42',
      '+42',
      '"42"',
      '4.2e1',
      'Final answer: `42`',
      '```text\nAnswer: 42\n```',
    ],
  ),
  ('integer', 1234567, ['1234567', '1,234,567', '1,234,567.00']),
  ('integer', 3.0, ['3', '3.0']),
  ('float', 2.5, ['2.49', '2.525', '25e-1']),
  ('float', 0.0, ['0', '1e-10', '-1e-9']),
  ('string', 'New  York', ['new york', ' NEW\tYORK ', '"New York"']),
  ('string', 'null', ['"null"']),
  (
    'list',
    ['a', 'b', 'a'],
    [
      'a, b, a',
      'a; a; b',
      '"a", "b", "a"',
      "'a', 'b', 'a'",
      '```\na\nb\na\n```',
    ],
  ),
  ('list', ['a, b', 'c'], ['a, b; c', 'c\na, b', '"a, b", c']),
  ('list', [None, 'null'], ['null; "null"', '"null", NULL']),
  # 2 must go to the integer, though 2.01 is nearer to the first number.
  ('list', [2.01, 2], ['2; 2.02', '2.02; 2', '2; 2']),
  (
    'table',
    [('a', 1), ('b', 2)],
    ['a | 1; b | 2', 'b|2\na|1', '"a", 1\n"b", 2'],
  ),
  # Quotes around a whole text are no part of it; those of its cells stay.
  ('list', [';', ';'], ['";"; ";"']),
  ('list', ["Ada's dog"], ["'Ada's dog'"]),
  ('string', 'say "hi", ok', ['"say "hi", ok"']),
  ('table', [(1234, None)], ['1,234 | null']),
]
WRONG = [
  (
    'integer',
    42,
    [
      '',
      '-42',
      'empty',
      '42, 42',
      'nan',
      '42.00000000000000000001',
      '4,2',
      '٤٢',
    ],
  ),
  ('integer', 9007199254740993, ['9007199254740992', '9.007199254740992e15']),
  ('float', 2.5, ['2.53', '2.47', 'nan', '2.5 m']),
  ('float', 1.7e308, ['inf', '1e999', '9e308']),
  ('string', 'New York', ['York', 'New-York']),
  ('string', 'null', ['null', 'NULL', '']),
  ('list', ['a', 'b', 'a'], ['', 'a, b', 'a; b; b', 'a, a, b, b', 'a a b']),
  ('list', ['a, b', 'c'], ['a, b, c', 'a\nb, c']),
  ('list', [';'], ['";"; ";"']),
  ('list', [None], ['', '"null"', 'empty']),
  ('list', [2.01, 2], ['2.02; 2.02', '2.001; 2.001']),
  ('list', ['Rome'], ['```Paris\nRome\n```', 'Paris: Rome']),
  (
    'table',
    [('a', 1), ('b', 2)],
    [
      '',
      'a | 2; b | 1',
      'a | 1',
      'a | 1; b | 2; b | 2',
      'a | 1 | b | 2',
      'a | 1; b | 2 | ',
    ],
  ),
  ('table', [('a', None)], ['a | ', 'a', 'a | "null"']),
]


@pytest.mark.parametrize('answer_type, gold, says', RIGHT)
def test_correct_answers(answer_type, gold, says):
  assert [said for said in says if not judge(said, gold, answer_type)] == []


@pytest.mark.parametrize('answer_type, gold, says', WRONG)
def test_wrong_answers(answer_type, gold, says):
  assert [said for said in says if judge(said, gold, answer_type)] == []


@given(GOLDS)
@PROPERTY
def test_the_written_gold_answer_is_correct(gold):
  answer_type = 'list' if len(gold[0]) == 1 else 'table'
  said = verifier.answer(gold)
  assert '\n' not in said
  assert verifier.correct(said, gold, answer_type)
  assert verifier.correct(f'```\n{said}\n```', gold, answer_type)
  lines = '\n'.join(map(dialogue.row, gold))
  assert verifier.correct(lines, gold, answer_type)


NEAR = st.sampled_from([1.0, 1.005, 1.01, 1.015, 1.02, 1, 2.0, 2.015])


@given(st.integers(1, 2), st.integers(1, 4), st.data())
@settings(deadline=None, derandomize=True, max_examples=200)
def test_matching_of_near_numbers_equals_trying_all_orders(width, count, data):
  rows = st.lists(st.tuples(*[NEAR] * width), min_size=count, max_size=count)
  said, gold = data.draw(rows), data.draw(rows)

  def near(x, y):
    slack = 0.01 * y + 1e-9 if isinstance(y, float) else 0
    return abs(x - y) <= slack

  expected = any(
    all(
      near(x, y)
      for row, other in zip(said, order, strict=True)
      for x, y in zip(row, other, strict=True)
    )
    for order in itertools.permutations(gold)
  )
  answer_type = 'list' if width == 1 else 'table'
  text = verifier.answer(said)
  assert verifier.correct(text, tuple(gold), answer_type) == expected


INFO = {
  'answer_type': 'list',
  'gold_rows': (('a',), ('b',), ('c',), ('d',)),
  'other_golds': ((('x',), ('y',)), (('A 1',), ('B 1',), ('C 1',), ('D 1',))),
}


@pytest.mark.parametrize(
  ('said', 'any_order', 'ranked'),
  [
    ('d; c; b; a', True, False),
    ('x; y', True, True),
    ('y; x', True, False),  # no ties are known
    ('a; b; x; y', False, False),
  ],
)
def test_an_answer_must_equal_one_of_several_golds(said, any_order, ranked):
  assert verifier.equals_any(said, INFO) is any_order
  assert verifier.equals_any(said, {**INFO, 'ranks': (0, 1, 1, 2)}) is ranked
