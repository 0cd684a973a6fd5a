"""Generated databases and questions: pinned, answerable, not guessable."""

import os
import re
import sqlite3
import subprocess
import sys
from collections import Counter, defaultdict

import pytest

from posttrain.envs.sql import record, schemas, synth, words

GOLDEN = {
  'train': ('8f34f3f273426e7c9ad8c826be9b4046eaa9ea21c4178a80376216c2fa596056'),
  'eval': ('7f31d732496dd4b9488c43d153511502a4ed5a8f982ba3a327eae4c38dcc776f'),
  'ood': ('3f7d2857e987c685bfc749a1a0bdfdf897ab78479ba6e01260be07fec393ac74'),
}
SEEDS = range(400)


@pytest.fixture(scope='module')
def all_questions():
  return [one for seed in SEEDS for one in synth.questions(seed)]


def run(question, sql):
  """Returns the rows of a query on the question's database, None on error."""
  connection = sqlite3.connect(':memory:')
  connection.deserialize(synth.open_id(question.db_id))
  try:
    return tuple(connection.execute(sql))
  except sqlite3.OperationalError:
    return None
  finally:
    connection.close()


@pytest.mark.parametrize('split', schemas.SPLITS)
def test_the_fingerprint_of_the_data_is_pinned(split):
  """A change makes results incomparable with earlier ones."""
  assert synth.fingerprint(range(30), split) == GOLDEN[split], (
    f'sqlite {sqlite3.sqlite_version}'
  )


def test_the_fingerprint_covers_databases_and_questions():
  prints = [
    synth.fingerprint(seeds, split)
    for seeds in (range(2), range(1), range(1, 2), [1, 0])
    for split in schemas.SPLITS
  ]
  assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
  ('change', 'same'),
  [
    (lambda raw: raw[:96] + b'\0\x2e\x5f\x71' + raw[100:], True),
    (lambda raw: raw.replace(b'name TEXT', b'name BLOB'), False),
  ],
)
def test_the_fingerprint_hashes_contents_and_not_bytes(
  monkeypatch, change, same
):
  """Byte 96 of a file holds the version of SQLite that wrote it."""
  before, raw = synth.fingerprint([7]), change(synth.database(7))
  assert raw != synth.database(7)
  monkeypatch.setattr(synth, 'database', lambda *_: raw)
  assert (synth.fingerprint([7]) == before) == same


@pytest.mark.parametrize('hash_seed', ['1', '2'])
def test_other_processes_generate_the_same_data(hash_seed):
  code = (
    'from posttrain.envs.sql import synth\nprint(synth.fingerprint(range(30)))'
  )
  out = subprocess.run(
    [sys.executable, '-c', code],
    check=True,
    capture_output=True,
    text=True,
    env={**os.environ, 'PYTHONHASHSEED': hash_seed},
  ).stdout
  assert out.strip() == GOLDEN['train']


def test_splits_share_nothing():
  made = {
    split: [schemas.make(seed, split) for seed in range(100)]
    for split in schemas.SPLITS
  }
  ids = [schema.db_id for each in made.values() for schema in each]
  assert len(set(ids)) == 300
  assert ids[0] == 'synth_0' and ids[100] == 'synth_1000000'
  assert ids[299] == 'synth_2000099'
  contents = [schema.tables for each in made.values() for schema in each]
  assert len(set(contents)) == 300
  nouns, names = defaultdict(set), defaultdict(set)
  for split, each in made.items():
    for table in (table for schema in each for table in schema.tables):
      nouns[split].add(table.name)
      names[split] |= {row[1] for row in table.rows}
  assert nouns['ood'] == set(map(words.plural, words.OOD_NOUNS))
  assert names['ood'] == set(words.OOD_NAMES)
  for split in ('train', 'eval'):
    assert nouns[split] == set(map(words.plural, words.NOUNS))
    assert names[split] == set(words.NAMES)


@pytest.mark.parametrize(
  ('seed', 'split'),
  [(0, 'train'), (12, 'train'), (999_999, 'train'), (0, 'eval'), (3, 'ood')],
)
def test_an_id_locates_its_database(seed, split):
  question = synth.questions(seed, split)[4]
  assert schemas.locate(question.db_id) == (seed, split)
  assert question.id == f'{question.db_id}_004'
  assert synth.open_id(question.db_id) == synth.database(seed, split)


@pytest.mark.parametrize(
  'db_id',
  [
    'synth_3000000',
    'synth_-1',
    'synth_',
    'synth_012',
    '12',
    'world_1',
    'synth_²',
  ],
)
def test_unknown_ids_are_refused(db_id):
  with pytest.raises(ValueError, match='db_id must be .* below 3000000: got'):
    synth.open_id(db_id)


