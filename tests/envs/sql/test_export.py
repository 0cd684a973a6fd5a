"""Generated data as files, in the format of real data."""

import json
import sqlite3

from posttrain.envs.sql import __main__ as command_line
from posttrain.envs.sql import synth


def test_files_hold_databases_and_questions(tmp_path, capsys):
  folder = tmp_path / 'deep' / 'set'
  command_line.main([str(folder), '--databases=3', '--split=eval', '--seed0=5'])
  said = capsys.readouterr().out
  assert '3 databases, 27 questions (9 easy, 9 medium, 9 hard)' in said
  assert synth.fingerprint(range(5, 8), 'eval') in said
  assert sorted(path.name for path in folder.iterdir()) == [
    'database',
    'questions.json',
    'tokenizer.json',
  ]
  asked = [q for seed in (5, 6, 7) for q in synth.ask(seed, 'eval')]
  read = json.loads((folder / 'questions.json').read_text())
  assert len(read) == len(asked)
  for one, question in zip(read, asked, strict=True):
    assert list(one) == [
      'id',
      'db_id',
      'question',
      'gold_sql',
      'answer_type',
      'gold_answer',
      'n_rows',
      'tables',
      'difficulty',
    ]
    assert one['id'] == question.id and one['question'] == question.text
    assert one['tables'] == list(question.tables)
    assert one['n_rows'] == len(one['gold_answer'])
    path = folder / 'database' / one['db_id'] / f'{one["db_id"]}.sqlite'
    connection = sqlite3.connect(f'file:{path}?mode=ro', uri=True)
    rows = [list(row) for row in connection.execute(one['gold_sql'])]
    connection.close()
    assert rows == one['gold_answer'] == [list(r) for r in question.gold_rows]


def test_a_folder_with_files_is_refused(tmp_path, capsys):
  (tmp_path / 'notes.txt').write_text('mine')
  for taken in (tmp_path, tmp_path / 'notes.txt'):
    assert command_line.main([str(taken), '--databases=1']) == 2
    assert f'DIR must be a new or empty folder: got {str(taken)!r}' in (
      capsys.readouterr().err
    )
  assert [path.name for path in tmp_path.iterdir()] == ['notes.txt']
