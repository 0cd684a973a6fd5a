"""Questions from files: the format, its errors, and all of Spider."""

import collections
import json
import os
import pathlib
import shutil

import pytest

from posttrain import envs, schema
from posttrain.envs.sql import __main__ as exporter
from posttrain.envs.sql import actions, database, observations

ALL = ('easy', 'medium', 'hard')


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sql') / 'made'
  exporter.export(str(folder), range(4), 'train')
  return folder


def make(folder, **options):
  data = schema.SqlFiles(
    questions=f'{folder}/questions.json',
    databases=f'{folder}/database',
    **options.pop('data', {}),
  )
  return envs.make(
    'sql', schema.Sql(data=data, **{'difficulties': ALL, **options})
  )


@pytest.fixture
def copied(exported, tmp_path):
  shutil.copytree(exported, tmp_path / 'data')
  return tmp_path / 'data'


def edit(folder, **fields):
  """Changes fields of the second question; None removes a field."""
  path = folder / 'questions.json'
  rows = json.loads(path.read_text())
  rows[1] = {k: v for k, v in {**rows[1], **fields}.items() if v is not None}
  path.write_text(json.dumps(rows))


def test_exported_questions_are_read_back(exported):
  """The same tasks, whether generated or read from files."""
  files = make(exported, data={'eval_share': 0.0}).source('train', 0)
  made = envs.make(
    'sql', schema.Sql(data=schema.SqlSynth(train_databases=4), difficulties=ALL)
  ).source('train', 0)
  assert len(files) == len(made) == 36
  for ours, theirs in zip(files.take(36), made.take(36), strict=True):
    assert (ours.id, ours.prompt, ours.answer) == (
      theirs.id,
      theirs.prompt,
      theirs.answer,
    )
    # Of a file's questions, nobody knows which need no look at the columns.
    assert ours.demonstration[-1] == theirs.demonstration[-1]


def test_splits_hold_whole_databases(exported):
  env = make(exported, data={'eval_share': 0.5})
  ids = [
    {task.info['db_id'] for task in env.source(split, 0).take(100)}
    for split in ('train', 'eval')
  ]
  assert [len(x) for x in ids] == [2, 2] and not ids[0] & ids[1]
  assert not len(make(exported, data={'eval_share': 0.0}).source('eval', 0))


def test_jsonl_with_the_keys_of_sqlenv_is_read(copied):
  path = copied / 'questions.json'
  rows = json.loads(path.read_text())
  for row in rows:
    row['question_id'] = row.pop('id')
    row['database_name'] = row.pop('db_id')
    row['question_text'] = row.pop('question')
    row['tables_involved'] = row.pop('tables')
    row.pop('difficulty')  # told by the number of tables
  path.write_text('\n'.join(map(json.dumps, rows)))
  found = make(copied, data={'eval_share': 0.0}).source('train', 0).take(36)
  assert len(found) == 36
  assert collections.Counter(t.info['difficulty'] for t in found) == {
    'easy': 24,
    'medium': 12,
  }


@pytest.mark.parametrize(
  'fields, words',
  [
    ({'id': None}, "questions.json:2 must have 'id'"),
    ({'gold_answer': []}, "questions.json:2 must have 'gold_answer'"),
    ({'answer_type': 'number'}, "must have 'answer_type': got 'number', expec"),
    ({'answer_type': ['list']}, "got ['list'], expected one of ('integer', "),
    ({'difficulty': 'fiendish'}, "must have 'difficulty': got 'fiendish', exp"),
    ({'id': 1.5}, "'id': got 1.5, expected a text or a whole number"),
    ({'question': 7}, "'question': got 7, expected a text"),
    ({'question': '  '}, "'question': got '  ', expected a text"),
    ({'gold_sql': 9}, "'gold_sql': got 9, expected a text"),
    ({'tables': 'drums'}, "'tables': got 'drums', expected a list of names"),
    ({'tables': 5}, "'tables': got 5, expected a list of names"),
    ({'tables': []}, "'tables': got [], expected a list of names"),
    ({'tables': ['a', 3]}, "'tables': got ['a', 3], expected a list of names"),
    ({'gold_answer': [[]], 'answer_type': 'table'}, 'value that is not null'),
    ({'gold_answer': [[None]]}, 'value that is not null: got [[None]]'),
    ({'gold_answer': [[None], [None]], 'answer_type': 'list'}, 'not null'),
    ({'gold_answer': [[1], []], 'answer_type': 'table'}, 'of [0, 1] cells'),
    ({'gold_answer': [['a']], 'answer_type': 'integer'}, "integer: got 'a'"),
    ({'gold_answer': [[2.5]], 'answer_type': 'integer'}, 'integer: got 2.5'),
    ({'gold_answer': [['a']], 'answer_type': 'float'}, "one float: got 'a'"),
    ({'gold_answer': [[3]], 'answer_type': 'string'}, 'one string: got 3'),
    ({'gold_answer': [[True]]}, 'must have cells that are'),
    ({'n_rows': '3'}, "got '3', expected a whole number, 1 or more"),
    ({'n_rows': True}, 'got True, expected a whole number, 1 or more'),
    ({'n_rows': 0}, 'got 0, expected a whole number, 1 or more'),
    ({'n_rows': 7, 'gold_sql': 'DROP TABLE x'}, 'only SELECT is allowed'),
    ({'n_rows': 7, 'db_id': 'gone'}, 'data.databases must hold the database'),
    ({'db_id': '..'}, 'expected the name of a folder'),
    ({'db_id': '.'}, 'expected the name of a folder'),
    ({'gold_answer': [[{}]]}, 'must have cells that are'),
    ({'gold_answer': [[1], [2]], 'answer_type': 'integer'}, 'one integer'),
    ({'gold_answer': [[1, 2]], 'answer_type': 'list'}, 'one list'),
    ({'gold_answer': [[float('nan')]]}, 'must have finite numbers'),
    ({'db_id': '../x'}, 'expected the name of a folder'),
    ({'db_id': 'nowhere'}, 'nowhere/nowhere.sqlite'),
    ({'id': 'synth_0_000'}, "each id once: got 'synth_0_000'"),
    ({'n_rows': 7}, 'got n_rows=7, expected 1'),
  ],
)
def test_malformed_questions_are_refused(copied, fields, words):
  edit(copied, **fields)
  with pytest.raises(ValueError) as error:
    make(copied)
  assert words in str(error.value)
  assert 'db_id' in fields or 'questions.json' in str(error.value)


