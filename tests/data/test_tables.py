"""Parquet, Arrow and CSV: the rows of JSONL, and errors that name the row."""

import datetime

import pyarrow as pa
import pytest
from pyarrow import feather, parquet

from posttrain.data import row_files, rows, tables

USER = {'role': 'user', 'content': 'hé'}
ASSISTANT = {'role': 'assistant', 'content': 'yo'}
ROWS = [
  {'messages': [USER, ASSISTANT], 'level': 3},
  {'messages': [USER, {**ASSISTANT, 'name': 'x'}], 'level': None},
]


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
  WRITERS[name](pa.Table.from_pylist(ROWS), path)
  assert list(tables.objects(path)) == [
    ({'messages': [USER, ASSISTANT], 'level': 3}, f'{path}:1'),
    ({'messages': [USER, {**ASSISTANT, 'name': 'x'}]}, f'{path}:2'),
  ]
  table = tables.Table(path)
  assert list(table) == list(tables.objects(path)) == [table[0], table[1]]
  row = rows.parse(*next(tables.objects(path)))
  assert (row.prompt, row.completion) == ((USER,), (ASSISTANT,))
  assert row.info == {'level': 3}


def test_csv(tmp_path):
  path = tmp_path / 'a.csv'
  path.write_text(
    '\ufeffprompt,completion,answer\n"1,\n2",yo,\n\nhé,"say ""x""",07\n'
  )
  assert list(tables.objects(path)) == [
    ({'prompt': '1,\n2', 'completion': 'yo', 'answer': ''}, f'{path}:3'),
    ({'prompt': 'hé', 'completion': 'say "x"', 'answer': '07'}, f'{path}:5'),
  ]
  table = tables.Table(path)
  assert list(table) == list(tables.objects(path)) == [table[0], table[1]]
  columns = {'completion': 'why', 'answer': 'completion'}
  first, second = row_files.read(path, columns)
  assert first.completion[0]['content'] == '' and second.info['why']


@pytest.mark.parametrize('name', ['a.csv', 'a.parquet'])
def test_a_misspelt_column_is_named(tmp_path, name):
  path = tmp_path / name
  if name == 'a.csv':
    path.write_text('promt,completion\nhé,yo\n')
  else:
    row = {'promt': 'hé', 'completion': 'yo'}
    parquet.write_table(pa.Table.from_pylist([row]), path)
  with pytest.raises(ValueError, match="mean prompt instead of 'promt'"):
    row_files.read(path)


@pytest.mark.parametrize(
  'name, content, message',
  [
    ('a.csv', b'a,b\n1,2\n1,2,3\n', r'a.csv:3: a row must have the 2 values'),
    ('a.csv', b'a;b\n1,2;3\n', "have commas .* 'a;b', with ';' between them"),
    ('a.csv', b'a\tb\n1\t3\n', r"header 'a\\tb', with '\\t' between them"),
    ('a.csv', b'a,a\n1,2\n', r'a.csv:1: a table must name each column once'),
    ('a.csv', b'a,b\n', 'a.csv: a table must hold rows: got none'),
    ('a.csv', b'', 'a.csv: a table must hold rows: got none'),
    ('a.csv', b'a\n\xff\n', 'a.csv must be CSV in UTF-8'),
    ('a.csv', b'a,b\n"1,2\n', 'a.csv must be CSV in UTF-8'),
    ('a.parquet', b'PAR1', 'a.parquet must be a table of its kind'),
    ('a.arrow', b'{"a": 1}\n', 'a.arrow must be a table of its kind'),
    ('a.arrow', b'', 'a.arrow must be a table of its kind'),
  ],
)
def test_a_malformed_file_is_named(tmp_path, name, content, message):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ValueError, match=message):
    list(tables.objects(tmp_path / name))


@pytest.mark.parametrize(
  'value', [float('nan'), b'x', datetime.date(2026, 1, 2)]
)
def test_values_that_json_lacks_are_refused_by_row(tmp_path, value):
  table = pa.Table.from_pylist([{'prompt': 'a'}, {'prompt': 'b', 'x': value}])
  table = table.append_column('x', pa.array([None, value]))
  parquet.write_table(table, tmp_path / 'a.parquet')
  with pytest.raises(ValueError, match=r'a.parquet:2: x must hold texts'):
    list(tables.objects(tmp_path / 'a.parquet'))


def test_a_missing_table_is_named(tmp_path):
  with pytest.raises(ValueError, match='a table must exist.*no.parquet'):
    list(tables.objects(tmp_path / 'no.parquet'))
  assert tables.is_table('X.PARQUET') and not tables.is_table('x.jsonl')


def test_a_column_that_is_there_twice_is_refused(tmp_path):
  table = pa.table([pa.array(['a']), pa.array(['b'])], names=['x', 'x'])
  feather.write_feather(table, str(tmp_path / 'a.arrow'))
  with pytest.raises(ValueError, match='a.arrow: a table must name each col'):
    tables.Table(tmp_path / 'a.arrow')


def test_a_value_that_python_lacks_names_the_rows(tmp_path):
  times = pa.array([1], pa.timestamp('ns'))
  parquet.write_table(pa.table({'x': times}), tmp_path / 'a.parquet')
  with pytest.raises(ValueError, match='a.parquet:1: '):
    list(tables.objects(tmp_path / 'a.parquet'))
