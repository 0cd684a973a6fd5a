"""TFDS in ArrayRecord: rows are read back, without tensorflow."""

import json
import shutil
import subprocess
import sys

import pytest

from posttrain.data import rows, tfds

MULTI = rows.Row(
  prompt=(
    {'role': 'system', 'content': ''},
    {'role': 'user', 'content': 'hé\n'},
  ),
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
  return root, tfds.write(splits, 'toy_rows', root)


def test_written_rows_are_read_back(folder):
  root, version = folder
  assert version == root / 'toy_rows' / '1.0.0'
  read = tfds.read(version, 'train')
  by_prompt = {row.prompt[-1]['content']: row for row in read}
  assert len(by_prompt) == len(read) == 21
  row = by_prompt['hé\n']
  assert (row.prompt, row.completion) == (MULTI.prompt, MULTI.completion)
  assert row.info == MULTI.info
  assert by_prompt['q7'].completion[0]['content'] == 'Q7'
  assert by_prompt['q7'].info == {}


def test_order_is_hashed_but_fixed(folder):
  root, version = folder
  first, again = tfds.read(version, 'train'), tfds.read(version, 'train')
  assert first == again
  texts = [row.prompt[-1]['content'] for row in first]
  assert texts != ['hé\n', *(f'q{i}' for i in range(20))]
  assert [row.where for row in first][:2] == [
    f'{version}:train:1',
    f'{version}:train:2',
  ]


def test_eval_reads_the_validation_split_of_a_parent_folders_one_data_set(
  folder,
):
  (row,) = tfds.read(folder[0], 'eval')
  assert row.prompt[0]['content'] == 'held out'


def test_bad_folders_splits_and_messages_are_refused(folder, tmp_path):
  root, version = folder
  with pytest.raises(ValueError, match='must not exist yet'):
    tfds.write({'train': [MULTI]}, 'toy_rows', root)
  with pytest.raises(ValueError, match="must have a split .*'train'"):
    tfds.read(version, 'nope')
  with pytest.raises(ValueError, match='must hold one data set: got '):
    tfds.read(tmp_path, 'train')
  tool = rows.Row((), ({'role': 'assistant', 'content': '', 'name': 'x'},), 'w')
  with pytest.raises(ValueError, match='w: a message must hold role and con'):
    tfds.write({'train': [tool]}, 'other', root)


EVIL = 'evilmod.Evil'
FEATURES = 'tensorflow_datasets.core.features.'
DICT = f'{FEATURES}features_dict.FeaturesDict'
# Forms in which a features.json can name a class.
FORMS = {
  'top': {'pythonClassName': EVIL},
  'snake case': {'python_class_name': EVIL},
  'a feature': {
    'pythonClassName': DICT,
    'featuresDict': {'features': {'type': {'pythonClassName': EVIL}}},
  },
  'old': {'type': EVIL, 'content': {}},
  'old, inside': {
    'type': DICT,
    'content': {'prompt': {'type': EVIL, 'content': {}}},
  },
  'old, in a text': {
    'pythonClassName': DICT,
    'jsonFeature': {
      'json': json.dumps({'prompt': {'type': EVIL, 'content': {}}})
    },
  },
  'a prefix': {'pythonClassName': f'{FEATURES[:-1]}x.Evil'},
}


@pytest.mark.parametrize('form', FORMS)
def test_features_of_foreign_classes_are_refused_before_any_import(
  folder, tmp_path, monkeypatch, form
):
  copy = shutil.copytree(folder[1], tmp_path / 'ds' / '1.0.0')
  (tmp_path / 'evilmod.py').write_text('raise SystemExit("imported")')
  (copy / 'features.json').write_text(json.dumps(FORMS[form]))
  monkeypatch.syspath_prepend(str(tmp_path))
  with pytest.raises(ValueError, match='features.json must name features of'):
    tfds.read(tmp_path, 'train')
  assert 'evilmod' not in sys.modules


def test_features_that_cannot_be_read_are_one_line(folder, tmp_path):
  copy = shutil.copytree(folder[1], tmp_path / 'ds')
  for text in ('{', '[' * 10**5, '{"type": "a", "type": "b"}'):
    (copy / 'features.json').write_text(text)
    with pytest.raises(ValueError, match='features.json must be JSON'):
      tfds.read(copy, 'train')


PROGRAM = """
import sys
import numpy as np
import tensorflow_datasets as tfds
from posttrain.data import tfds as ours
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
(row,) = ours.read(builder.data_dir, 'train')
assert row.prompt == ({'role': 'user', 'content': 'a'},), row
assert row.info == {'level': 3}, row
loaded = {name.partition('.')[0] for name in sys.modules}
assert not loaded & {'tensorflow', 'jax'}, loaded
print('fine')
"""


def test_another_data_set_is_read_without_importing_tensorflow(tmp_path):
  done = subprocess.run(
    [sys.executable, '-c', PROGRAM, str(tmp_path)],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.stdout.endswith('fine\n'), done.stderr
