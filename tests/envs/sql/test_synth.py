"""Generated databases, questions and words: pinned, answerable, complete."""

import functools
import json
import pathlib
import re
import sqlite3
from collections import Counter

import pytest

from posttrain import schema
from posttrain.chat import rendering
from posttrain.envs.sql import __main__ as command_line
from posttrain.envs.sql import synth

GOLDEN = {
  'train': ('8f34f3f273426e7c9ad8c826be9b4046eaa9ea21c4178a80376216c2fa596056'),
  'eval': ('7f31d732496dd4b9488c43d153511502a4ed5a8f982ba3a327eae4c38dcc776f'),
  'ood': ('3f7d2857e987c685bfc749a1a0bdfdf897ab78479ba6e01260be07fec393ac74'),
}
SEEDS = range(400)


@pytest.fixture(scope='module')
def all_questions():
  return [one for seed in SEEDS for one in synth.ask(seed)]


@pytest.mark.parametrize('split', synth.SPLITS)
def test_the_fingerprint_of_the_data_is_pinned(split):
  """A change makes results incomparable with earlier ones."""
  assert synth.fingerprint(synth.numbers(split, 30)) == GOLDEN[split], (
    f'sqlite {sqlite3.sqlite_version}'
  )


def test_splits_share_nothing():
  made = {
    split: list(map(synth.make, synth.numbers(split, 100)))
    for split in synth.SPLITS
  }
  ids = [
    synth.ask(synth.numbers(split, 1, 99)[0])[0].id for split in synth.SPLITS
  ]
  assert ids == ['synth_99_000', 'synth_1000099_000', 'synth_2000099_000']
  assert len({tables for each in made.values() for tables in each}) == 300
  for split, each in made.items():
    ood = split == 'ood'
    found = [table for tables in each for table in tables]
    nouns = synth.OOD_NOUNS if ood else synth.NOUNS
    assert {table.name for table in found} == {f'{noun}s' for noun in nouns}
    assert {row[1] for table in found for row in table.rows} == set(
      synth.OOD_NAMES if ood else synth.NAMES
    )


def test_difficulties_are_balanced_and_all_templates_occur(all_questions):
  assert Counter(one.difficulty for one in all_questions) == {
    kind: 3 * len(SEEDS) for kind in synth.TEMPLATES
  }
  templates = Counter(one.template for one in all_questions)
  assert set(templates) == {
    x for kind in synth.TEMPLATES.values() for x in kind
  }
  assert min(templates.values()) > 150


FILE = pathlib.Path('configs/sql_tokenizer.json')
COLUMNS = tuple(name for trio in synth.CONCEPTS.values() for name in trio)
ROLES = {
  'nouns': synth.NOUNS,
  'held-out nouns': synth.OOD_NOUNS,
  'tables': tuple(f'{noun}s' for noun in synth.NOUNS + synth.OOD_NOUNS),
  'names': synth.NAMES,
  'held-out names': synth.OOD_NAMES,
  'concepts': tuple(synth.CONCEPTS),
  'columns': COLUMNS + synth.COLUMNS,
  'template': synth.TEMPLATE,
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
  for number in synth.numbers(split, 100):
    for table in synth.make(number):
      texts += [table.name, *table.columns]
      texts += [str(cell) for row in table.rows for cell in row]
    for question in synth.ask(number):
      texts += [question.text, question.gold_sql, str(question.gold_rows)]
  said = {piece for text in texts for piece in pieces(text)}
  assert said - set(synth.vocabulary()) == set()


@functools.cache
def load():
  return rendering.load(
    schema.Tokenizer(path=str(FILE), eos='<|end|>')
  ).tokenizer


def test_the_file_in_configs_is_up_to_date():
  assert FILE.read_text() == synth.tokenizer()


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


@pytest.mark.parametrize('text', ['', ' \t\r\n', 'Ünï côdé 日本 🙂', 'dogs\0'])
def test_every_text_round_trips(text):
  tokenizer = load()
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_files_hold_databases_and_questions(tmp_path, capsys):
  folder = tmp_path / 'deep' / 'set'
  command_line.main([str(folder), '--databases=3', '--split=eval', '--seed0=5'])
  said = capsys.readouterr().out
  assert '3 databases, 27 questions (9 easy, 9 medium, 9 hard)' in said
  assert synth.fingerprint(synth.numbers('eval', 3, 5)) in said
  assert sorted(path.name for path in folder.iterdir()) == [
    'database',
    'questions.json',
    'tokenizer.json',
  ]
  rows = json.loads((folder / 'questions.json').read_text())
  asked = [q for i in synth.numbers('eval', 3, 5) for q in synth.ask(i)]
  assert [row['question'] for row in rows] == [q.text for q in asked]
  for row in rows:
    path = folder / 'database' / row['db_id'] / f'{row["db_id"]}.sqlite'
    connection = sqlite3.connect(f'file:{path}?mode=ro', uri=True)
    gold = [list(cells) for cells in connection.execute(row['gold_sql'])]
    connection.close()
    assert gold == row['gold_answer'] and row['n_rows'] == len(gold)
