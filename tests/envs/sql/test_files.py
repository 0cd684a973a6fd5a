"""Real databases: what a file of questions must hold, and all of Spider's."""

import collections
import json
import os
import pathlib
import shutil

import pytest

from posttrain import envs, schema
from posttrain.envs.sql import __main__ as exporter
from posttrain.envs.sql import actions, observations

ALL = ('easy', 'medium', 'hard')


@pytest.fixture(scope='module')
def exported(tmp_path_factory):
  folder = tmp_path_factory.mktemp('sql') / 'made'
  exporter.export(str(folder), range(4), 'train')
  return folder


def make(folder, **options):
  data = schema.SqlFiles(
      questions=f'{folder}/questions.json', databases=f'{folder}/database',
      **options.pop('data', {}),
  )
  return envs.make('sql', schema.Sql(
      data=data, **{'difficulties': ALL, **options}
  ))  # fmt: skip


@pytest.fixture
def copied(exported, tmp_path):
  shutil.copytree(exported, tmp_path / 'data')
  return tmp_path / 'data'


def edit(folder, **fields):
  """Changes fields of the second question; None takes one away."""
  path = folder / 'questions.json'
  rows = json.loads(path.read_text())
  rows[1] = {k: v for k, v in {**rows[1], **fields}.items() if v is not None}
  path.write_text(json.dumps(rows))


def test_generated_questions_come_back_as_they_were(exported):
  """The same tasks, whether generated or read from files."""
  files = make(exported, data={'eval_share': 0.0}).source('train', 0)
  made = envs.make('sql', schema.Sql(
      data=schema.SqlSynth(train_databases=4), difficulties=ALL
  )).source('train', 0)  # fmt: skip
  assert len(files) == len(made) == 36
  for ours, theirs in zip(files.take(36), made.take(36), strict=True):
    assert (ours.id, ours.prompt, ours.answer) == (
        theirs.id, theirs.prompt, theirs.answer
    )  # fmt: skip
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


def test_jsonl_and_the_names_of_sqlenv(copied):
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
      'easy': 24, 'medium': 12,
  }  # fmt: skip


@pytest.mark.parametrize('fields, words', [
    ({'id': None}, "questions.json:2 must have 'id'"),
    ({'gold_answer': []}, "questions.json:2 must have 'gold_answer'"),
    ({'answer_type': 'number'}, 'must have a answer_type of'),
    ({'difficulty': 'fiendish'}, 'must have a difficulty of'),
    ({'gold_answer': [[{}]]}, 'must have cells that are'),
    ({'gold_answer': [[1], [2]], 'answer_type': 'integer'}, 'one integer'),
    ({'gold_answer': [[1, 2]], 'answer_type': 'list'}, 'one list'),
    ({'gold_answer': [[float('nan')]]}, 'must have finite numbers'),
    ({'db_id': '../x'}, 'must name a folder as db_id'),
    ({'db_id': 'nowhere'}, 'nowhere/nowhere.sqlite'),
    ({'id': 'synth_0_000'}, "each id once: got 'synth_0_000'"),
    ({'n_rows': 7}, 'got n_rows=7, expected 1'),
])  # fmt: skip
def test_malformed_questions(copied, fields, words):
  edit(copied, **fields)
  with pytest.raises(ValueError) as error:
    make(copied)
  assert words in str(error.value)


def test_missing_files(exported, tmp_path):
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


def test_no_question_of_a_difficulty(copied):
  rows = json.loads((copied / 'questions.json').read_text())
  rows = [row for row in rows if row['difficulty'] == 'easy']
  (copied / 'questions.json').write_text(json.dumps(rows))
  with pytest.raises(ValueError, match=r"some of \['easy'\]"):
    make(copied, difficulties=('hard',))


@pytest.mark.parametrize('style, whole', [('compact', 774), ('verbose', 788)])
def test_spider(style, whole):
  """Gold SQL, answered by what is shown of it, is right wherever all is."""
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
