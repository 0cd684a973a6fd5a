"""Rows as tasks: prompts and demonstrations."""

import json
import pathlib
import subprocess
import sys

import pytest

from posttrain import envs, schema
from posttrain.data import sources
from posttrain.envs import __main__ as command_line
from posttrain.envs import export

ROWS = [
  {'prompt': 'a', 'completion': 'b', 'level': 3},
  {
    'messages': [
      {'role': 'system', 'content': 's'},
      {'role': 'user', 'content': 'u'},
      {'role': 'assistant', 'content': 'x'},
      {'role': 'user', 'content': 'v'},
      {'role': 'assistant', 'content': 'y'},
    ]
  },
]


@pytest.fixture
def path(tmp_path):
  file = tmp_path / 'rows.jsonl'
  file.write_text('\n'.join(json.dumps(row) for row in ROWS))
  return str(file)


def test_tasks_of_rows(path):
  env = envs.make('chats', schema.Rows(path=path))
  single, multi = env.source('train', 0).take(9)
  assert single.prompt == ({'role': 'user', 'content': 'a'},)
  assert single.demonstration == ({'role': 'assistant', 'content': 'b'},)
  assert (single.env, single.id, single.answer, single.info) == (
    'chats',
    f'{path}:1',
    'b',
    {'level': 3},
  )
  assert [m['content'] for m in multi.prompt] == ['s', 'u']
  assert [m['content'] for m in multi.demonstration] == ['x', 'v', 'y']


def test_rows_are_not_graded(path):
  env = envs.make('chats', schema.Rows(path=path))
  task = next(env.source('train', 0))
  episode = env.make(task)
  assert episode.reset() == task.prompt
  assert episode.step('b', truncated=False).done
  assert episode.grade().reward is None and episode.grade().correct is None
  episode.close()


def test_evaluation_rows(path, monkeypatch):
  env = envs.make('chats', schema.Rows(path=path))
  assert len(env.source('eval', 0)) == 0
  monkeypatch.setenv('SOMEWHERE', path)
  both = schema.Rows(path=path, eval_path='$SOMEWHERE')
  assert len(envs.make('chats', both).source('eval', 0)) == 2


@pytest.mark.parametrize(
  'split, field', [('train', 'path'), ('eval', 'eval_path')]
)
def test_missing_file_names_the_key(split, field, tmp_path):
  gone = str(tmp_path / 'gone.jsonl')
  env = envs.make('chats', schema.Rows(path=gone, eval_path=gone))
  with pytest.raises(ValueError, match=rf'envs\.chats\.env\.{field} must '):
    env.source(split, 0)


def test_resuming_with_edited_rows_is_refused(path, tmp_path):
  env = envs.make('chats', schema.Rows(path=path))
  state = env.source('train', 0).get_state()
  moved = tmp_path / 'moved.jsonl'
  text = (tmp_path / 'rows.jsonl').read_text()
  moved.write_text(text)
  env = envs.make('chats', schema.Rows(path=str(moved)))
  env.source('train', 0).set_state(state)  # the same rows, elsewhere
  moved.write_text(text.replace('"b"', '"c"'))
  env = envs.make('chats', schema.Rows(path=str(moved)))
  with pytest.raises(ValueError, match='the fingerprint of a resumed source'):
    env.source('train', 0).set_state(state)


def test_exported_arithmetic_is_read_as_rows(tmp_path):
  options = schema.Arithmetic(train_tasks=40, eval_tasks=10)
  env = envs.make('sums', options)
  folder = str(export.export(env, tmp_path, seed=4))
  other = export.export(env, tmp_path / 'again', seed=5)
  again = export.export(env, tmp_path / 'same', seed=4)
  prints = [
    sources.file_fingerprint(pathlib.Path(p)) for p in (folder, other, again)
  ]
  assert prints[0] != prints[1] and prints[0] == prints[2]
  again = envs.make('rows', schema.Rows(path=folder, eval_path=folder))
  for split, count in (('train', 40), ('eval', 10)):
    made, read = (
      {task.prompt[0]['content']: task for task in source.take(count)}
      for source in (env.source(split, 4), again.source(split, 4))
    )
    assert set(made) == set(read) and len(made) == count
    for key, task in made.items():
      assert read[key].demonstration == task.demonstration
      assert read[key].info == {
        'id': task.id,
        'answer': task.answer,
        'op': task.info['op'],
      }


def test_command_line(tmp_path):
  command = [
    sys.executable,
    '-m',
    'posttrain.envs',
    'arithmetic',
    str(tmp_path),
    '--train_tasks=5',
    '--eval_tasks=3',
    "--ops=('x',)",
    '--worked=False',
  ]
  done = subprocess.run(command, capture_output=True, text=True, check=True)
  folder = done.stdout.splitlines()[-1]
  env = envs.make('rows', schema.Rows(path=folder))
  tasks = env.source('train', 0).take(9)
  assert len(tasks) == 5 and {task.info['op'] for task in tasks} == {'x'}
  assert all(
    task.demonstration[0]['content'].startswith('\\boxed') for task in tasks
  )
  done = subprocess.run(command, capture_output=True, text=True, check=False)
  assert done.returncode == 2 and 'must not exist yet' in done.stderr


@pytest.mark.parametrize(
  'flag, words',
  [
    ('--ops=+', '--ops must be a tuple of texts'),
    ("--ops=('/',)", "ops must hold one or more of '+', '-', 'x'"),
    ('--worked=1', '--worked must be true or false'),
    ('--train_tasks=True', '--train_tasks must be a whole number'),
    ('--ops=(1, [])', 'ops must hold'),
  ],
)
def test_command_line_refuses(flag, words, tmp_path, monkeypatch, capsys):
  argv = ['posttrain.envs', 'arithmetic', str(tmp_path), flag]
  monkeypatch.setattr(sys, 'argv', argv)
  assert command_line.main() == 2
  assert words in capsys.readouterr().err


HEAVY = """
import sys
import posttrain.chat.renderer, posttrain.envs.export, posttrain.data.packing
loaded = {name.partition('.')[0] for name in sys.modules}
assert not loaded & {'jax', 'tensorflow', 'tensorflow_datasets', 'tokenizers',
                     'jinja2'}, loaded
"""


def test_importing_loads_nothing_heavy():
  subprocess.run([sys.executable, '-c', HEAVY], check=True)
