"""TFDS in ArrayRecord: rows are read back, without tensorflow; names."""

import json
import subprocess
import sys
import tracemalloc

import pytest

from posttrain.data import row_files, rows

MULTI = rows.Row(
  prompt=({'role': 'user', 'content': 'hé\n'},),
  completion=(
    {'role': 'assistant', 'content': '\\boxed{3}'},
    {'role': 'tool', 'content': 'ok'},
    {'role': 'assistant', 'content': 'bye'},
  ),
  where='here:1',
  info={'answer': 3, 'tags': ['a'], 'level': None},
)


def single(text):
  return rows.Row(
    prompt=({'role': 'user', 'content': text},),
    completion=({'role': 'assistant', 'content': text.upper()},),
    where=text,
  )


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  splits = {
    'train': [MULTI, *(single(f'q{i}') for i in range(20))],
    'validation': [single('held out')],
  }
  root = tmp_path_factory.mktemp('tfds')
  return root, row_files.write_tfds(splits, 'toy_rows', root)


def test_written_rows_are_read_back(folder):
  root, version = folder
  assert version == root / 'toy_rows' / '1.0.0'
  read = row_files.read(version)
  by_prompt = {row.prompt[-1]['content']: row for row in read}
  assert len(by_prompt) == len(read) == 21
  row = by_prompt['hé\n']
  assert (row.prompt, row.completion) == (MULTI.prompt, MULTI.completion)
  assert row.info == MULTI.info
  assert by_prompt['q7'].info == {}


def test_bad_folders_splits_and_messages_are_refused(folder, tmp_path):
  root, version = folder
  with pytest.raises(ValueError, match='must not exist yet'):
    row_files.write_tfds({'train': [MULTI]}, 'toy_rows', root)
  with pytest.raises(ValueError, match="must have a split .*'train'"):
    row_files.read(version, split='nope')
  with pytest.raises(ValueError, match='one TFDS data set: got '):
    row_files.read(tmp_path)


@pytest.mark.parametrize('kind', ['jsonl', 'tfds'])
def test_memory_does_not_grow_with_the_texts(tmp_path, kind):
  """18 MB of texts, of which less than 1 MB stays."""
  texts = [f'{i} {"x" * 60_000}' for i in range(300)]
  path = tmp_path / 'rows.jsonl'
  if kind == 'tfds':
    path = row_files.write_tfds(
      {'train': map(single, texts)}, 'large', tmp_path
    )
  else:
    path.write_text(''.join(json.dumps({'prompt': x}) + '\n' for x in texts))
  tracemalloc.start()
  try:
    parsed = row_files.read(path)
    held, _ = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert len(parsed) == 300 and held < 1e6


def test_names_and_splits(folder, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(folder[0]))
  whole = row_files.read('tfds:toy_rows')
  assert len(whole) == 21
  assert whole[0].where == f'{folder[1]}:train:1'
  (row,) = row_files.read('tfds:toy_rows', split='eval')
  assert row.prompt == single('held out').prompt
  part = row_files.read('tfds:toy_rows:1.0.0:train[:10%]')
  assert [row.prompt for row in part] == [row.prompt for row in whole][:2]
  with pytest.raises(ValueError, match='split'):
    row_files.read('tfds:toy_rows:train[x]')


PROGRAM = """
import sys
import numpy as np
import tensorflow_datasets as tfds
from posttrain.data import row_files
class Foreign(tfds.core.GeneratorBasedBuilder):
  VERSION = tfds.core.Version('2.0.0')
  def _info(self):
    text = tfds.features.Text()
    return tfds.core.DatasetInfo(builder=self, features=(
        tfds.features.FeaturesDict({
            'prompt': text, 'completion': text,
            'level': tfds.features.Scalar(np.int64),
        })
    ))
  def _split_generators(self, dl):
    return {'train': iter([
        (0, {'prompt': 'a', 'completion': 'b', 'level': 3})
    ])}
  def _generate_examples(self): ...
builder = Foreign(data_dir=sys.argv[1], file_format='array_record')
builder.download_and_prepare()
(row,) = row_files.read(builder.data_dir)
assert row.prompt == ({'role': 'user', 'content': 'a'},), row
assert row.info == {'level': 3}, row
loaded = {name.partition('.')[0] for name in sys.modules}
assert not loaded & {'tensorflow', 'jax'}, loaded
"""


def test_another_data_set_is_read_without_importing_tensorflow(tmp_path):
  subprocess.run([sys.executable, '-c', PROGRAM, str(tmp_path)], check=True)


@pytest.fixture
def root(tmp_path, monkeypatch):
  monkeypatch.setenv('TFDS_DATA_DIR', str(tmp_path))
  for folder in (
    'one/1.0.0',
    'one/2.0.0',
    'one/10.0.0',
    'many/en/1.0.0',
    'many/de/1.1.0',
  ):
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / 'dataset_info.json').touch()
  (tmp_path / 'one' / '11.0.0').mkdir()  # not prepared
  return tmp_path


@pytest.mark.parametrize(
  'text, folder, pinned',
  [
    ('tfds:one', 'one/10.0.0', 'tfds:one:10.0.0'),
    ('tfds:one:2.0.0:test', 'one/2.0.0', 'tfds:one:2.0.0:test'),
    ('tfds:many:1.1.0', 'many/de/1.1.0', 'tfds:many/de:1.1.0'),
  ],
)
def test_a_name_is_the_folder_of_its_newest_version(text, folder, pinned, root):
  assert row_files.find_tfds(text) == (str(root / folder), pinned)
  assert row_files.find_tfds(pinned) == (str(root / folder), pinned)


@pytest.mark.parametrize(
  'text, words',
  [
    ('tfds:../a', 'must have the form tfds:NAME'),
    ('tfds:many', '{root}/many: got 2'),
    ('tfds:one:3.0.0', '{root}/one: got 0'),
  ],
)
def test_what_is_not_prepared_names_the_folder(text, words, root):
  with pytest.raises(ValueError, match=words.format(root=root)):
    row_files.find_tfds(text)
