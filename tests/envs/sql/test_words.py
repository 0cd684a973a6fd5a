"""Words of generated data: one role each, and no word missing."""

import re
import sqlite3
from collections import Counter

import pytest

from posttrain.envs.sql import schemas, synth, words

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


def test_sizes_of_the_word_lists():
  assert len(words.NOUNS) == 32 and len(words.NAMES) == 57
  assert len(words.CONCEPTS) == 12
  assert all(len(trio) == 3 for trio in words.CONCEPTS.values())
  assert len(words.SUFFIXES) == 3


@pytest.mark.parametrize('role', ROLES)
def test_words_are_single_and_ascii(role):
  form = '[A-Z][a-z]+' if 'names' in role else '[a-z]+'
  assert [w for w in ROLES[role] if not re.fullmatch(form, w)] == []


@pytest.mark.parametrize(
  'word',
  [
    *words.NOUNS,
    *words.OOD_NOUNS,
    *COLUMNS,
    *words.NAMES,
    *words.OOD_NAMES,
    *words.CONCEPTS,
  ],
)
def test_no_word_of_a_database_is_a_keyword(word):
  """A keyword, such as order, would need quotes as a name."""
  connection = sqlite3.connect(':memory:')
  for name in (word, words.plural(word)):
    connection.execute(f'CREATE TABLE {name} (id INTEGER, {word} INTEGER)')
    rows = connection.execute(f'SELECT {word} FROM {name} ORDER BY {word}')
    assert rows.fetchall() == []
    connection.execute(f'DROP TABLE {name}')
  connection.close()


def test_the_keyword_test_detects_keywords():
  with pytest.raises(sqlite3.OperationalError, match='near "order"'):
    test_no_word_of_a_database_is_a_keyword('order')


def test_foreign_keys():
  assert [words.foreign_key('dog', end) for end in words.SUFFIXES] == [
    'dog_id',
    'dog_ref',
    'dog_no',
  ]


def test_the_vocabulary_has_no_word_twice():
  vocabulary = words.vocabulary()
  assert len(set(vocabulary)) == len(vocabulary) < 320
  assert vocabulary == words.vocabulary()
  assert set('0123456789') <= set(vocabulary)
  assert {'DESCRIBE', 'SAMPLE', 'QUERY', 'ANSWER'} <= set(vocabulary)


@pytest.mark.parametrize('split', schemas.SPLITS)
def test_the_vocabulary_covers_generated_data(split):
  texts = []
  for seed in range(100):
    for table in schemas.make(seed, split).tables:
      texts += [table.name, *(column.name for column in table.columns)]
      texts += [str(cell) for row in table.rows for cell in row]
    for question in synth.questions(seed, split):
      texts += [question.text, question.gold_sql, str(question.gold_rows)]
  said = {piece for text in texts for piece in pieces(text)}
  assert said - set(words.vocabulary()) == set()


@pytest.mark.parametrize(
  'sql',
  [
    'SELECT * FROM cats',
    'SELECT cat FROM dogs',
    'SELECT FROM dogs',
    'SELECT name FROM dogs JOIN toys ON dogs.id = toys.id',
    'SELECT ( ',
    'SELECT PACE(name) FROM dogs',
    'SELECT name FROM dogs, ',
  ],
)
def test_the_vocabulary_covers_frequent_errors(sql):
  connection = sqlite3.connect(':memory:')
  for table in ('dogs', 'toys'):
    connection.execute(f'CREATE TABLE {table} (id INTEGER, name TEXT)')
  with pytest.raises(sqlite3.OperationalError) as caught:
    connection.execute(sql)
  connection.close()
  assert set(pieces(str(caught.value))) <= {
    *words.vocabulary(),
    'cat',
    'cats',
    'PACE',  # what the query itself said
  }
