"""Files of rows: accepted forms, and errors that name the row."""

import datetime
import json

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from posttrain.chat import rendering
from posttrain.data import row_files
from posttrain.envs import base

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


SHAREGPT = [{'from': 'human', 'value': 'hé'}, {'from': 'gpt', 'value': 'yo'}]
ALPACA = {'instruction': 'hé', 'input': '', 'output': 'yo'}


@pytest.mark.parametrize(
  'row, line',
  [
    ({'conversations': SHAREGPT}, "['conversations'] are read as ['messages']"),
    ({'conversations': [USER, ASSISTANT]}, "['conversations'] are read"),
    (
      ALPACA,
      "['input', 'instruction', 'output'] are read as ['completion', 'prompt']",
    ),
    # Rows of our own form may have such columns.
    ({'prompt': 'hé', 'completion': 'yo', 'output': 'no', 'level': 3}, ''),
  ],
)
def test_columns_of_other_formats_are_recognised(tmp_path, caplog, row, line):
  parsed = read_one(tmp_path, row)
  assert (parsed.prompt, parsed.completion) == ((USER,), (ASSISTANT,))
  assert line in caplog.text and bool(line) == bool(caplog.text)
  assert parsed.info == ({} if line else {'output': 'no', 'level': 3})
  columns = {next(iter(row)): 'other', 'text': 'prompt'}
  path = write(tmp_path / 'b.jsonl', {**row, 'text': 'mine'})
  (parsed,) = row_files.read(path, columns)
  assert parsed.prompt[0]['content'] == 'mine' and 'other' in parsed.info


@pytest.mark.parametrize(
  'row, line',
  [
    ({'messages': SHAREGPT}, '`from` and `value` of messages are read as'),
    (
      {'prompt': 'hé', 'completion': [USER, ASSISTANT]},
      'completion begins with the prompt, which is taken off it',
    ),
    ({'prompt': [USER], 'completion': [ASSISTANT]}, ''),
  ],
)
def test_what_is_changed_is_said_once(tmp_path, caplog, row, line):
  rendering.note.cache_clear()
  path = write(tmp_path / 'a.jsonl', row, {**row, 'level': 3})
  completions = [parsed.completion for parsed in row_files.read(path)]
  assert completions == [(ASSISTANT,)] * 2
  assert caplog.text.count(line) == 1 if line else not caplog.text


def test_a_json_file_is_a_list_or_lines(tmp_path):
  expected = [(USER, 1), (ASSISTANT, 2)]
  path = tmp_path / 'rows.json'
  for text in ('\n [{},\n{}]\n', '{}\n{}\n'):
    path.write_text(
      text.replace('{}', '%s') % (*map(json.dumps, (USER, ASSISTANT)),)
    )
    index = row_files.objects(path)
    assert [*index] == [(row, f'{path}:{i}') for row, i in expected]
  for text, words in (('[7]', 'must hold JSON objects'), ('[', 'must be JSON')):
    path.write_text(text)
    with pytest.raises(ValueError, match=f'rows.json.* {words}'):
      row_files.objects(path)


def test_other_columns_of_alpaca_and_sharegpt_are_turns(tmp_path):
  row = ALPACA | {'input': '1 2'}
  assert read_one(tmp_path, row).prompt[0]['content'] == 'hé\n\n1 2'
  system = {'role': 'system', 'content': 'be'}
  for row in (
    {'messages': [USER, ASSISTANT], 'system': 'be'},
    {'messages': [system, USER, ASSISTANT], 'system': 'be'},
    {'prompt': [USER], 'messages': [USER, ASSISTANT], 'system': 'be'},
    {'prompt': 'hé', 'system': 'be'},
    {'conversations': SHAREGPT, 'system': 'be'},
    ALPACA | {'system': 'be', 'history': []},
  ):
    assert read_one(tmp_path, row).prompt == (system, USER)
  greeting = {'from': 'gpt', 'value': 'a'}, {'from': 'gpt', 'value': 'b'}
  rows = [{'conversations': [x, *SHAREGPT]} for x in greeting]
  hashes = row_files.read(write(tmp_path / 'rows.jsonl', *rows)).hashes
  assert hashes[0] != hashes[1]
  row = ALPACA | {'history': [['a', 'b']]}
  assert [x['content'] for x in read_one(tmp_path, row).prompt] == [
    'a',
    'b',
    'hé',
  ]
  with pytest.raises(ValueError, match='images must be left out'):
    read_one(tmp_path, ALPACA | {'images': ['x.png']})


