"""Rows as tasks: prompts and demonstrations."""

import json

from posttrain import schema, types
from posttrain.envs import __main__ as command_line
from posttrain.envs import registry


def write(file, rows):
  file.write_text('\n'.join(json.dumps(row) for row in rows))
  return str(file)


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


def test_tasks_of_rows(tmp_path):
  path = write(tmp_path / 'rows.jsonl', ROWS)
  env = registry.make('chats', schema.Rows(path=path))
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


TOOL = {'type': 'function', 'function': {'name': 'add', 'parameters': {}}}


def test_the_column_tools_is_what_the_policy_is_told_of(tmp_path):
  """A list or its JSON; calls in answers are left to reward functions."""
  values = [[TOOL], json.dumps([TOOL]), None, [], '']
  given = [{'prompt': f'{i}', 'tools': x} for i, x in enumerate(values)]
  path = write(tmp_path / 'rows.jsonl', given)
  env = registry.make('a', schema.Rows(path=path))
  tasks = env.source('train', 0).take(9)
  told = types.Tools((TOOL,), 'text')
  assert [task.tools for task in tasks] == [told, told, None, None, None]


def prompts(env, split):
  return [task.prompt[0]['content'] for task in env.source(split, 0).take(999)]


def test_a_fraction_is_held_out_by_prompt(tmp_path):
  """Rows of one prompt stay together, in whatever order the file has them."""
  rows = [{'prompt': f'{i % 100}', 'completion': f'{i}'} for i in range(300)]
  cfg = schema.Rows(path=write(tmp_path / 'a.jsonl', rows), eval_fraction=0.1)
  env = registry.make('chats', cfg)
  train, held_out = prompts(env, 'train'), prompts(env, 'eval')
  assert len(train) + len(held_out) == 300
  assert not set(train) & set(held_out)
  assert 3 <= len(set(held_out)) <= 20


def test_the_command_writes_a_tfds_data_set(tmp_path, monkeypatch, capsys):
  """Held-out rows are those of the other split, or of a slice."""
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  command = ['arithmetic', str(tmp_path), '--train_tasks=20', '--eval_tasks=5']
  command.append("--ops=('x',)")
  assert not command_line.main(command)
  folder = capsys.readouterr().out.splitlines()[-1]
  for path, eval_path, count in (
    (folder, 'tfds:arithmetic', 20),
    ('tfds:arithmetic:1.0.0:train[5:]', 'tfds:arithmetic:train[:5]', 15),
  ):
    env = registry.make('rows', schema.Rows(path=path, eval_path=eval_path))
    train, held_out = (set(prompts(env, x)) for x in ('train', 'eval'))
    assert (len(train), len(held_out)) == (count, 5)
    assert not train & held_out and all(' x ' in x for x in train)
  assert command_line.main(command) == 2
  assert 'must not exist yet' in capsys.readouterr().err


def test_held_out_prompts_that_are_trained_on_are_counted(tmp_path, caplog):
  names = ('abb', 'bcc')
  path, eval_path = (
    write(tmp_path / f'{x}.jsonl', [{'prompt': y} for y in x]) for x in names
  )
  env = registry.make('chats', schema.Rows(path=path, eval_path=eval_path))
  env.source('train', 0)
  assert not caplog.text
  for _ in range(2):
    env.source('eval', 0)
    env.source('train', 0)
  (record,) = caplog.records
  assert '1 of the 2 prompts of envs.chats.env.eval_path' in record.getMessage()
