"""JSON from outside is refused in one line that names its place."""

import pytest

from posttrain.util import json_files


def test_values_are_those_of_json(tmp_path):
  path = tmp_path / 'a.json'
  path.write_bytes(b'\xef\xbb\xbf{"a": [1, -2.5, null, "\\u00e9[{"]}')
  assert json_files.read(path) == {'a': [1, -2.5, None, 'é[{']}
  assert json_files.read_object(path)['a'][0] == 1


@pytest.mark.parametrize(
  ('data', 'problem'),
  [
    (b'[' * 100_000, 'nested deeper than 100 levels'),
    (b'[' * 101 + b']' * 101, 'nested deeper than 100 levels'),
    (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' is there twice"),
    (b'1' * 5000, 'a number of 5000 digits'),
    (b'\xff\xfe', 'no UTF-8 at byte 0'),
    (b'', 'Expecting value at column 1$'),
    (b'{"a": 1', "Expecting ',' delimiter at column 8$"),
    (b'{"a": 1\n', "Expecting ',' delimiter at column 8$"),
    (b'{"a": 1} x\n', 'Extra data at column 10$'),
    (b'{"a": "b', 'Unterminated string starting at column 7$'),
    (b'["a\tb"]', 'Invalid control character at column 4$'),
    (b'{\n  "a" 1\n}', "Expecting ':' delimiter at line 2, column 7$"),
  ],
)
def test_what_is_no_json_is_refused(data, problem, tmp_path):
  path = tmp_path / 'a.json'
  path.write_bytes(data)
  with pytest.raises(ValueError, match=problem) as error:
    json_files.read(path)
  assert str(error.value).startswith(f'{path} must be JSON: ')
  assert len(str(error.value).splitlines()) == 1


def test_many_brackets_are_not_deep():
  assert json_files.parse('[' + '[],' * 500 + '[]]', 'x') == [[]] * 501
  assert json_files.parse('"' + '[' * 500 + '"', 'x') == '[' * 500
  text = '["' + '\\"[' * 500 + '"]'
  assert json_files.parse(text, 'x') == ['"[' * 500]


def test_a_hundred_levels_are_read():
  value, depth = json_files.parse('[' * 100 + ']' * 100, 'x'), 1
  while value:
    (value,), depth = value, depth + 1
  assert depth == 100


def test_files_are_refused_by_name(tmp_path):
  with pytest.raises(ValueError, match='a.json must be a file with JSON'):
    json_files.read(tmp_path / 'a.json')
  with pytest.raises(ValueError, match='it is not a file'):
    json_files.read(tmp_path)
  (tmp_path / 'b.json').write_text('[1, 2]')
  with pytest.raises(ValueError, match='must have at most 3 bytes: got 6'):
    json_files.read(tmp_path / 'b.json', max_bytes=3)
  with pytest.raises(ValueError, match=r'must hold a JSON object: got \[1, 2'):
    json_files.read_object(tmp_path / 'b.json')