@pytest.mark.parametrize(
  'row, words',
  [
    ('{"prompt": ', 'one JSON object'),
    ({'text': 'a'}, "--config.STAGE.envs.ENV.env.columns='{"),
    ({'messages': [USER]}, 'messages must hold an assistant turn'),
    (ALPACA | {'history': [['only']]}, 'history must be pairs'),
    (ALPACA | {'history': 'abc'}, 'history must be pairs'),
    ({'prompt': 'a', 'functions': [{'name': 'f'}]}, 'functions must be left'),
    (
      {'prompt': 'a', 'completion': [USER, ASSISTANT]},
      'completion must hold an assistant turn',
    ),
    (
      {'messages': [USER, {'role': 'bot', 'content': ''}]},
      'messages[1].role must be one of',
    ),
    (
      {'conversations': [{'from': 'function_call', 'value': '{}'}]},
      "an assistant's tool_calls: got 'function_call'",
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
  good = write(tmp_path / 'good.jsonl', {'prompt': 'a'})
  for path in ('none.jsonl', f'{good},none.jsonl', f'none-*.jsonl,{good}'):
    for named in (row_files.files, lambda x: base.find('e', 'path', x)):
      with pytest.raises(ValueError, match="must exist: got 'none"):
        named(path)
  both = f'{good},{good}'
  assert len(row_files.objects(base.find('e', 'path', both))) == 2
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


def test_a_column_of_the_new_name_is_replaced(tmp_path):
  row = {'prompt': 7, 'question': 'hé', 'messages': 3, 'completion': 'yo'}
  path = write(tmp_path / 'rows.jsonl', row)
  (parsed,) = row_files.read(path, {'question': 'prompt'})
  assert (parsed.prompt, parsed.completion) == ((USER,), (ASSISTANT,))


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


def test_values_that_json_lacks_are_texts(tmp_path):
  values = {'x': [None, b'\xff'], 'day': [datetime.date(2025, 1, 31), None]}
  table = pa.table({'prompt': ['a', 'b'], **values})
  parquet.write_table(table, tmp_path / 'a.parquet')
  rows = [row for row, _ in row_files.objects(tmp_path / 'a.parquet')]
  assert rows == [
    {'prompt': 'a', 'day': '2025-01-31'},
    {'prompt': 'b', 'x': '1 bytes'},
  ]


def test_jsonl_that_was_written_from_a_table_reads_as_the_table(tmp_path):
  call = {'function': {'name': 'f', 'arguments': {'a': 1}}}
  other = {'function': {'name': 'g', 'arguments': {'b': [None, 2]}}}
  table = pa.Table.from_pylist(
    [
      {'messages': [USER, {**ASSISTANT, 'tool_calls': [x]}], **more}
      for x, more in ((call, {'level': 3}), (other, {}))
    ]
  )
  parquet.write_table(table, tmp_path / 'a.parquet')
  write(tmp_path / 'a.jsonl', *table.to_pylist())
  both = [
    [row for row, _ in row_files.objects(tmp_path / name)]
    for name in ('a.parquet', 'a.jsonl')
  ]
  assert both[0] == both[1] and 'null' not in json.dumps(both[0][0])
  assert both[0][1]['messages'][1]['tool_calls'] == [other]


def test_a_folder_of_json_is_named_by_a_pattern(tmp_path):
  write(tmp_path / 'a.json', [{'prompt': 'a'}, {'prompt': 'b'}])
  with pytest.raises(ValueError, match=r'DIR/\*\.json'):
    row_files.objects(tmp_path)
  assert len(row_files.objects(tmp_path / '*.json')) == 2


def test_nulls_in_arguments_of_json_text_stay(tmp_path):
  call = {'name': 'f', 'arguments': '{"a": null, "b": {"c": null}}'}
  turn = {**ASSISTANT, 'tool_calls': [{'function': call}]}
  path = write(tmp_path / 'a.jsonl', {'messages': [USER, turn]})
  (row,) = row_files.read(path)
  (read,) = row.completion[0]['tool_calls']
  assert read['function']['arguments'] == {'a': None, 'b': {'c': None}}


@pytest.mark.parametrize(
  ('prompt', 'is_right'), [('hé', True), ([USER], True), ('Be brief.', False)]
)
def test_a_prompt_beside_messages_repeats_their_beginning(
  tmp_path, prompt, is_right
):
  system = {'role': 'system', 'content': 'Be brief.'}
  row = {'prompt': prompt, 'messages': [system, USER, ASSISTANT], 'level': 3}
  if is_right:
    parsed = read_one(tmp_path, row)
    assert (parsed.prompt, parsed.as_text) == ((system, USER), False)
    assert parsed.info == {'level': 3}
  else:
    with pytest.raises(ValueError, match='rows.jsonl:1: prompt must be'):
      read_one(tmp_path, row)


@pytest.mark.parametrize(
  ('names', 'path', 'train', 'held_out'),
  [
    ('a.jsonl b.jsonl', '*.jsonl', '12', '12'),
    ('a.jsonl b.jsonl', '', '12', '12'),
    ('test.jsonl train-0-of-2.jsonl train-1-of-2.jsonl', '', '23', '1'),
    ('test.jsonl train-0-of-2.jsonl train-1-of-2.jsonl', 'tr*', '23', '23'),
    ('README.md data/train-0.jsonl data/validation-0.jsonl', '', '2', '3'),
    ('test/0.jsonl train/0.jsonl train/1.jsonl', '', '23', '1'),
    ('a.jsonl test.jsonl', '', '1', '2'),
    ('train.jsonl', '', '1', ''),
    ('a_train.jsonl a_test.jsonl', '', '1', '2'),
    ('Train.jsonl testing.jsonl', '', '1', '2'),
    ('x.jsonl cache-0.arrow', '', '1', '1'),
    ('d/x.jsonl d/train.jsonl d/test.jsonl', '[d]', '2', '3'),
  ],
)
def test_several_files_are_one_data_set(tmp_path, names, path, train, held_out):
  for number, name in enumerate(names.split(), 1):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    write(tmp_path / name, {'n': number})
  prints = {}
  for split, expected in (('train', train), ('eval', held_out)):
    if not expected:
      assert row_files.files(tmp_path, split) == []
      continue
    objects = row_files.objects(f'{tmp_path}/{path}', split)
    assert [row['n'] for row, _ in objects] == [*map(int, expected)]
    assert [objects[i] for i in range(len(objects))] == [*objects]
    prints[row_files.fingerprint(f'{tmp_path}/{path}', split)] = expected
  assert len(prints) == len({train, held_out} - {''})


@pytest.mark.parametrize(
  ('column', 'value', 'words'),
  [
    ('tools', 'hammer', 'column tools must .*the option `columns`'),
    ('chat_template_kwargs', [1], 'column chat_template_kwargs must .*object'),
  ],
)
def test_columns_for_the_template_are_checked(tmp_path, column, value, words):
  with pytest.raises(ValueError, match=f'rows.jsonl:1: {words}'):
    read_one(tmp_path, {'prompt': 'a', column: value})
