"""Data sets of rows: JSONL, Parquet, Arrow and CSV files, and TFDS.

A file's kind is the ending of its name; a folder, or a name that begins with
`tfds:`, is a TFDS data set. A row is a mapping from column to value.

JSONL has one JSON object per line; blank lines are allowed. A table stores each
field in every row, so that a missing one is null: nulls are left out, also
inside of messages. CSV values are strings; an empty one is an empty string.

TFDS data sets are in ArrayRecord, written and read without tensorflow; nothing
is downloaded.

    tfds:NAME[/CONFIG][:VERSION][:SPLIT]      tfds:gsm8k:1.0.0:train[10%:]

`find_tfds` looks for a name in the folder of the variable TFDS_DATA_DIR, or in
~/tensorflow_datasets, where TFDS writes what it prepares. The code of a data
set is neither needed nor run. `write_tfds` makes the columns `prompt` and
`completion`, each a sequence of `{'role', 'content'}`, and `info_json`;
`Examples` reads any data set, one example at a time, from the shard that has
it. TFDS orders examples by a hash of their key, so that their order is fixed
but is not that of insertion; texts come back as bytes.
"""

import array
import bisect
import csv
import dataclasses
import io
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

import numpy as np

from posttrain.data import rows, sources

Objects = Sequence[tuple[Mapping[str, Any], str]]

PARQUET, ARROW, CSV = ('.parquet',), ('.arrow', '.feather'), ('.csv',)
HELD = 64 * 2**20  # bytes of a JSONL file whose text is held
_MAX_FIELD = 2**26  # characters of a value in CSV
_BATCH = 1024  # rows that are converted at a time


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
    ValueError: as `Lines`, `Table` and `Examples`.
  """
  if is_tfds(path) or os.path.isdir(path):
    return Examples(path, split)
  if not os.path.isfile(path):
    raise ValueError(f'a file of rows must exist: got {os.fspath(path)!r:.200}')
  is_table = pathlib.Path(path).suffix.lower() in PARQUET + ARROW + CSV
  return Table(path) if is_table else Lines(path)


def fingerprint(path: str | pathlib.Path) -> str:
  """Returns the sha256, hex, of a data set's content, of all its splits."""
  name = os.fspath(path)
  folder = find_tfds(name) if is_tfds(name) else name
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


PREFIX = 'tfds:'
_NAME = re.compile(
  r'tfds:(?P<name>\w+)(/(?P<config>\w[\w.+-]*))?'
  r'(:(?P<version>\d+\.\d+\.\d+))?(:(?P<split>[A-Za-z]\w*(\[[^\[\]]*\])?))?',
  re.ASCII,
)
_VERSION = re.compile(r'\d+\.\d+\.\d+', re.ASCII)


@dataclasses.dataclass(frozen=True)
class Name:
  """The parts of a name; None = not given."""

  name: str
  config: str | None
  version: str | None  # None = the newest one
  split: str | None  # with a slice, perhaps, as in train[10%:]


def is_tfds(path: str | os.PathLike[str]) -> bool:
  return os.fspath(path).startswith(PREFIX)


def parse_tfds(text: str) -> Name:
  """Returns the parts of a name.

  Raises:
    ValueError: the text has another form.
  """
  parts = _NAME.fullmatch(text)
  if not parts:
    raise ValueError(
      'the name of a TFDS data set must have the form '
      'tfds:NAME[/CONFIG][:VERSION][:SPLIT], as in tfds:gsm8k:1.0.0:train: '
      f'got {text!r:.200}'
    )
  return Name(**parts.groupdict())


def find_tfds(text: str) -> str:
  """Returns the folder of a name: of its version, or of the newest one.

  Raises:
    ValueError: there is none; names the folder in which it was looked for.
  """
  wanted, root = parse_tfds(text), _root()
  known = _versions(root / wanted.name)
  fitting = [
    (config, version)
    for config, version in known
    if wanted.config in (None, config) and wanted.version in (None, version)
  ]
  configs = {config for config, _ in fitting}
  if len(configs) == 1:
    config, version = max(fitting, key=lambda x: _number(x[1]))
    return str(root / wanted.name / (config or '') / version)
  if not known:
    name = '/'.join(filter(None, (wanted.name, wanted.config)))
    raise ValueError(
      f'{text!s:.200} must be a TFDS data set in {root}: got none of '
      'that name; nothing is downloaded: prepare it where tensorflow is '
      f'installed, by `tfds build {name} --file_format=array_record`, or set '
      'TFDS_DATA_DIR'
    )
  shown = sorted(':'.join(filter(None, parts)) for parts in known)
  raise ValueError(
    f'{text!s:.200} must name one data set in {root / wanted.name}: got '
    f'{len(configs)} that fit, of {shown}; name CONFIG and VERSION'
  )


def with_version(text: str) -> str:
  """Returns a name with the config and version that `find` finds now."""
  wanted, folder = parse_tfds(text), pathlib.Path(find_tfds(text))
  *config, version = folder.relative_to(_root() / wanted.name).parts
  parts = ('/'.join((wanted.name, *config)), version, wanted.split)
  return PREFIX + ':'.join(filter(None, parts))


def _root() -> pathlib.Path:
  folder = os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
  return pathlib.Path(folder).expanduser().absolute()


def _versions(folder: pathlib.Path) -> list[tuple[str | None, str]]:
  """Returns (config or None, version) of the data sets in a folder."""
  found = []
  for pattern in ('*', '*/*'):
    for file in folder.glob(f'{pattern}/dataset_info.json'):
      *config, version = file.parent.relative_to(folder).parts
      if _VERSION.fullmatch(version):
        found.append((*config, None)[:1] + (version,))
  return found


def _number(version: str) -> tuple[int, ...]:
  return tuple(map(int, version.split('.')))


VERSION = '1.0.0'

# Names of a held-out split, in order of preference.
_HELD_OUT = ('eval', 'validation', 'test')


def write_tfds(
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
        `util.row_files`.
      split: 'train'; or 'eval', which also stands for 'validation' or 'test'.
        A name may have another one, which then counts.

    Raises:
      ValueError: there is no such data set or split, or it is not in
        ArrayRecord.
    """
    import tensorflow_datasets as tfds  # slow to import

    folder, named = os.fspath(path), None
    if is_tfds(folder):
      named = parse_tfds(folder).split
      folder = find_tfds(folder)
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
