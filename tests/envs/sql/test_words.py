"""Words of generated data: one role each, and no word missing."""

import functools
import pathlib
import re
from collections import Counter

import hypothesis
import pytest
from hypothesis import strategies as st

from posttrain import schema
from posttrain.chat import rendering
from posttrain.envs.sql import synth, words

FILE = pathlib.Path('configs/sql_tokenizer.json')
COLUMNS = tuple(name for trio in words.CONCEPTS.values() for name in trio)
ROLES = {
  'nouns': words.NOUNS,
  'held-out nouns': words.OOD_NOUNS,
  'tables': tuple(map(words.plural, words.NOUNS + words.OOD_NOUNS)),
  'names': words.NAMES,
  'held-out names': words.OOD_NAMES,
  'concepts': tuple(words.CONCEPTS),
  'columns': COLUMNS + words.COLUMNS,
  'template': words.TEMPLATE,
}


def pieces(text):
  """Returns the pieces of a text in a word-level tokenizer."""
  return re.findall(r'[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]', text)


def test_no_word_has_two_roles():
  roles = Counter(word.lower() for group in ROLES.values() for word in group)
  assert [word for word, count in roles.items() if count > 1] == []


@pytest.mark.parametrize('split', synth.SPLITS)
def test_the_vocabulary_covers_generated_data(split):
  texts = []
  for seed in range(100):
    for table in synth.make(seed, split):
      texts += [table.name, *(column.name for column in table.columns)]
      texts += [str(cell) for row in table.rows for cell in row]
    for question in synth.ask(seed, split):
      texts += [question.text, question.gold_sql, str(question.gold_rows)]
  said = {piece for text in texts for piece in pieces(text)}
  assert said - set(words.vocabulary()) == set()


@functools.cache
def load():
  return rendering.load(
    schema.Tokenizer(path=str(FILE), eos='<|end|>')
  ).tokenizer


def test_the_file_in_configs_is_up_to_date():
  assert FILE.read_text() == words.tokenizer()


@pytest.mark.parametrize(
  'text, pieces',
  [
    (
      "QUERY SELECT wage WHERE dog_ref = 'Ann'",
      "QUERY| SELECT| wage| WHERE| dog_ref| =| '|Ann|'".split('|'),
    ),
    # A name is the same in quotes and in words; digits stand alone.
    ('result: Ann; 42', ['result', ':', ' ', 'Ann', ';', ' 4', '2']),
    ('COUNT(*)\nleft: 8', ['COUNT', '(', '*', ')', '\n', 'left', ':', ' 8']),
  ],
)
def test_text_is_split_into_pieces(text, pieces):
  made = load()
  assert [made.decode([i]) for i in made.encode(text)] == pieces


@hypothesis.given(st.text())
@hypothesis.settings(deadline=None, derandomize=True, max_examples=50)
def test_every_text_round_trips(text):
  made = load()
  assert (
    made.decode(made.encode(text)) == text.encode('utf-8', 'replace').decode()
  )
