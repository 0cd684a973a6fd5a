"""Data sets of rows: JSONL, Parquet, Arrow and CSV files, and TFDS.

A file's kind is the ending of its name; a folder, or a name that begins with
`tfds:`, is a TFDS data set.
"""

import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.data import jsonl, rows, sources, tables, tfds
from posttrain.util import tfds_names

Objects = Sequence[tuple[Mapping[str, Any], str]]


def read(
  path: str | pathlib.Path,
  columns: Mapping[str, str] | None = None,
  split: str = 'train',
  key: str = rows.COLUMNS_KEY,
) -> rows.Rows:
  """Returns the rows of conversations in a data set, in its order.

  Each is checked now, and read again when it is used: memory holds the index
  of a JSONL file or a TFDS data set, and the columns of a table.

  Args:
    path: see `indexed`.
    columns: column -> its name among those of `rows`.
    split: see `indexed`.
    key: dotted key of `columns`, for errors.

  Raises:
    ValueError: as `indexed`; or an object is not a row of conversation data.
  """
  try:
    objects = indexed(path, split)
  except jsonl.NoRows as error:
    raise ValueError(f'{error}; a row must have {rows.FORM}') from None
  return rows.Rows(objects, columns or {}, key)


def indexed(path: str | pathlib.Path, split: str = 'train') -> Objects:
  """Returns (row, 'file:row') of each row of a data set.

  Args:
    path: a folder or name of a TFDS data set; a table if the path ends in one
      of `tables.SUFFIXES`; else JSONL.
    split: 'train' or 'eval', of a TFDS data set whose name has none.

  Raises:
    ValueError: as `jsonl.Lines`, `tables.Table` and `tfds.Examples`.
  """
  if _is_tfds(path):
    return tfds.Examples(path, split)
  return tables.Table(path) if tables.is_table(path) else jsonl.Lines(path)


def objects(
  path: str | pathlib.Path, split: str = 'train'
) -> Iterator[tuple[Mapping[str, Any], str]]:
  """Yields (row, 'file:row') of each row of a data set, which is read once.

  Args:
    path: see `indexed`.
    split: see `indexed`.

  Raises:
    ValueError: as `jsonl.objects`, `tables.objects` and `tfds.Examples`.
  """
  if _is_tfds(path):
    return iter(tfds.Examples(path, split))
  module = tables if tables.is_table(path) else jsonl
  return module.objects(path)


def _is_tfds(path: str | pathlib.Path) -> bool:
  return tfds_names.is_name(path) or os.path.isdir(path)


def fingerprint(path: str | pathlib.Path) -> str:
  """Returns the sha256, hex, of a data set's content, of all its splits."""
  name = os.fspath(path)
  folder = tfds_names.find(name) if tfds_names.is_name(name) else name
  return sources.file_fingerprint(pathlib.Path(folder))
