"""Data sets of rows: JSONL, Parquet, Arrow and CSV files, and TFDS.

A file's kind is the ending of its name; a folder, or a name that begins with
`tfds:`, is a TFDS data set. A row is a mapping from column to value.

JSONL has one JSON object per line; blank lines are allowed. A table stores each
field in every row, so that a missing one is null: nulls are left out, also
inside of messages. CSV values are strings; an empty one is an empty string.
"""

import array
import bisect
import csv
import io
import itertools
import json
import os
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from posttrain.data import rows, sources, tfds, tfds_names

Objects = Sequence[tuple[Mapping[str, Any], str]]

PARQUET, ARROW, CSV = ('.parquet',), ('.arrow', '.feather'), ('.csv',)
HELD = 64 * 2**20  # bytes of a JSONL file whose text is held
_MAX_FIELD = 2**26  # characters of a value in CSV
_BATCH = 1024  # rows of a table that are converted at a time


class NoRows(ValueError):
  """A file has no rows."""


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
    path: see `objects`.
    columns: column -> its name among those of `rows`.
    split: see `objects`.
    key: dotted key of `columns`, for errors.

  Raises:
    ValueError: as `objects`; or an object is not a row of conversation data.
  """
  try:
    return rows.Rows(objects(path, split), columns or {}, key)
  except NoRows as error:
    raise ValueError(f'{error}; a row must have {rows.FORM}') from None


def objects(path: str | pathlib.Path, split: str = 'train') -> Objects:
  """Returns (row, 'file:row') of each row of a data set.

  Args:
    path: a folder or name of a TFDS data set; a table if the path ends in
      .parquet, .arrow, .feather or .csv; else JSONL.
    split: 'train' or 'eval', of a TFDS data set whose name has none.

  Raises:
    ValueError: as `Lines`, `Table` and `tfds.Examples`.
  """
  if tfds_names.is_name(path) or os.path.isdir(path):
    return tfds.Examples(path, split)
  if not os.path.isfile(path):
    raise ValueError(f'a file of rows must exist: got {os.fspath(path)!r:.200}')
  is_table = pathlib.Path(path).suffix.lower() in PARQUET + ARROW + CSV
  return Table(path) if is_table else Lines(path)


def fingerprint(path: str | pathlib.Path) -> str:
  """Returns the sha256, hex, of a data set's content, of all its splits."""
  name = os.fspath(path)
  folder = tfds_names.find(name) if tfds_names.is_name(name) else name
  return sources.file_fingerprint(pathlib.Path(folder))


