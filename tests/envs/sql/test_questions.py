"""Questions from files: the format, its errors, the order, all of Spider."""

import collections
import contextlib
import itertools
import json
import os
import pathlib
import random
import shutil
import sqlite3

import pytest

from posttrain import schema
from posttrain.envs import registry
from posttrain.envs.sql import __main__ as exporter
from posttrain.envs.sql import database, dialogue, questions, verifier

ALL = ('easy', 'medium', 'hard')


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sql') / 'made'
  exporter.main([str(folder), '--databases=4'])
  return folder


def make(folder, eval_share=0.0, **options):
  data = schema.SqlFiles(
    questions=f'{folder}/questions.json',
    databases=f'{folder}/database',
    eval_share=eval_share,
    **options,
  )
  return registry.make('sql', schema.Sql(data=data, difficulties=ALL))


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
  files = make(exported).source('train', 0)
  made = registry.make(
    'sql', schema.Sql(data=schema.SqlSynth(train_databases=4), difficulties=ALL)
  ).source('train', 0)
  assert len(files) == len(made) == 36
  # Of a file's questions, nobody knows which need no look at the columns.
  ours, theirs = (
    [(t.id, t.prompt, t.answer, t.demonstration[-1]) for t in x.take(36)]
    for x in (files, made)
  )
  assert ours == theirs


def test_splits_hold_whole_databases(exported):
  env = make(exported, 0.5)
  ids = [
    {task.info['db_id'] for task in env.source(split, 0).take(100)}
    for split in ('train', 'eval')
  ]
  assert [len(x) for x in ids] == [2, 2] and not ids[0] & ids[1]


def refused(folder, words):
  with pytest.raises(ValueError) as error:
    make(folder)
  assert words in str(error.value) and 'questions.json' in str(error.value)


@pytest.mark.parametrize(
  'fields, words',
  [
    ({'gold_answer': [[None]]}, 'value that is not null: got [[None]]'),
    ({'n_rows': 7}, 'must have 7 rows: got 1'),
    ({'ordered': 1}, "'ordered' true or false: got (1, 1)"),
  ],
)
def test_malformed_questions_are_refused(copied, fields, words):
  edit(copied, **fields)
  refused(copied, words)


def test_all_refusals_are_told_at_once_or_left_out(copied, caplog):
  path = copied / 'questions.json'
  rows = json.loads(path.read_text())
  rows[3]['gold_sql'] = "SELECT replace('a', 'b', 'c')"
  rows[8]['answer_type'] = 'number'
  rows[30]['id'] = rows[0]['id']
  path.write_text(json.dumps(rows))
  refused(copied, 'and 3 refusals')
  for words in ("json:4: 'gold_sql'", "json:9: 'answer_type'", 'synth_0_000'):
    assert words in caplog.text
  env = make(copied, skip_refused=True)
  assert '3 of 36 questions are refused' in caplog.text
  assert len(env.source('train', 0)) == 33


def test_questions_of_spider_get_the_result_of_their_query(copied, caplog):
  path = copied / 'questions.json'
  rows = json.loads(path.read_text())
  ours = make(copied).source('train', 0).take(99)
  spider = [
    {'db_id': x['db_id'], 'question': x['question'], 'query': x['gold_sql']}
    for x in rows
  ]
  spider[5]['query'] += ' LIMIT 0'
  path.write_text(json.dumps(spider))
  theirs = make(copied).source('train', 0).take(99)
  assert 'questions.json:6: ' in caplog.text and '1 of 36' in caplog.text
  assert [x.id for x in theirs[4:6]] == ['questions.json:5', 'questions.json:7']
  names = 'text', 'gold_rows', 'answer_type', 'gold_sql'
  golds = [[x.info[name] for name in names] for x in (*ours[:5], *ours[6:])]
  assert golds == [[x.info[name] for name in names] for x in theirs]
  assert all(
    set(x.info['tables']) <= set(y.info['tables'])
    for x, y in zip((*ours[:5], *ours[6:]), theirs, strict=True)
  )


def answers(env, *texts):
  """Returns whether each answer to the second question is correct."""
  task = env.source('train', 0).take(2)[1]
  results = []
  for text in texts:
    episode = env.make(task)
    episode.step(f'ANSWER: {text}', False)
    results.append(episode.grade().correct)
  return results


