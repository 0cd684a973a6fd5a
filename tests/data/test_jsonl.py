"""Rows of JSONL: accepted forms, and errors that name the line."""

import json
import os
import pathlib

import pytest

from posttrain import schema
from posttrain.data import jsonl, row_files
from posttrain.envs import registry

DATA = os.environ.get('POSTTRAIN_DATA')
needs_data = pytest.mark.skipif(
  DATA is None, reason='POSTTRAIN_DATA (folder of real files) is unset'
)
USER = {'role': 'user', 'content': 'hé'}
ASSISTANT = {'role': 'assistant', 'content': 'yo'}


def write(path, *lines):
  path.write_text(
    '\n'.join(
      line if isinstance(line, str) else json.dumps(line) for line in lines
    ),
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
    ({'prompt': [USER], 'completion': 'yo'}, (USER,), (ASSISTANT,)),
    ({'prompt': 'hé', 'completion': [ASSISTANT]}, (USER,), (ASSISTANT,)),
    # A prompt's assistant turns are given (few-shot), not trained.
    (
      {'prompt': [USER, ASSISTANT, USER], 'completion': 'yo'},
      (USER, ASSISTANT, USER),
      (ASSISTANT,),
    ),
    # The prompt again, before the completion.
    ({'prompt': 'hé', 'completion': [USER, ASSISTANT]}, (USER,), (ASSISTANT,)),
    ({'messages': [USER, ASSISTANT]}, (USER,), (ASSISTANT,)),
    # For answers that are sampled.
    ({'prompt': 'hé'}, (USER,), ()),
    ({'prompt': [USER]}, (USER,), ()),
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


def test_blank_lines_are_skipped_but_numbered(tmp_path):
  row = {'prompt': 'a', 'completion': 'b'}
  path = write(
    tmp_path / 'rows.jsonl', '\ufeff' + json.dumps(row), '', '  ', row, ''
  )
  assert [parsed.where for parsed in row_files.read(path)] == [
    f'{path}:1',
    f'{path}:4',
  ]


@pytest.mark.parametrize(
  'row, words',
  [
    ('{"prompt": ', ('one JSON object',)),
    ('[1]', ('must be an object',)),
    (
      {'question': 'a', 'answer': 'b'},
      ("'prompt' and 'completion'", 'question'),
    ),
    ({'completion': 'a'}, ("'prompt' and 'completion'",)),
    ({'prompt': 'a', 'completion': 'b', 'messages': []}, ('or',)),
    ({'prompt': 3, 'completion': 'b'}, ('prompt must be a string or', '3')),
    ({'messages': 'a'}, ('messages must be a list of messages',)),
    ({'messages': ['a']}, ('messages[0] must be an object',)),
    ({'messages': [USER]}, ('messages must hold an assistant turn',)),
    (
      {'prompt': 'a', 'completion': [USER]},
      ('completion must hold an assistant turn',),
    ),
    (
      {'prompt': 'a', 'completion': [USER, ASSISTANT]},
      ('completion must begin with an assistant or tool turn', 'hé'),
    ),
    (
      {'messages': [USER, {'role': 'gpt', 'content': ''}]},
      ('messages[1].role must be one of', "'gpt'"),
    ),
    (
      {'messages': [USER, {'role': 'assistant', 'content': None}]},
      ('messages[1].content must be a string', 'None'),
    ),
  ],
)
def test_errors_name_file_and_line(tmp_path, row, words):
  good = {'prompt': 'a', 'completion': 'b'}
  path = write(tmp_path / 'rows.jsonl', good, row)
  with pytest.raises(ValueError) as error:
    row_files.read(path)
  assert str(error.value).startswith(f'{path}:2: ')
  assert all(word in str(error.value) for word in words)


def test_a_line_that_is_not_json_is_named_once_with_its_column(tmp_path):
  path = write(tmp_path / 'rows.jsonl', {'prompt': 'a'}, '{"prompt": "a"', '')
  with pytest.raises(ValueError) as error:
    row_files.read(path)
  assert str(error.value) == (
    f"{path}:2: a line must be JSON: Expecting ',' delimiter at column 15; it "
    """must be one JSON object in UTF-8: got b'{"prompt": "a"\\n'"""
  )


def test_bad_utf8_names_the_line(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_bytes(b'\n{"prompt": "\xff"}')
  with pytest.raises(ValueError, match='rows.jsonl:2: .*UTF-8'):
    row_files.read(path)


def test_missing_and_empty_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match='must exist'):
    row_files.read(tmp_path / 'none.jsonl')
  for name, content in (('rows.jsonl', ''), ('rows.csv', 'prompt\n')):
    with pytest.raises(
      ValueError, match="hold rows: .* must have 'prompt' and"
    ):
      row_files.read(write(tmp_path / name, content))


def test_missing_columns_are_renamed_by_an_option_that_is_named(tmp_path):
  path = write(tmp_path / 'rows.csv', 'question,solution\na,b\n')
  with pytest.raises(ValueError) as error:
    row_files.read(path)
  assert str(error.value).endswith(
    "got columns ['question', 'solution']; --config.STAGE.envs.ENV.env.columns="
    """'{"OWN": "prompt", ...}' names them anew"""
  )
  env = registry.make('mine', schema.Rows(path=str(path)))
  with pytest.raises(ValueError, match='--config.STAGE.envs.mine.env.columns='):
    env.source('train', 0)


@pytest.mark.parametrize(
  ('text', 'columns', 'message'),
  [
    ('id,text\n1,a\n', None, "split it into 'prompt' and 'completion', or --c"),
    ('text\na\n', {'text': 'prompt'}, ''),
    (
      'text\na\n',
      {'text': 'completion'},
      r"got columns \['text'\], renamed to \['completion'\]; --config",
    ),
    ('txt\na\n', {'text': 'prompt'}, 'did you mean txt instead of .text.'),
    ('text,answer\na,b\n', None, 'a text alone has no part'),
    ('text,completion\na,b\n', None, 'names them anew'),
  ],
)
def test_a_text_alone_is_no_row(text, columns, message, tmp_path):
  path = write(tmp_path / 'rows.csv', text)
  if not message:
    (row,) = row_files.read(path, columns)
    assert row.prompt[0]['content'] == 'a' and row.completion == ()
    return
  with pytest.raises(ValueError, match=message):
    row_files.read(path, columns)


@pytest.mark.parametrize('rows', ['[{}]', '[\n{}\n]\n'])
def test_a_json_list_is_no_jsonl(rows, tmp_path):
  path = write(tmp_path / 'rows.jsonl', rows)
  with pytest.raises(ValueError, match='rows.jsonl:1: .*has an object on each'):
    row_files.read(path)
  path = write(tmp_path / 'rows.jsonl', '{"prompt": "a"}\n[1]\n')
  with pytest.raises(ValueError, match=r'rows.jsonl:2: .*: got \[1\]$'):
    row_files.read(path)


@needs_data
def test_gsm8k_rows_are_read_once_their_columns_are_renamed(tmp_path):
  raw = pathlib.Path(DATA) / 'gsm8k' / 'test.jsonl'
  with pytest.raises(ValueError, match="test.jsonl:1: .*'question'"):
    row_files.read(raw)
  with raw.open() as lines:
    raw_rows = [json.loads(line) for line in lines]
  path = write(
    tmp_path / 'rows.jsonl',
    *(
      {'prompt': row['question'], 'completion': row['answer']}
      for row in raw_rows
    ),
  )
  parsed = row_files.read(path)
  assert len(parsed) == len(raw_rows) == 1319
  assert parsed[7].prompt[0]['content'] == raw_rows[7]['question']
  assert all('####' in row.completion[0]['content'] for row in parsed)


@needs_data
def test_self_instruct_rows_are_read_as_messages(tmp_path):
  with (pathlib.Path(DATA) / 'self_instruct' / 'seed_tasks.jsonl').open() as f:
    raw_rows = [json.loads(line) for line in f]
  path = write(
    tmp_path / 'rows.jsonl',
    *(
      {
        'messages': [
          {
            'role': 'user',
            'content': row['instruction'] + '\n' + row['instances'][0]['input'],
          },
          {'role': 'assistant', 'content': row['instances'][0]['output']},
        ],
        'name': row['name'],
      }
      for row in raw_rows
    ),
  )
  names = [row.info['name'] for row in row_files.read(path)]
  assert names == [row['name'] for row in raw_rows]


DEEP = '[' * 5000 + ']' * 5000


@pytest.mark.parametrize(
  'line, words',
  [
    ('{"messages": ' + DEEP + '}', 'nested deeper'),
    ('{"prompt": "a", "prompt": "b"}', 'is there twice'),
    ('{"prompt": ' + '9' * 5000 + '}', 'digits'),
    ('{"level": NaN}', 'level must hold finite numbers: got nan'),
    ('{"level": {"a": [1, -Infinity]}}', 'level must hold finite numbers'),
    ('{"level": 1e999}', 'level must hold finite numbers: got inf'),
    ('{"level": 1E+400}', 'level must hold finite numbers: got inf'),
    ('{"level": ' + '9' * 400 + '}', 'level must hold finite numbers'),
    ('"' + 'x' * 10**7 + '"', 'must be an object'),
    ('{"prompt": ["' + 'x' * 10**7 + '"]}', 'must be an object'),
    ('{"messages": "' + 'x' * 10**7 + '"}', 'messages must be a list'),
    ('{"messages": [{"role": "' + 'x' * 10**7 + '"}]}', 'role must be one of'),
    ('{"messages": [["' + 'x' * 10**7 + '"]]}', 'messages[0] must be'),
    ('{"prompt": "a", "completion": {"b": "' + 'x' * 10**7 + '"}}', 'complet'),
    ('{"' + 'x' * 10**6 + '": 1}', 'a row must have'),
    ('x' * 10**7, 'must be JSON'),
    ('{"prompt": "a\\ud800", "completion": "b"}', 'content must be Unicode'),
  ],
)
def test_hostile_lines_are_one_short_line(tmp_path, line, words):
  path = write(tmp_path / 'rows.jsonl', line)
  with pytest.raises(ValueError) as error:
    row_files.read(path)
  message = str(error.value)
  assert message.startswith(f'{path}:1: ') and words in message
  assert len(message) < 1000 and message.isprintable()


@pytest.mark.parametrize(
  'level', ['"1e999 NaN"', '1e300', '[1e-400, 5]', '9' * 300, '"' + '9' * 400]
)
def test_finite_numbers_and_texts_are_kept(tmp_path, level):
  level += '"' if level.startswith('"9') else ''
  row = '{"prompt": "a", "completion": "b", "level": ' + level + '}'
  (parsed,) = row_files.read(write(tmp_path / 'rows.jsonl', row))
  assert parsed.info == {'level': json.loads(level)}


def test_a_line_without_end_is_not_read_whole(tmp_path, monkeypatch):
  monkeypatch.setattr(jsonl, 'MAX_LINE', 1000)
  good = {'prompt': 'a', 'completion': 'b'}
  path = write(tmp_path / 'rows.jsonl', good, '{"prompt": "' + 'x' * 1000)
  with pytest.raises(ValueError, match='rows.jsonl:2: a line must have at mo'):
    row_files.read(path)


@pytest.mark.parametrize(
  'path, kind',
  [
    ('x' * 5000, 'JSONL'),
    ('/dev', 'TFDS'),
    ('a\0b', 'JSONL'),
    ('/dev/zero', 'JSONL'),
  ],
)
def test_only_files_and_data_sets_are_read(path, kind):
  with pytest.raises(ValueError, match=f'a {kind} f.* must ') as error:
    row_files.read(path)
  assert len(str(error.value)) < 600


@pytest.mark.parametrize('held', [0, 2**20])
def test_rows_are_read_again_from_their_lines(tmp_path, monkeypatch, held):
  monkeypatch.setattr(jsonl, 'HELD', held)
  path = tmp_path / 'rows.jsonl'
  lines = [
    '{"prompt": "a"}',
    '',
    '{"prompt": "h\u00e9"}',
    '  ',
    '{"prompt": "c"}',
  ]
  path.write_text('\n'.join(lines), encoding='utf-8')
  index = jsonl.Lines(path)
  expected = list(jsonl.objects(path))
  assert [where for _, where in expected] == [f'{path}:{i}' for i in (1, 3, 5)]
  assert list(index) == expected == [index[i] for i in range(len(index))]


def test_a_small_file_may_change_during_a_run(tmp_path):
  path = write(tmp_path / 'rows.jsonl', {'prompt': 'a'})
  parsed = row_files.read(path)
  path.unlink()
  assert parsed[0].prompt[0]['content'] == 'a'


def test_a_line_of_a_large_file_must_not_change(tmp_path, monkeypatch):
  monkeypatch.setattr(jsonl, 'HELD', 0)
  path = write(tmp_path / 'rows.jsonl', {'prompt': 'a'}, {'prompt': 'b'})
  parsed = row_files.read(path)
  with path.open('a') as file:
    file.write('\n{"prompt": "c"}')
  assert [row.prompt[0]['content'] for row in parsed] == ['a', 'b']
  write(path, {'prompt': 'a'}, {'prompt': 'x'})
  assert parsed[0].prompt[0]['content'] == 'a'
  with pytest.raises(ValueError, match='rows.jsonl:2: a line must stay as it'):
    parsed[1]


def test_columns_of_other_names(tmp_path):
  row = {'question': 'a', 'solution': 'b', 'prompt_id': 7}
  path = write(tmp_path / 'rows.jsonl', row, {**row, 'hint': 'x'})
  columns = {'question': 'prompt', 'solution': 'completion', 'hint': 'why'}
  first, second = row_files.read(path, columns)
  assert first.prompt == ({'role': 'user', 'content': 'a'},)
  assert first.completion == ({'role': 'assistant', 'content': 'b'},)
  assert first.as_text and first.info == {'prompt_id': 7}
  assert second.info == {'prompt_id': 7, 'why': 'x'}
  swapped = {'question': 'completion', 'solution': 'prompt'}
  assert row_files.read(path, swapped)[0].prompt[0]['content'] == 'b'


def test_a_misspelt_column_is_named(tmp_path):
  row = {'promt': 'a', 'completion': 'b', 'level': 3}
  path = write(tmp_path / 'rows.jsonl', row)
  message = "level', 'promt']; did you mean prompt instead of 'promt'\\?$"
  with pytest.raises(ValueError, match=message):
    row_files.read(path)
  # Names of the option `columns`.
  path = write(tmp_path / 'rows.jsonl', {'question': 'a', 'level': 3})
  for columns, words in (
    ({'questoin': 'prompt'}, ('a row must have', "question instead of 'ques")),
    (
      {'question': 'prompt', 'levle': 'info'},
      ('columns must name', "mean level instead of 'levle'?"),
    ),
  ):
    with pytest.raises(ValueError) as error:
      row_files.read(path, columns)
    assert all(word in str(error.value) for word in words)


@pytest.mark.parametrize(
  'columns, words',
  [
    (
      {'answer': 'prompt'},
      ['rows.jsonl:1: a row must', "['prompt_id', 'question', 'solution']"],
    ),
    (
      {'question': 'prompt', 'nope': 'why'},
      ['1: columns must name', "['nope']", "['prompt_id', 'question', 'solu"],
    ),
    (
      {'question': 'prompt', 'solution': 'prompt'},
      ["1: columns must give each column a name of its own: got 'prompt' for"],
    ),
    (
      {'question': 'prompt', 'solution': 'prompt_id'},
      ["own: got 'prompt_id' for ['solution', 'prompt_id']"],
    ),
  ],
)
def test_wrong_columns_name_the_row_and_its_columns(tmp_path, columns, words):
  row = {'question': 'a', 'solution': 'b', 'prompt_id': 7}
  path = write(tmp_path / 'rows.jsonl', row)
  with pytest.raises(ValueError) as error:
    row_files.read(path, columns)
  assert all(word in str(error.value) for word in words), error.value
