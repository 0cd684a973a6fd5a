"""Files of rows: accepted forms, and errors that name the row."""

import json

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from posttrain.data import row_files

USER = {'role': 'user', 'content': 'hé'}
ASSISTANT = {'role': 'assistant', 'content': 'yo'}


def write(path, *lines):
  path.write_text(
    '\n'.join(x if isinstance(x, str) else json.dumps(x) for x in lines),
    encoding='utf-8',
  )
  return path


def read_one(tmp_path, row):
  (parsed,) = row_files.read(write(tmp_path / 'rows.jsonl', row))
  return parsed


@pytest.mark.parametrize(
  'row, prompt, completion',
  [
    ({'prompt': 'hé', 'completion': 'yo'}, (USER,), (ASSISTANT,)),
    ({'prompt': 'hé', 'completion': [USER, ASSISTANT]}, (USER,), (ASSISTANT,)),
    # For answers that are sampled.
    ({'prompt': 'hé'}, (USER,), ()),
    (
      {'messages': [USER, ASSISTANT, USER, ASSISTANT]},
      (USER,),
      (ASSISTANT, USER, ASSISTANT),
    ),
  ],
)
def test_accepted_columns(tmp_path, row, prompt, completion):
  parsed = read_one(tmp_path, {**row, 'level': 3})
  assert (parsed.prompt, parsed.completion) == (prompt, completion)
  assert parsed.info == {'level': 3}


@pytest.mark.parametrize(
  'row, words',
  [
    ('{"prompt": ', 'one JSON object'),
    ({'conversations': []}, 'ShareGPT'),
    ({'text': 'a'}, "--config.STAGE.envs.ENV.env.columns='{"),
    ({'messages': [USER]}, 'messages must hold an assistant turn'),
    (
      {'prompt': 'a', 'completion': [USER, ASSISTANT]},
      'completion must hold an assistant turn',
    ),
    (
      {'messages': [USER, {'role': 'gpt', 'content': ''}]},
      'messages[1].role must be one of',
    ),
  ],
)
def test_errors_name_file_and_line(tmp_path, row, words):
  good = {'prompt': 'a', 'completion': 'b'}
  path = write(tmp_path / 'rows.jsonl', good, row)
  with pytest.raises(ValueError) as error:
    row_files.read(path)
  assert str(error.value).startswith(f'{path}:2: ')
  assert words in str(error.value)


def test_missing_and_empty_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match='must exist'):
    row_files.read(tmp_path / 'none.jsonl')
  for name, content in (('rows.jsonl', ''), ('rows.csv', 'prompt\n')):
    with pytest.raises(ValueError, match=f'{name}: .* must hold rows'):
      row_files.read(write(tmp_path / name, content))


def test_rows_are_read_again_from_their_lines(tmp_path):
  path = write(tmp_path / 'rows.jsonl', USER, '', ASSISTANT, '  ')
  index = row_files.objects(path)
  expected = [(USER, f'{path}:1'), (ASSISTANT, f'{path}:3')]
  assert list(index) == expected == [index[i] for i in range(len(index))]


def test_columns_of_other_names(tmp_path):
  row = {'question': 'a', 'solution': 'b', 'prompt_id': 7}
  path = write(tmp_path / 'rows.jsonl', row, {**row, 'hint': 'x'})
  columns = {'question': 'prompt', 'solution': 'completion', 'hint': 'why'}
  first, second = row_files.read(path, columns)
  assert first.prompt == ({'role': 'user', 'content': 'a'},)
  assert first.completion == ({'role': 'assistant', 'content': 'b'},)
  assert first.as_text and first.info == {'prompt_id': 7}
  assert second.info == {'prompt_id': 7, 'why': 'x'}


@pytest.mark.parametrize(
  'columns, words',
  [
    ({'question': 'prompt', 'nope': 'why'}, '1: columns must name'),
    ({'question': 'prompt', 'solution': 'prompt'}, '1: .* name of its own'),
  ],
)
def test_wrong_columns_name_the_row(tmp_path, columns, words):
  row = {'question': 'a', 'solution': 'b', 'prompt_id': 7}
  path = write(tmp_path / 'rows.jsonl', row)
  with pytest.raises(ValueError, match=words):
    row_files.read(path, columns)


def stream(table, path):
  with pa.ipc.new_stream(path, table.schema) as writer:
    writer.write_table(table, max_chunksize=1)


WRITERS = {
  'a.parquet': lambda table, path: parquet.write_table(
    table, path, row_group_size=1
  ),
  'a.feather': lambda table, path: feather.write_feather(table, str(path)),
  'a.arrow': stream,
}


@pytest.mark.parametrize('name', WRITERS)
def test_tables_hold_the_rows_of_json(tmp_path, name):
  path = tmp_path / name
  rows = (
    {'messages': [USER, ASSISTANT], 'level': 3},
    {'messages': [USER, {**ASSISTANT, 'name': 'x'}]},  # no null is read
  )
  WRITERS[name](pa.Table.from_pylist(rows), path)
  objects = row_files.objects(path)
  expected = [(row, f'{path}:{i + 1}') for i, row in enumerate(rows)]
  assert list(objects) == expected == [objects[0], objects[1]]


def test_csv(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text(
    '\ufeffprompt,completion,answer\n"1,\n2",yo,\n\nhé,"say ""x""",07\n'
  )
  objects = row_files.objects(path)
  expected = [
    ({'prompt': '1,\n2', 'completion': 'yo', 'answer': ''}, f'{path}:1'),
    ({'prompt': 'hé', 'completion': 'say "x"', 'answer': '07'}, f'{path}:2'),
  ]
  assert list(objects) == expected == [objects[0], objects[1]]


@pytest.mark.parametrize(
  'name, content, message',
  [
    ('a.jsonl', b'\n{"prompt": "\xff"}', 'a.jsonl:2: .*UTF-8'),
    ('a.csv', b'a,b\n1,2\n1,2,3\n', r'a.csv must .*got 3: 1,2,3'),
    ('a.parquet', b'PAR1', 'a.parquet must be a table of its kind'),
  ],
)
def test_a_malformed_file_is_named(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    list(row_files.objects(tmp_path / name))


def test_values_that_json_lacks_are_refused_by_row(tmp_path):
  table = pa.table({'prompt': ['a', 'b'], 'x': pa.array([None, b'x'])})
  parquet.write_table(table, tmp_path / 'a.parquet')
  with pytest.raises(ValueError, match=r'a.parquet:2: x must hold texts'):
    list(row_files.objects(tmp_path / 'a.parquet'))
