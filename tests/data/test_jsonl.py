"""Rows of JSONL: accepted forms, and errors that name the line."""

import json
import os
import pathlib

import pytest

from posttrain.data import jsonl

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
  (parsed,) = jsonl.read(write(tmp_path / 'rows.jsonl', row))
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
  assert [parsed.where for parsed in jsonl.read(path)] == [
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
    ({'prompt': 'a'}, ("'prompt' and 'completion'",)),
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
    jsonl.read(path)
  assert str(error.value).startswith(f'{path}:2: ')
  assert all(word in str(error.value) for word in words)


def test_bad_utf8_names_the_line(tmp_path):
  path = tmp_path / 'rows.jsonl'
  path.write_bytes(b'\n{"prompt": "\xff"}')
  with pytest.raises(ValueError, match='rows.jsonl:2: .*UTF-8'):
    jsonl.read(path)


def test_missing_and_empty_files_are_refused(tmp_path):
  with pytest.raises(ValueError, match='must exist'):
    jsonl.read(tmp_path / 'none.jsonl')
  with pytest.raises(ValueError, match='must hold rows'):
    jsonl.read(write(tmp_path / 'rows.jsonl', ''))


@needs_data
def test_gsm8k_rows_are_read_once_their_columns_are_renamed(tmp_path):
  raw = pathlib.Path(DATA) / 'gsm8k' / 'test.jsonl'
  with pytest.raises(ValueError, match="test.jsonl:1: .*'question'"):
    jsonl.read(raw)
  with raw.open() as lines:
    raw_rows = [json.loads(line) for line in lines]
  path = write(
    tmp_path / 'rows.jsonl',
    *(
      {'prompt': row['question'], 'completion': row['answer']}
      for row in raw_rows
    ),
  )
  parsed = jsonl.read(path)
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
  names = [row.info['name'] for row in jsonl.read(path)]
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
    ('{"prompt": ["' + 'x' * 10**7 + '"]}', 'a row must have'),
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
    jsonl.read(path)
  message = str(error.value)
  assert message.startswith(f'{path}:1: ') and words in message
  assert len(message) < 1000 and message.isprintable()


@pytest.mark.parametrize(
  'level', ['"1e999 NaN"', '1e300', '[1e-400, 5]', '9' * 300, '"' + '9' * 400]
)
def test_finite_numbers_and_texts_are_kept(tmp_path, level):
  level += '"' if level.startswith('"9') else ''
  row = '{"prompt": "a", "completion": "b", "level": ' + level + '}'
  (parsed,) = jsonl.read(write(tmp_path / 'rows.jsonl', row))
  assert parsed.info == {'level': json.loads(level)}


def test_a_line_without_end_is_not_read_whole(tmp_path, monkeypatch):
  monkeypatch.setattr(jsonl, 'MAX_LINE', 1000)
  good = {'prompt': 'a', 'completion': 'b'}
  path = write(tmp_path / 'rows.jsonl', good, '{"prompt": "' + 'x' * 1000)
  with pytest.raises(ValueError, match='rows.jsonl:2: a line must have at mo'):
    jsonl.read(path)


@pytest.mark.parametrize('path', ['x' * 5000, '/', 'a\0b', '/dev/zero'])
def test_only_files_are_read(path):
  with pytest.raises(ValueError, match='a JSONL file must exist') as error:
    jsonl.read(path)
  assert len(str(error.value)) < 600