@pytest.mark.parametrize(
  ('seed', 'split', 'says'),
  [
    (-1, 'train', '0 .. 999999: got -1'),
    (10**6, 'eval', '0 .. 999999: got 1000000'),
    (0, 'test', "split must be one of .*: got 'test'"),
  ],
)
def test_unknown_seeds_are_refused(seed, split, says):
  for make in (synth.database, synth.questions):
    with pytest.raises(ValueError, match=says):
      make(seed, split)


@pytest.mark.parametrize('split', schemas.SPLITS)
def test_databases_hold_the_rows_of_their_schema(split):
  for seed in range(60):
    schema = schemas.make(seed, split)
    connection = sqlite3.connect(':memory:')
    connection.deserialize(synth.database(seed, split))
    found = connection.execute(
      "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY rowid"
    ).fetchall()
    assert found == [(table.name,) for table in schema.tables]
    for table in schema.tables:
      info = connection.execute(f'PRAGMA table_info({table.name})').fetchall()
      assert [(row[1], row[2]) for row in info] == [
        ('id', 'INTEGER'),
        ('name', 'TEXT'),
        *((column.name, 'INTEGER') for column in table.columns),
      ]
      rows = connection.execute(f'SELECT * FROM {table.name}').fetchall()
      assert tuple(rows) == table.rows
    assert connection.execute('PRAGMA foreign_key_check').fetchall() == []
    connection.close()


def test_sizes_of_tables_cover_their_ranges():
  tables, keys, endings = Counter(), Counter(), Counter()
  for seed in SEEDS:
    schema = schemas.make(seed, 'train')
    tables[len(schema.tables)] += 1
    assert schema.tables[1].foreign_key.parent == 0
    for i, table in enumerate(schema.tables):
      assert 4 <= len(table.rows) <= 9
      assert [row[0] for row in table.rows] == list(
        range(1, len(table.rows) + 1)
      )
      assert len({row[1] for row in table.rows}) == len(table.rows)
      assert 2 <= len(table.concepts) <= 3
      names = [column.name for column in table.columns]
      assert len(set(names)) == len(names)
      assert not set(names) & set(words.CONCEPTS)
      for column in table.concepts:
        values = table.values(column)
        assert len(set(values)) == len(values)
        assert 1 <= min(values) <= max(values) <= 99
        assert column.name in words.CONCEPTS[column.concept]
      key = table.foreign_key
      keys[key is not None] += 1
      if key is not None:
        assert key.parent < i
        noun, ending = key.name.split('_')
        endings[ending] += 1
        assert words.plural(noun) == schema.tables[key.parent].name
  assert set(tables) == {2, 3, 4} and min(tables.values()) > 100
  assert min(keys.values()) > 400
  assert max(endings.values()) < 0.38 * sum(endings.values())


def test_difficulties_are_balanced_and_all_templates_occur(all_questions):
  assert Counter(one.difficulty for one in all_questions) == {
    kind: 3 * len(SEEDS) for kind in record.DIFFICULTIES
  }
  templates = Counter(one.template for one in all_questions)
  assert sorted(templates) == [
    'E1',
    'E2',
    'H1',
    'H2',
    'H3',
    'H4',
    'M1',
    'M2',
    'M3',
    'M4',
  ]
  assert min(templates.values()) > 150
  letters = {'easy': 'E', 'medium': 'M', 'hard': 'H'}
  assert all(
    one.template[0] == letters[one.difficulty] for one in all_questions
  )


def test_ids_and_texts_of_questions_are_unique(all_questions):
  assert len({one.id for one in all_questions}) == len(all_questions)
  assert len({(one.db_id, one.text) for one in all_questions}) == len(
    all_questions
  )


def test_gold_sql_gives_the_gold_rows(all_questions):
  for one in all_questions:
    assert run(one, one.gold_sql) == one.gold_rows
    assert one.gold_rows and None not in one.gold_rows[0]
    assert all(len(row) == 1 for row in one.gold_rows)
    if one.answer_type != 'list':
      kind = {'integer': int, 'string': str}[one.answer_type]
      assert type(one.gold_rows[0][0]) is kind and len(one.gold_rows) == 1
    named = re.findall(r'(?:FROM|JOIN) (\w+)', one.gold_sql)
    assert one.tables == tuple(named)


def cells(schema, table, concept):
  """Maps a table's names to their values of a concept."""
  table = next(each for each in schema.tables if each.name == table)
  column = next(each for each in table.columns if each.concept == concept)
  return {
    row[1]: value
    for row, value in zip(table.rows, table.values(column), strict=True)
  }


