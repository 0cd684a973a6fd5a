"""Generated databases, questions and words: pinned, answerable, complete."""

import json
import pathlib
import re
import sqlite3

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


@pytest.mark.parametrize('split', synth.SPLITS)
def test_the_fingerprint_of_the_data_is_pinned(split):
  """A change makes results incomparable with earlier ones."""
  assert synth.fingerprint(synth.numbers(split, 30)) == GOLDEN[split], (
    f'sqlite {sqlite3.sqlite_version}'
  )


def test_splits_share_no_database_and_ood_no_word():
  tables = {
    split: [x for i in synth.numbers(split, 100) for x in synth.make(i)]
    for split in synth.SPLITS
  }
  assert len(set(sum(tables.values(), []))) == sum(map(len, tables.values()))
  names, ood = (
    {name for x in tables[split] for name in (x.name, *(r[1] for r in x.rows))}
    for split in ('train', 'ood')
  )
  assert not names & ood


FILE = pathlib.Path('configs/sql_tokenizer.json')


def pieces(text):
  """Returns the pieces of a text in a word-level tokenizer."""
  return re.findall(r'[A-Za-z]+|[0-9]|[^\sA-Za-z0-9]', text)


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
  cfg = schema.Tokenizer(path=str(FILE), eos='<|end|>')
  made = rendering.load(cfg).tokenizer
  assert [made.decode([i]) for i in made.encode(text)] == pieces


def test_files_hold_databases_and_questions(tmp_path, capsys):
  folder = tmp_path / 'deep' / 'set'
  command_line.main([str(folder), '--databases=3', '--split=eval', '--seed0=5'])
  numbers = synth.numbers('eval', 3, 5)
  assert capsys.readouterr().out.endswith(
    f'set: 3 databases, 27 questions (9 easy, 9 medium, 9 hard), fingerprint '
    f'{synth.fingerprint(numbers)}\n'
  )
  rows = json.loads((folder / 'questions.json').read_text())
  questions = [q for i in numbers for q in synth.ask(i)]
  assert [row['question'] for row in rows] == [q.text for q in questions]
  path = folder / 'database' / 'synth_1000005' / 'synth_1000005.sqlite'
  assert path.read_bytes() == synth.write(1000005)
  assert command_line.main([str(folder), '--databases=3']) == 1
