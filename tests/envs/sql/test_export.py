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
  rows = json.loads((folder / 'questions.json').read_text())
  asked = [q for seed in (5, 6, 7) for q in synth.ask(seed, 'eval')]
  assert [row['question'] for row in rows] == [q.text for q in asked]
  for row in rows:
    path = folder / 'database' / row['db_id'] / f'{row["db_id"]}.sqlite'
    connection = sqlite3.connect(f'file:{path}?mode=ro', uri=True)
    gold = [list(cells) for cells in connection.execute(row['gold_sql'])]
    connection.close()
    assert gold == row['gold_answer'] and row['n_rows'] == len(gold)
