"""Rows of tables: Parquet, Arrow and CSV files.

A row is a mapping from column to value, as in JSONL. A table stores every
field in every row, so that a missing one is null: nulls are left out, also
inside of messages. CSV values are strings; an empty one is an empty string.

`objects` reads a file once, batch by batch. `Table` holds its columns as Arrow
does, which is about the size of the texts, and converts a row when it is used.
"""

import array
import bisect
import csv
import itertools
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from posttrain.data import jsonl
from posttrain.util import foreign

PARQUET, ARROW, CSV = ('.parquet',), ('.arrow', '.feather'), ('.csv',)
SUFFIXES = PARQUET + ARROW + CSV
_MAX_FIELD = 2**26  # characters of a value in CSV
_BATCH = 1024  # rows that are converted at a time


def is_table(path: str | pathlib.Path) -> bool:
  """Returns whether a file's name ends as that of a table."""
  return pathlib.Path(path).suffix.lower() in SUFFIXES


def objects(
  path: str | pathlib.Path,
) -> Iterator[tuple[Mapping[str, Any], str]]:
  """Yields (row, 'file:row') of each row, from 1; in CSV 'file:line'.

  Raises:
    ValueError: the file is missing, empty or malformed, or a value is none
      that JSON has; the message begins with the file, and the row if one is
      at fault.
  """
  empty = True
  for rows, numbers in _parts(path):
    empty = empty and not len(rows)
    yield from _converted(rows, numbers, path)
  if empty:
    raise jsonl.NoRows(f'{path}: a table must hold rows: got none')


class Table(Sequence[tuple[Mapping[str, Any], str]]):
  """The rows of a file as (row, 'file:row'), see `objects`."""

  def __init__(self, path: str | pathlib.Path):
    """Reads the columns.

    Raises:
      ValueError: the file is missing, empty or malformed.
    """
    import pyarrow as pa

    self._path = path
    self._batches, self._starts = [], [0]
    self._numbers = array.array('q')
    for rows, numbers in _parts(path):
      self._batches.append(rows)
      self._numbers.extend(numbers)
      self._starts.append(len(self._numbers))
    pa.default_memory_pool().release_unused()  # what decoding has needed
    if not self._numbers:
      raise jsonl.NoRows(f'{path}: a table must hold rows: got none')

  def __len__(self) -> int:
    return len(self._numbers)

  def __getitem__(self, index: int) -> tuple[Mapping[str, Any], str]:
    index = range(len(self))[index]
    part = bisect.bisect_right(self._starts, index) - 1
    row = self._batches[part].slice(index - self._starts[part], 1)
    numbers = self._numbers[index : index + 1]
    return next(_converted(row, numbers, self._path))

  def __iter__(self) -> Iterator[tuple[Mapping[str, Any], str]]:
    for batch, start in zip(self._batches, self._starts[:-1], strict=True):
      numbers = self._numbers[start : start + len(batch)]
      yield from _converted(batch, numbers, self._path)


def _converted(
  batch: Any, numbers: Sequence[int], path: str | pathlib.Path
) -> Iterator[tuple[Mapping[str, Any], str]]:
  """Yields (row, 'file:row') of a record batch."""
  import pyarrow as pa

  for start in range(0, len(batch), _BATCH):
    part = numbers[start : start + _BATCH]
    try:
      rows = batch.slice(start, _BATCH).to_pylist()
    except (pa.ArrowException, ValueError, OverflowError) as error:
      raise ValueError(
        f'{path}:{part[0]}: this row and the {len(part) - 1} after it must '
        f'hold values that Python has: {foreign.text(error)}'
      ) from error
    for row, number in zip(rows, part, strict=True):
      where = f'{path}:{number}'
      yield (
        {
          key: _value(value, f'{where}: {foreign.text(key, 80)}')
          for key, value in row.items()
          if value is not None
        },
        where,
      )


def _parts(path: str | pathlib.Path) -> Iterator[tuple[Any, Sequence[int]]]:
  """Yields (record batch, the number of each row in its file)."""
  if not os.path.isfile(path):
    raise ValueError(
      f'a table must exist: got {foreign.quote(os.fspath(path))}'
    )
  is_csv = pathlib.Path(path).suffix.lower() in CSV
  yield from (_csv_parts if is_csv else _arrow_parts)(path)


