"""Files that replace others as a whole."""

import pytest

from posttrain.util import files


def test_a_file_is_replaced_when_the_block_ends(tmp_path):
  path = tmp_path / 'x'
  for text in ('one', 'é'):
    with files.replacing(path) as file:
      file.write(text)
      assert not path.exists() or path.read_text() == 'one'
    assert path.read_text(encoding='utf-8') == text
  with files.replacing(str(path), 'xb') as file:
    file.write(b'two')
  assert path.read_bytes() == b'two'
  assert [x.name for x in tmp_path.iterdir()] == ['x']


def test_a_block_that_raises_changes_nothing(tmp_path):
  path = tmp_path / 'x'
  path.write_text('old')
  with pytest.raises(ZeroDivisionError):
    with files.replacing(path) as file:
      file.write('new')
      raise ZeroDivisionError
  assert path.read_text() == 'old'
  assert [x.name for x in tmp_path.iterdir()] == ['x']