def owners(schema, child, parent):
  """Maps a child's names to its owner's."""
  child, parent = (
    next(each for each in schema.tables if each.name == name)
    for name in (child, parent)
  )
  ids = child.values(child.foreign_key)
  return {
    row[1]: parent.rows[i - 1][1]
    for row, i in zip(child.rows, ids, strict=True)
  }


def answer(text, schema):
  """Answers a question from its text, without SQL."""
  rows = {table.name: table.rows for table in schema.tables}
  match text.split():
    case ['how', 'many', t, 'are', 'there']:
      return [len(rows[t])]
    case ['which', 'of', 'the', t, 'is', 'number', i]:
      return [row[1] for row in rows[t] if row[0] == int(i)]
    case ['what', 'is', 'the', c, 'of', name, 'in', t]:
      return [cells(schema, t, c)[name]]
    case ['which', 'of', 'the', t, 'has', 'the', 'most', child]:
      counts = Counter(owners(schema, child, t).values())
      top = max(counts.values())
      return [name for name, count in counts.items() if count == top]
    case ['which', 'of', 'the', t, 'has', 'the', end, c]:
      values = cells(schema, t, c)
      pick = {'highest': max, 'lowest': min}[end](values.values())
      return [name for name, value in values.items() if value == pick]
    case ['how', 'many', t, 'have', c, side, bound]:
      sign = {'above': 1, 'below': -1}[side]
      values = cells(schema, t, c).values()
      return [sum(sign * value > sign * int(bound) for value in values)]
    case ['what', 'is', 'the', 'total', c, 'of', t]:
      return [sum(cells(schema, t, c).values())]
    case ['how', 'many', child, 'belong', 'to', name, 'in', t]:
      return [list(owners(schema, child, t).values()).count(name)]
    case ['which', child, 'belong', 'to', name, 'in', t]:
      return [k for k, v in owners(schema, child, t).items() if v == name]
  asks = re.fullmatch(
    r'what is the highest (\w+) of (\w+) that belong to (\w+) in (\w+)', text
  )
  c, child, name, t = asks.groups()
  values = cells(schema, child, c)
  mine = [k for k, v in owners(schema, child, t).items() if v == name]
  return [max(values[k] for k in mine)]


@pytest.mark.parametrize('split', schemas.SPLITS)
def test_gold_rows_answer_the_text(split):
  """There is no tie, whose text would ask for all of the highest."""
  for seed in range(150):
    schema = schemas.make(seed, split)
    for one in synth.questions(seed, split):
      found = sorted(row[0] for row in one.gold_rows)
      assert sorted(answer(one.text, schema)) == found, one


def test_texts_are_short(all_questions):
  assert max(len(one.text.split()) for one in all_questions) == 13
  assert max(len(one.gold_sql) for one in all_questions) < 140


def guess_column(question, nth):
  """Returns the gold SQL with the nth name of each concept in the text."""
  sql = question.gold_sql
  for concept in set(question.text.split()) & set(words.CONCEPTS):
    trio = words.CONCEPTS[concept]
    sql = re.sub(rf'\b({"|".join(trio)})\b', trio[nth], sql)
  return sql


@pytest.mark.parametrize('nth', range(3))
def test_a_guessed_column_is_rarely_correct(all_questions, nth):
  medium = [one for one in all_questions if one.difficulty == 'medium']
  right = sum(
    run(one, guess_column(one, nth)) == one.gold_rows for one in medium
  )
  assert 0.25 < right / len(medium) < 0.4


@pytest.mark.parametrize('ending', words.SUFFIXES)
def test_a_guessed_foreign_key_is_rarely_correct(all_questions, ending):
  """Even with the correct columns."""
  hard = [one for one in all_questions if one.difficulty == 'hard']
  right = Counter(
    one.template
    for one in hard
    if run(one, re.sub(r'_[a-z]+', f'_{ending}', one.gold_sql)) == one.gold_rows
  )
  count = Counter(one.template for one in hard)
  for template in count:
    assert 0.2 < right[template] / count[template] < 0.43
  assert right.total() / len(hard) < 0.4


@pytest.mark.parametrize(
  ('kind', 'most'), [('easy', 0.12), ('medium', 0.08), ('hard', 0.12)]
)
def test_the_best_constant_answer_is_rarely_correct(all_questions, kind, most):
  """The best constant is the most frequent answer of each template."""
  answers = defaultdict(Counter)
  for one in all_questions:
    if one.difficulty == kind:
      answers[one.template][one.gold_rows] += 1
  best = {key: max(each.values()) for key, each in answers.items()}
  for key, each in answers.items():
    assert best[key] / each.total() < 0.3
  assert sum(best.values()) / (3 * len(SEEDS)) < most