def _csv_parts(path) -> Iterator[tuple[Any, Sequence[int]]]:
  import pyarrow as pa  # slow to import

  lines = _csv(path)
  while part := list(itertools.islice(lines, _BATCH)):
    header = part[0][0]
    columns = zip(*(values for _, values, _ in part), strict=True)
    arrays = [pa.array(column, pa.large_string()) for column in columns]
    numbers = [number for _, _, number in part]
    yield pa.RecordBatch.from_arrays(arrays, names=header), numbers


def _csv(path) -> Iterator[tuple[list[str], list[str], int]]:
  """Yields (header, values, the number of the row's last line)."""
  old = csv.field_size_limit(_MAX_FIELD)
  try:
    with open(path, encoding='utf-8-sig', newline='') as file:
      reader = csv.reader(file, strict=True)
      header = next(reader, [])
      _check_names(header, f'{path}:1')
      _check_delimiter(header, f'{path}:1')
      for values in reader:
        if values and len(values) != len(header):
          raise ValueError(
            f'{path}:{reader.line_num}: a row must have the {len(header)} '
            f'values of its header: got {len(values)}; put quotes around a '
            'value with commas'
          )
        if values:
          yield header, values, reader.line_num
  except (csv.Error, UnicodeDecodeError) as error:
    raise ValueError(
      f'{path} must be CSV in UTF-8: {foreign.text(error)}'
    ) from error
  finally:
    csv.field_size_limit(old)


def _check_delimiter(header: Sequence[str], where: str) -> None:
  """Refuses a header of one name that has another delimiter in it."""
  other = [x for x in ';\t|' if len(header) == 1 and x in header[0]]
  if other:
    raise ValueError(
      f'{where}: a CSV file must have commas between its values: got a header '
      f'{foreign.quote(header[0])}, with {other[0]!r} between them; write the '
      'file with commas, or as JSONL'
    )


def _arrow_parts(path) -> Iterator[tuple[Any, Sequence[int]]]:
  import pyarrow as pa

  count = 1
  try:
    for batch in _batches(path):
      _check_names(batch.schema.names, f'{path}')
      yield batch, range(count, count + len(batch))
      count += len(batch)
  except (pa.ArrowException, OSError) as error:
    raise ValueError(
      f'{path} must be a table of its kind: {foreign.text(error)}; name it by '
      'its kind, one of .parquet, .arrow and .csv'
    ) from error


def _check_names(names: Sequence[str], where: str) -> None:
  if len(set(names)) < len(names):
    raise ValueError(
      f'{where}: a table must name each column once: got {foreign.quote(names)}'
    )


def _batches(path) -> Iterator[Any]:
  """Yields record batches of a Parquet file, or of either Arrow format."""
  import pyarrow as pa
  import pyarrow.parquet as parquet

  if pathlib.Path(path).suffix.lower() in PARQUET:
    with parquet.ParquetFile(path) as file:
      yield from file.iter_batches(batch_size=1024)
    return
  with pa.OSFile(os.fspath(path), 'rb') as source:
    try:
      file = pa.ipc.open_file(source)
    except pa.ArrowInvalid:  # a stream, as the datasets library writes
      source.seek(0)
      yield from pa.ipc.open_stream(source)
      return
    for index in range(file.num_record_batches):
      yield file.get_batch(index)


def _value(value: Any, where: str) -> Any:
  """Returns a value as JSON would have it, without nulls in objects.

  Raises:
    ValueError: JSON has no such value.
  """
  if isinstance(value, dict):
    return {k: _value(v, where) for k, v in value.items() if v is not None}
  if isinstance(value, list):
    return [_value(item, where) for item in value]
  if value is None or isinstance(value, str | bool | int):
    return value
  if isinstance(value, float) and value - value == 0:
    return value
  raise ValueError(
    f'{where} must hold texts, finite numbers, lists and objects: got '
    f'{foreign.quote(value)}, of type {foreign.kind(value)}; convert the column'
  )