class Lines(Objects):
  """The rows of a JSONL file as (object, 'file:line').

  Each is read when it is used. Of a file larger than `HELD`, memory has the
  position and number of each line; it must not change during a run.
  """

  def __init__(self, path: str | pathlib.Path):
    """Finds the lines that are not blank; reads none of them as JSON.

    Raises:
      ValueError: there are none.
    """
    self._path = path
    self._starts, self._numbers = array.array('q'), array.array('q')
    self._text = None
    if os.path.getsize(path) <= HELD:
      self._text = pathlib.Path(path).read_bytes()
    with self._open() as file:
      start = 0
      for number, line in enumerate(file, 1):
        if line.strip():
          self._starts.append(start)
          self._numbers.append(number)
        start += len(line)
    if not self._starts:
      raise NoRows(f'{path}: a JSONL file must hold rows: got none')

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, index: int) -> tuple[Mapping[str, Any], str]:
    with self._open() as file:
      return self._read(file, index)

  def __iter__(self) -> Iterator[tuple[Mapping[str, Any], str]]:
    with self._open() as file:
      for index in range(len(self)):
        yield self._read(file, index)

  def _open(self) -> BinaryIO:
    held = self._text
    return open(self._path, 'rb') if held is None else io.BytesIO(held)

  def _read(self, file: BinaryIO, index: int) -> tuple[Mapping[str, Any], str]:
    where = f'{self._path}:{self._numbers[index]}'
    file.seek(self._starts[index])
    line = file.readline()
    hint = ''
    if line.lstrip()[:1] == b'[' and self._numbers[index] == 1:
      hint = (
        '; this file looks like a JSON list: JSONL has an object on each line'
      )
    try:
      row = json.loads(line.rstrip(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
      problem = str(error)
      if isinstance(error, json.JSONDecodeError):
        problem = f'{error.msg} at column {error.pos + 1}'
      raise ValueError(
        f'{where}: a line must be one JSON object in UTF-8: {problem}; got '
        f'{line!r:.60}{hint}'
      ) from error
    if not isinstance(row, Mapping):
      raise ValueError(
        f'{where}: a row must be an object: got {row!r:.60}{hint}'
      )
    return row, where


def _refuse_constant(text: str):
  raise ValueError(f'numbers must be finite: got {text}')


class Table(Objects):
  """The rows of a table as (row, 'file:row') from 1; in CSV 'file:line'.

  It holds the columns as Arrow does, which is about the size of the texts, and
  converts a row when it is used.
  """

  def __init__(self, path: str | pathlib.Path):
    """Reads the columns.

    Raises:
      ValueError: the file is empty or malformed.
    """
    import pyarrow as pa  # slow to import

    self._path, self._starts = path, [0]
    # Record batches, each with the numbers of its rows in the file.
    self._parts: list[tuple[Any, Sequence[int]]] = []
    is_csv = pathlib.Path(path).suffix.lower() in CSV
    for batch, numbers in (_csv_parts if is_csv else _arrow_parts)(path):
      self._parts.append((batch, numbers))
      self._starts.append(self._starts[-1] + len(batch))
    pa.default_memory_pool().release_unused()  # what decoding has needed
    if not len(self):
      raise NoRows(f'{path}: a table must hold rows: got none')

  def __len__(self) -> int:
    return self._starts[-1]

  def __getitem__(self, index: int) -> tuple[Mapping[str, Any], str]:
    index = range(len(self))[index]
    part = bisect.bisect_right(self._starts, index) - 1
    return next(self._rows(part, index - self._starts[part], 1))

  def __iter__(self) -> Iterator[tuple[Mapping[str, Any], str]]:
    for part, (batch, _) in enumerate(self._parts):
      for start in range(0, len(batch), _BATCH):
        yield from self._rows(part, start, _BATCH)

  def _rows(
    self, part: int, start: int, count: int
  ) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yields rows of a record batch.

    Raises:
      ValueError: a value is none that JSON has.
    """
    import pyarrow as pa

    batch, numbers = self._parts[part]
    numbers = numbers[start : start + count]
    try:
      values = batch.slice(start, count).to_pylist()
    except (pa.ArrowException, ValueError, OverflowError) as error:
      raise ValueError(
        f'{self._path}:{numbers[0]}: this row and the {len(numbers) - 1} after '
        f'it must hold values that Python has: {error}'
      ) from error
    for row, number in zip(values, numbers, strict=True):
      where = f'{self._path}:{number}'
      yield (
        {
          key: _value(value, f'{where}: {key}')
          for key, value in row.items()
          if value is not None
        },
        where,
      )


def _csv_parts(path) -> Iterator[tuple[Any, Sequence[int]]]:
  """Yields (record batch, the number of each row's last line)."""
  import pyarrow as pa

  csv.field_size_limit(_MAX_FIELD)
  try:
    with open(path, encoding='utf-8-sig', newline='') as file:
      reader = csv.reader(file, strict=True)
      header = next(reader, [])
      _check_names(header, path)
      lines = ((values, reader.line_num) for values in reader if values)
      while part := list(itertools.islice(lines, _BATCH)):
        for values, number in part:
          if len(values) != len(header):
            raise ValueError(
              f'{path}:{number}: a row must have the {len(header)} values of '
              f'its header: got {len(values)}; put quotes around a value with '
              'commas'
            )
        columns = zip(*(values for values, _ in part), strict=True)
        arrays = [pa.array(column, pa.large_string()) for column in columns]
        numbers = array.array('q', (number for _, number in part))
        yield pa.RecordBatch.from_arrays(arrays, names=header), numbers
  except (csv.Error, UnicodeDecodeError) as error:
    raise ValueError(f'{path} must be CSV in UTF-8: {error}') from error


def _arrow_parts(path) -> Iterator[tuple[Any, Sequence[int]]]:
  """Yields (record batch, the number of each row)."""
  import pyarrow as pa

  count = 1
  try:
    for batch in _arrow_batches(path):
      _check_names(batch.schema.names, path)
      yield batch, range(count, count + len(batch))
      count += len(batch)
  except (pa.ArrowException, OSError) as error:
    raise ValueError(
      f'{path} must be a table of its kind: {error}; name it by its kind, one '
      'of .parquet, .arrow and .csv'
    ) from error


def _arrow_batches(path) -> Iterator[Any]:
  """Yields record batches of a Parquet file, or of either Arrow format."""
  import pyarrow as pa
  import pyarrow.parquet as parquet

  if pathlib.Path(path).suffix.lower() in PARQUET:
    with parquet.ParquetFile(path) as file:
      yield from file.iter_batches(batch_size=_BATCH)
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


def _check_names(names: Sequence[str], path) -> None:
  if len(set(names)) < len(names):
    raise ValueError(
      f'{path}: a table must name each column once: got {names!r:.200}'
    )


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
    f'{value!r:.200}, of type {type(value).__name__}; convert the column'
  )
