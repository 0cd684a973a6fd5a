"""Graders of any text: repetition, broken characters, refusals."""

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from posttrain.rewards import texts

HOSTILE = {
  'NULs': '\0' * 10**6,
  'fences': '```\n' * 250_000,
  'two words': 'a b ' * 250_000,
  'refusals': "i can't " * 125_000,
}


@pytest.mark.parametrize(
  'text, value',
  [
    ('', 0),
    ('one two three four', 0),  # one 4-gram
    ('a a a a a', 1 / 2),
    ('one two three four one two three four', 1 / 5),
    # Signs are units, and white space is none.
    ('!!!!!!', 2 / 3),
    ('one  two\nthree\tfour one two three\xa0four', 1 / 5),
    ('One two three four one two three four', 0),  # letters are compared
  ],
)
def test_repetition_is_the_share_of_4_grams_that_occurred(text, value):
  assert texts.repetition(text) == pytest.approx(value)


@pytest.mark.parametrize(
  'text, broken',
  [
    ('', 0),
    ('plain text\twith\r\nlines\x0b\x0c', 0),
    ('ä, 日本, é, 🙂, \u200d, \u2028, \xa0', 0),
    ('\ufffd', 1),
    ('\x1b[31mred', 1),
    ('\x7f\x80\x9f', 3),
    ('\ud83d', 1),
  ],
)
def test_broken_characters_are_counted(text, broken):
  share = broken / len(text) if text else 0
  assert texts.broken_characters(text) == share


@pytest.mark.parametrize(
  'text',
  [
    "I'm sorry, but I can't help with that.",
    'I\u2019m sorry, but I can\u2019t assist with that request.',
    'As an AI language model, I have no opinion.',
    'I must decline.',
    ' ' * 5_000 + 'I cannot help you.',
  ],
)
def test_a_refusal_is_recognized(text):
  assert texts.refusal(text) == 1


@pytest.mark.parametrize(
  'text',
  [
    '',
    "I'm sorry to hear that. Here is what helps.",
    "I can't help but admire it.",
    'You cannot divide by zero.',
    'As an aid to memory, write it down.',
    'A good answer comes first. ' * 10 + 'I cannot help.',  # not the beginning
    'Das kann ich leider nicht beantworten.',  # English alone
  ],
)
def test_other_texts_are_no_refusals(text):
  assert texts.refusal(text) == 0


def test_grades_have_names_and_leave_out_what_was_not_measured():
  assert texts.grade('Hello.') == {
    'repetition': 0,
    'broken_characters': 0,
    'refusal': 0,
  }
  grades = texts.grade("I can't help.\n```json\n1\n```\n\ufffd")
  assert grades.keys() == texts.GRADERS.keys()
  assert grades['refusal'] == grades['code_syntax'] == 1
  assert grades['broken_characters'] == 1 / 29


@pytest.mark.parametrize('name', HOSTILE)
def test_a_hostile_text_costs_seconds_at_most(name):
  start = time.process_time()
  grades = texts.grade(HOSTILE[name])
  assert time.process_time() - start < 20  # some 1 s
  assert all(0 <= value <= 1 for value in grades.values())


@given(st.text(st.characters(), max_size=200))
@settings(max_examples=300, deadline=None)
def test_every_text_has_grades_in_0_to_1(text):
  for values in (texts.grade(text), texts.grade(f'```py\n{text}\n```')):
    assert all(math.isfinite(x) and 0 <= x <= 1 for x in values.values())


@pytest.mark.parametrize(
  'one, other, length',
  [
    ('', '', 0),
    ('abc', 'abc', 3),
    ('abc', 'cba', 1),
    ('ab' * 40, 'ba' * 40, 79),
    (['Ada', 'Ben', 'Cio'], ('Ada', 'Cio'), 2),
  ],
)
def test_lcs(one, other, length):
  assert texts.lcs(one, other) == texts.lcs(other, one) == length


def table(one, other):
  """Returns the length by Wagner and Fischer's dynamic program."""
  best = [[0] * (len(other) + 1) for _ in range(len(one) + 1)]
  for i, a in enumerate(one):
    for j, b in enumerate(other):
      best[i + 1][j + 1] = (
        best[i][j] + 1 if a == b else max(best[i][j + 1], best[i + 1][j])
      )
  return best[-1][-1]


@given(st.text('abc', max_size=30), st.text('abcd', max_size=30))
@settings(max_examples=200, deadline=None)
def test_lcs_equals_the_dynamic_program(one, other):
  assert texts.lcs(one, other) == table(one, other)
