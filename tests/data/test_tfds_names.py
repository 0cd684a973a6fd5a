"""Names of TFDS data sets: their parts, and the folders that they stand for."""

import pytest

from posttrain.data import row_files


@pytest.fixture
def root(tmp_path, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  for folder in (
    'one/1.0.0',
    'one/2.0.0',
    'one/10.0.0',
    'one/incomplete.1',
    'many/en/1.0.0',
    'many/de/1.0.0',
    'many/de/1.1.0',
  ):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / 'dataset_info.json').touch()
  (tmp_path / 'one' / '11.0.0').mkdir()  # not prepared
  return tmp_path


@pytest.mark.parametrize(
  'text', ['tfds:../a', 'tfds:a/b/c', 'tfds:a:1.0', 'tfds:a:train[']
)
def test_other_forms_are_refused(text, root):
  with pytest.raises(ValueError, match='must have the form tfds:NAME'):
    row_files.find_tfds(text)


@pytest.mark.parametrize(
  'text, folder, pinned',
  [
    ('tfds:one', 'one/10.0.0', 'tfds:one:10.0.0'),
    ('tfds:one:2.0.0:test', 'one/2.0.0', 'tfds:one:2.0.0:test'),
    ('tfds:many/de', 'many/de/1.1.0', 'tfds:many/de:1.1.0'),
    ('tfds:many:1.1.0', 'many/de/1.1.0', 'tfds:many/de:1.1.0'),
  ],
)
def test_a_name_is_the_folder_of_its_newest_version(text, folder, pinned, root):
  assert row_files.find_tfds(text) == str(root / folder)
  assert row_files.with_version(text) == pinned
  assert row_files.find_tfds(pinned) == str(root / folder)


@pytest.mark.parametrize(
  'text, words',
  [
    (
      'tfds:gone/x',
      ['in {root}: got none', '`tfds build gone/x --file_format=array_record`'],
    ),
    ('tfds:many', ['got 2 that fit', "'de:1.1.0'", 'name CONFIG and VERSION']),
    ('tfds:one:3.0.0', ['{root}/one: got 0 that fit', "'10.0.0'"]),
    ('tfds:many/fr', ['got 0 that fit', "'en:1.0.0'"]),
  ],
)
def test_what_is_not_prepared_names_the_folder(text, words, root):
  with pytest.raises(ValueError) as error:
    row_files.find_tfds(text)
  for word in words:
    assert word.format(root=root) in str(error.value)


def test_the_folder_is_that_of_tfds(monkeypatch, tmp_path):
  monkeypatch.delenv('TFDS_DATA_DIR', raising=False)
  monkeypatch.setenv('HOME', str(tmp_path))
  with pytest.raises(ValueError, match=f'{tmp_path}/tensorflow_datasets: got'):
    row_files.find_tfds('tfds:a')
