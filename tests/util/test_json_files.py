"""JSON files: errors name the place."""

import pytest

from posttrain.util import json_files


def test_a_file_may_begin_with_a_byte_order_mark(tmp_path):
  path = tmp_path / 'a.json'
  path.write_bytes('{"a": [1, -2.5, null, "é[{"]}'.encode('utf-8-sig'))
  assert json_files.read(path) == {'a': [1, -2.5, None, 'é[{']}


@pytest.mark.parametrize('data', [b'[' * 100_000, b'\xff\xfe', b'{"a": 1'])
def test_what_is_no_json_is_one_line(data, tmp_path):
  path = tmp_path / 'a.json'
  path.write_bytes(data)
  with pytest.raises(ValueError, match='must be JSON') as error:
    json_files.read(path)
  assert str(path) in str(error.value) and '\n' not in str(error.value)


def test_files_are_refused_by_name(tmp_path):
  for path in (tmp_path / 'a.json', tmp_path):
    with pytest.raises(ValueError, match=f'{path} must be a file with JSON'):
      json_files.read(path)
  (tmp_path / 'b.json').write_text('[1, 2]')
  with pytest.raises(ValueError, match=r'b\.json must hold a JSON object'):
    json_files.read_object(tmp_path / 'b.json')