def test_the_order_of_rows_counts_where_it_is_asked_for(copied):
  path = copied / 'database' / 'synth_0' / 'synth_0.sqlite'
  with contextlib.closing(sqlite3.connect(path)) as connection:
    connection.executescript("""CREATE TABLE pet (name TEXT, age INT);
      INSERT INTO pet VALUES
      ('Eve', 5), ('Cid', 2), ('Ann', 1), ('Bob', 2), ('bob', 9)""")
  edit(
    copied,
    gold_sql='SELECT name FROM pet WHERE age < 9 ORDER BY age -- x',
    gold_answer=['Ann', 'Cid', 'Bob', 'Eve'],
    n_rows=None,
    answer_type='list',
  )
  says = (
    'Ann; Cid; Bob; Eve',
    'Ann, Bob, Cid, Eve',  # a tie
    'Bob; Ann; Cid; Eve',
  )
  assert answers(make(copied), *says) == [True] * 3
  assert answers(make(copied, ordered=True), *says) == [True, True, False]
  edit(copied, ordered=True)
  assert answers(make(copied), *says) == [True, True, False]
  edit(copied, gold_answer=['Cid', 'Ann', 'Bob', 'Eve'])
  refused(copied, 'must be in the order of its gold_sql')


def test_dates_in_gold_sql_have_the_declared_time(copied):
  edit(
    copied,
    gold_sql="SELECT strftime('%Y', 'now') - 2000",
    gold_answer=[[12]],
    answer_type='integer',
  )
  env = make(copied, now='2012-03-04 00:00:00')
  task = env.source('train', 0).take(2)[1]
  assert task.demonstration[-1]['content'] == 'ANSWER 12'


def order_of(sql):
  db = database_of(ROWS)
  return questions.read_order(db, sql, len(db.query(sql, 99).rows))


def database_of(rows):
  connection = sqlite3.connect(':memory:')
  connection.execute('CREATE TABLE t (a TEXT COLLATE NOCASE, b, c)')
  connection.executemany('INSERT INTO t VALUES (?, ?, ?)', rows)
  connection.commit()
  limits = database.Limits(steps=10_000_000, sql_length=9000, column=128)
  return database.Database(connection.serialize(), limits)


ROWS = [('x', 3, 1), ('y', 1, 2), ('X', 1, 1), ('z', 2, 2), ('y', 1, 3)]


@pytest.mark.parametrize(
  ('sql', 'expected'),
  [
    ('SELECT a, c FROM t ORDER BY c DESC', (0, 1, 1, 2, 2)),
    # x and X are one key of this column, and are not equal.
    ("SELECT a FROM t WHERE a = 'x' ORDER BY a", (0, 0)),
    ('SELECT a FROM t ORDER BY b LIMIT 3 OFFSET 1', (0, 0, 1)),
    ('SELECT a, b FROM t UNION SELECT 7, 8 ORDER BY 2', (0, 0, 1, 2, 3)),
    ('SELECT b, count(*) FROM t GROUP BY b ORDER BY count(*)', (0, 0, 1)),
    ('SELECT DISTINCT b FROM t ORDER BY b % 2', (0, 1, 1)),
  ],
)
def test_ranks(sql, expected):
  assert order_of(sql).ranks == expected


@pytest.mark.parametrize(
  ('tail', 'start', 'rows'),
  [
    ('', 0, 'X y y z x'),
    ('LIMIT 2', 0, ''),  # which two of three is open
    ('LIMIT 3 OFFSET 1', 2, 'z'),
  ],
)
def test_rows_of_whole_ties(tail, start, rows):
  order = order_of(f'SELECT a FROM t ORDER BY b {tail}')
  assert (order.start, [a for (a,) in order.rows]) == (start, rows.split())


def test_every_valid_order_is_right_and_no_other():
  rng = random.Random(0)
  for _ in range(20):
    rows = [(rng.choice('xyz'), rng.randrange(3), i) for i in range(5)]
    db = database_of(rows)
    gold = db.query('SELECT a FROM t ORDER BY b', 9).rows
    ranks = questions.read_order(db, 'SELECT a FROM t ORDER BY b', 5).ranks
    valid = {
      tuple(rows[i][0] for i in order)
      for order in itertools.permutations(range(5))
      if [rows[i][1] for i in order] == sorted(row[1] for row in rows)
    }
    for said in set(itertools.permutations(row[0] for row in rows)):
      right = verifier.correct('; '.join(said), gold, 'list', ranks)
      assert right == (said in valid)


def test_spider():
  """The shown result of the gold SQL is correct unless it was cut."""
  root = os.environ.get('POSTTRAIN_DATA')
  if root is None:
    pytest.skip('POSTTRAIN_DATA does not name a folder of real databases')
  env = make(pathlib.Path(root) / 'spider_mini')
  counts = collections.Counter()
  for task in env.source('train', 0).take(10**6):
    episode = env.make(task)
    said = episode.step(f'QUERY: {task.info["gold_sql"]}', False)
    shown, error = dialogue.read(said.messages[0]['content'])
    assert error is None, (task.id, error)
    answer = dialogue.write('ANSWER', shown.replace('\n', '; '), colon=True)
    assert episode.step(answer, False).done
    counts[shown.endswith(' ...'), episode.grade().correct] += 1
    episode.close()
  assert counts == {(False, True): 774, (True, False): 68}