@pytest.mark.parametrize(
  'data, words',
  [
    (b'[{"id": "\xff"}]', 'questions.json must be a JSON list of questions'),
    (b'{"id": 1}\n{"id": "\xff"}', "questions.json:1 must have 'db_id'"),
    (b'\n{"id": "\xff"}', 'questions.json:2: a line must be one JSON object'),
    (b'7', 'questions.json:1: a row must be an object: got 7'),
    (b'', 'must hold rows: got none'),
    (b'[7]', 'questions.json:1 must be an object: got 7'),
  ],
)
def test_malformed_files_are_refused(copied, data, words):
  (copied / 'questions.json').write_bytes(data)
  with pytest.raises(ValueError) as error:
    make(copied)
  assert words in str(error.value)


def test_a_byte_order_mark_is_skipped(copied):
  path = copied / 'questions.json'
  before = len(make(copied).source('train', 0))
  path.write_bytes(b'\xef\xbb\xbf' + path.read_bytes())
  assert len(make(copied).source('train', 0)) == before


@pytest.mark.parametrize(
  'sql, words',
  [
    ('DROP TABLE x', 'only SELECT is allowed'),
    ('SELECT x FROM nowhere', 'no such table: nowhere'),
  ],
)
def test_gold_sql_that_does_not_run_is_refused(copied, sql, words):
  edit(copied, gold_sql=sql)
  source = make(copied, data={'eval_share': 0.0}).source('train', 0)
  with pytest.raises(ValueError, match=words) as error:
    source.take(2)
  assert 'question synth_0_001 of envs.sql must have a gold_sql' in str(
    error.value
  )


def test_gold_sql_that_takes_too_long_is_refused(exported, monkeypatch):
  source = make(exported, data={'eval_share': 0.0}).source('train', 0)

  def late(*args):
    raise database.Timeout('a query took over 2.0 s')

  monkeypatch.setattr(database.Database, 'query', late)
  with pytest.raises(ValueError, match='must have a gold_sql .* over 2.0 s'):
    source.take(1)


def test_missing_files_are_refused(exported, tmp_path):
  with pytest.raises(ValueError, match='data.questions must name an existing'):
    make(tmp_path)
  (tmp_path / 'questions.json').write_text('[{')
  with pytest.raises(ValueError, match='data.databases must name an existing'):
    make(tmp_path)
  (tmp_path / 'database').mkdir()
  with pytest.raises(ValueError, match='must be a JSON list'):
    make(tmp_path)
  shutil.copy(exported / 'questions.json', tmp_path)
  with pytest.raises(ValueError, match='database of every question: .*synth_0'):
    make(tmp_path)


def test_difficulties_without_a_question_are_refused(copied):
  rows = json.loads((copied / 'questions.json').read_text())
  rows = [row for row in rows if row['difficulty'] == 'easy']
  (copied / 'questions.json').write_text(json.dumps(rows))
  with pytest.raises(ValueError, match=r"some of \['easy'\]"):
    make(copied, difficulties=('hard',))


@pytest.mark.parametrize('style, whole', [('compact', 774), ('verbose', 788)])
def test_spider(style, whole):
  """The shown result of the gold SQL is correct unless it was cut."""
  root = os.environ.get('POSTTRAIN_DATA')
  if root is None:
    pytest.skip('POSTTRAIN_DATA does not name a folder of real databases')
  env = make(pathlib.Path(root) / 'spider_mini', style=style)
  counts = collections.Counter()
  for split in ('train', 'eval'):
    source = env.source(split, 0)
    for task in source.take(len(source)):
      episode = env.make(task)
      said = episode.step(f'QUERY: {task.info["gold_sql"]}', False)
      shown, error = observations.read(said.messages[0]['content'])
      assert error is None, (task.id, error)
      answer = actions.write('ANSWER', shown.replace('\n', '; '), colon=True)
      assert episode.step(answer, False).done
      counts[shown.endswith(' ...'), episode.grade().correct] += 1
      episode.close()
  assert counts == {(False, True): whole, (True, False): 842 - whole}
