"""Rows as a TFDS data set in ArrayRecord, written and read without tensorflow.

`write` makes the columns `prompt` and `completion`, each a sequence of
`{'role', 'content'}`, and `info_json`. `Examples` reads any data set, one
example at a time, from the shard that has it. TFDS orders examples by a hash of
their key, so that their order is fixed but is not that of insertion; texts come
back as bytes.
"""

import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.data import rows, tfds_names

VERSION = '1.0.0'
_BATCH = 256  # examples that are read at a time, where all are
# Names of a held-out split, in order of preference.
_HELD_OUT = ('eval', 'validation', 'test')


def write(
  splits: Mapping[str, Sequence[rows.Row]],
  name: str,
  folder: str | pathlib.Path,
) -> pathlib.Path:
  """Writes rows as `folder/name/1.0.0`.

  Args:
    splits: rows per split; messages hold `role` and `content` only.
    name: the data set's name, in lower_snake_case.
    folder: folder of TFDS data sets.

  Returns:
    The data set's folder, for `read`.

  Raises:
    ValueError: the data set exists already, or a message has other fields.
  """
  target = pathlib.Path(folder).expanduser().absolute() / name / VERSION
  if target.exists():
    raise ValueError(
      f'the data set to write must not exist yet: got {str(target)!r}; '
      'remove it, or choose another folder'
    )
  examples = {
    split: [_example(row) for row in split_rows]
    for split, split_rows in splits.items()
  }
  _builder(examples, name, target.parent.parent).download_and_prepare()
  return target


class Examples(Sequence[tuple[Mapping[str, Any], str]]):
  """The examples of a split as (row, 'data set:split:number').

  Each is read when it is used; memory holds the index of the shards.
  """

  def __init__(self, path: str | pathlib.Path, split: str = 'train'):
    """Opens a data set; reads no example.

    Args:
      path: a data set's folder, a parent of exactly one data set, or a name of
        `util.tfds_names`.
      split: 'train'; or 'eval', which also stands for 'validation' or 'test'.
        A name may have another one, which then counts.

    Raises:
      ValueError: there is no such data set or split, or it is not in
        ArrayRecord.
    """
    import tensorflow_datasets as tfds  # slow to import

    folder, named = os.fspath(path), None
    if tfds_names.is_name(folder):
      named = tfds_names.parse(folder).split
      folder = tfds_names.find(folder)
    known = [
      file.parent
      for depth in range(4)
      for file in pathlib.Path(folder).glob('*/' * depth + 'dataset_info.json')
    ]
    if len(known) != 1:
      raise ValueError(
        f'a TFDS folder must hold one data set: got {list(map(str, known))} in '
        f'{folder!r}; name the folder of one version'
      )
    builder = tfds.builder_from_directory(known[0])
    names = _HELD_OUT if split == 'eval' else (split,)
    names = (named.partition('[')[0],) if named else names
    present = [name for name in names if name in builder.info.splits]
    if not present:
      raise ValueError(
        f'{path}: the data set must have a split named one of {names}: got '
        f'{sorted(builder.info.splits)} in {folder}'
      )
    split = named or present[0]
    self._where = f'{folder}:{split}'
    try:
      self._source = builder.as_data_source(split=split)
    except (NotImplementedError, ValueError) as error:  # another format; slice
      raise ValueError(
        f'{path}: the split {split!r} must be one that can be '
        'read in any order, from files in ArrayRecord (`tfds build '
        f'--file_format=array_record`): {error}'
      ) from error

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> tuple[Mapping[str, Any], str]:
    where = f'{self._where}:{index + 1}'
    return _row(self._source[index], where), where

  def __iter__(self) -> Iterator[tuple[Mapping[str, Any], str]]:
    for start in range(0, len(self), _BATCH):
      indices = range(start, min(start + _BATCH, len(self)))
      examples = self._source.__getitems__(list(indices))
      for index, example in zip(indices, examples, strict=True):
        where = f'{self._where}:{index + 1}'
        yield _row(example, where), where


def _builder(examples: Mapping[str, list], name: str, folder: pathlib.Path):
  """Builds the TFDS builder of examples, given per split.

  The class is defined here because its base class is slow to import. It is not
  in TFDS's registry, since its data are those of this call.
  """
  import tensorflow_datasets as tfds

  tfds.disable_progress_bar()
  messages = tfds.features.Sequence(
    {'role': tfds.features.Text(), 'content': tfds.features.Text()}
  )
  features = tfds.features.FeaturesDict(
    {
      'prompt': messages,
      'completion': messages,
      'info_json': tfds.features.Text(),
    }
  )
  with tfds.core.registered.skip_registration():

    class Conversations(tfds.core.GeneratorBasedBuilder):
      """Prompts and completions; nothing is downloaded, so no checksums."""

      url_infos = _checksums_path = None

      def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=features)

      def _split_generators(self, dl_manager):
        del dl_manager
        return {split: enumerate(items) for split, items in examples.items()}

      def _generate_examples(self):
        raise AssertionError('the splits are given as iterables')

  Conversations.name = name
  Conversations.VERSION = tfds.core.Version(VERSION)
  return Conversations(data_dir=folder, file_format='array_record')


def _example(row: rows.Row) -> dict[str, Any]:
  for message in (*row.prompt, *row.completion):
    if set(message) != {'role', 'content'}:
      raise ValueError(
        f'{row.where}: a message must hold role and content only: got '
        f'{message!r:.200}'
      )
  return {
    'prompt': [dict(message) for message in row.prompt],
    'completion': [dict(message) for message in row.completion],
    'info_json': json.dumps(dict(row.info)),
  }


def _row(example: Mapping[str, Any], where: str) -> Mapping[str, Any]:
  """Returns an example as the row that it was written from."""
  try:
    raw = {key: _host(value) for key, value in example.items()}
  except UnicodeDecodeError as error:
    raise ValueError(f'{where}: texts must be UTF-8: {error.reason}') from error
  for column, fields in raw.items():
    # TFDS gives a list of messages as a dict of lists.
    if isinstance(fields, Mapping) and {'role', 'content'} <= set(fields):
      lists = list(fields.values())
      if all(isinstance(x, list) and len(x) == len(lists[0]) for x in lists):
        raw[column] = [
          dict(zip(fields, values, strict=True))
          for values in zip(*lists, strict=True)
        ]
  info = json.loads(raw.pop('info_json', '{}'))
  return {**raw, **info}


def _host(value: Any) -> Any:
  """Converts TFDS values (bytes, arrays) to JSON types."""
  if isinstance(value, bytes):
    return value.decode()
  if isinstance(value, Mapping):
    return {key: _host(child) for key, child in value.items()}
  if isinstance(value, np.ndarray | list | tuple):
    return [_host(child) for child in value]
  return value.item() if isinstance(value, np.generic) else value
