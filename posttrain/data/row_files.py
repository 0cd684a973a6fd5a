"""Data sets of rows: JSONL, Parquet, Arrow and CSV files, and TFDS.

A file's kind is the ending of its name; a folder without such files, or a name
that begins with `tfds:`, is a TFDS data set. Several files are one data set
(`files`). A row is a mapping from column to value.

JSONL has one JSON object per line; blank lines are allowed. A table, and JSONL
that was written from one, stores each field in every row, so that a missing one
is null: nulls are left out, also inside of messages. A .json file may be one
list of such objects, which memory then holds. CSV values are strings; an
empty one is an empty string.

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
import collections
import contextlib
import csv
import glob
import itertools
import json
import os
import pathlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.data import rows, sources
from posttrain.util import disk, errors

Objects = Sequence[rows.RawRow]

TABLES = ('.parquet', '.arrow', '.feather', '.csv')
ENDINGS = ('.jsonl', '.json', *TABLES)
# Names of a held-out split, in order of preference.
_HELD_OUT = ('eval', 'validation', 'valid', 'val', 'dev', 'test')
_SPLIT = re.compile(
  rf'(?:.*[\W_])?(train|{"|".join(_HELD_OUT)})(?:ing)?(?:[\W_]|$)'
)
_MAX_FIELD = 2**26  # bytes of a row in CSV
_BATCH = 1024  # rows that are converted at a time


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
  return rows.Rows(objects(path, split), columns or {}, key)


def objects(path: str | pathlib.Path, split: str = 'train') -> Objects:
  """Returns (row, 'file:row') of each row of a data set.

  Args:
    path: see `files`; or a folder or name of a TFDS data set. A file is a table
      if it ends in .parquet, .arrow, .feather or .csv; else JSONL, or a list in
      a .json file.
    split: 'train' or 'eval', of a folder, or a TFDS name that has none.

  Raises:
    ValueError: as `files`, `Lines`, `Table` and `Examples`.
  """
  parts = [_open(x) for x in files(path, split)]
  if not parts:
    return Examples(path, split)
  return Files(parts) if parts[1:] else parts[0]


def _open(path: pathlib.Path) -> Objects:
  kind = path.suffix.lower()
  data = path.read_bytes() if kind == '.json' else b''
  if not data.lstrip().startswith(b'['):
    return Table(path) if kind in TABLES else Lines(path)
  values = disk.parse_json(data, str(path))
  if not values or not all(isinstance(x, dict) for x in values):
    raise ValueError(
      f'{path}: a list of rows must hold JSON objects: got {values!r:.200}'
    )
  return [(_value(row), f'{path}:{i}') for i, row in enumerate(values, 1)]


def files(path: str | pathlib.Path, split: str = 'train') -> list[pathlib.Path]:
  """Returns the files of a data set, in order; [] of a TFDS data set.

  Args:
    path: a file; files, folders and patterns, as 'data/train-*.parquet', with
      commas between them; or a folder, of whose files those count that have
      the split's name as the last such word in their own or their folder's;
      without any, those without a split's name.
    split: 'train' or 'eval'.

  Raises:
    ValueError: a pattern matches no file.
  """
  folder = pathlib.Path(path).expanduser()
  if folder.is_file():
    return [folder]
  if is_tfds(path):
    return []
  if not folder.is_dir():
    parts = []
    for name in os.fspath(path).split(','):
      matches = sorted(glob.glob(os.path.expanduser(name)))
      chosen = [file for match in matches for file in files(match, split)]
      if not chosen:
        raise ValueError(
          'a file of data, or a folder of such files, must exist: got '
          f'{name!r:.200}{errors.near_path(name)}'
        )
      parts += chosen
    return parts
  by_split = collections.defaultdict(list)
  for file in sorted([*folder.glob('*'), *folder.glob('*/*')]):
    # Others have notes in .json; the datasets library has its cache there.
    is_cache = file.match('cache-*.arrow')
    if file.suffix.lower() in ('.jsonl', *TABLES) and not is_cache:
      split_name = _SPLIT.match(str(file.relative_to(folder)).lower())
      by_split[split_name and split_name[1]].append(file)
  others = by_split.pop(None, [])
  if split == 'train' or not by_split:
    return by_split.get('train', others)
  return next(filter(None, map(by_split.get, _HELD_OUT)), [])


def fingerprint(path: str | pathlib.Path, split: str = 'train') -> str:
  """Returns the sha256, hex, of a data set's content; of TFDS, all splits."""
  folder = find_tfds(os.fspath(path))[0] if is_tfds(path) else path
  parts = files(path, split) or [pathlib.Path(folder)]
  prints = [sources.file_fingerprint(x) for x in parts]
  if not prints[1:]:
    return prints[0]
  return sources.fingerprint(*map(str.encode, prints))


class Files(Objects):
  """The rows of several files, one file after another."""

  def __init__(self, parts: Sequence[Objects]):
    self._parts = parts
    self._ends = list(itertools.accumulate(map(len, parts)))

  def __len__(self) -> int:
    return self._ends[-1]

  def __getitem__(self, index: int) -> rows.RawRow:
    index = range(len(self))[index]
    part = bisect.bisect(self._ends, index)
    return self._parts[part][index - self._ends[part]]

  def __iter__(self) -> Iterator[rows.RawRow]:
    return itertools.chain.from_iterable(self._parts)


class Lines(Objects):
  """The rows of a JSONL file as (object, 'file:line').

  Each is read when it is used: memory has the position and number of each line.
  The file must not change during a run.
  """

  def __init__(self, path: str | pathlib.Path):
    """Finds the lines that are not blank; reads none of them as JSON.

    Raises:
      ValueError: there are none.
    """
    self._path = path
    self._starts, self._numbers = array.array('q'), array.array('q')
    with open(path, 'rb') as file:
      start = 0
      for number, line in enumerate(file, 1):
        if line.strip():
          self._starts.append(start)
          self._numbers.append(number)
        start += len(line)
    if not self._starts:
      raise ValueError(f'{path}: a JSONL file must hold rows: got none')

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, index: int) -> rows.RawRow:
    where = f'{self._path}:{self._numbers[index]}'
    with open(self._path, 'rb') as file:
      file.seek(self._starts[index])
      line = file.readline()
    try:
      row, problem = json.loads(line.rstrip()), 'another value'
    except (ValueError, RecursionError) as error:
      row, problem = None, errors.text(error)
    if not isinstance(row, Mapping):
      raise ValueError(
        f'{where}: a line of JSONL must be one JSON object in UTF-8, not '
        f'{line!r:.60}: {problem}{errors.pointer(self._path)}'
      )
    return _value(row), where


class Table(Objects):
  """The rows of a table as (row, 'file:row') from 1.

  It holds the columns as Arrow does, which is about the size of the texts, and
  converts a row when it is used.
  """

  def __init__(self, path: str | pathlib.Path):
    """Reads the columns.

    Raises:
      ValueError: the file is empty or malformed.
    """
    import pyarrow as pa  # slow to import

    self._path = path
    try:
      self._table = _table(path)
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
      raise ValueError(
        f'{path} must be a table of its kind, .parquet, .arrow or .csv (in '
        f'UTF-8): {errors.text(error)}{errors.pointer(path)}'
      ) from error
    pa.default_memory_pool().release_unused()  # what decoding has needed
    if not len(self):
      raise ValueError(f'{path}: a table must hold rows: got none')

  def __len__(self) -> int:
    return len(self._table)

  def __getitem__(self, index: int) -> rows.RawRow:
    return next(self._rows(range(len(self))[index], 1))

  def __iter__(self) -> Iterator[rows.RawRow]:
    for start in range(0, len(self), _BATCH):
      yield from self._rows(start, _BATCH)

  def _rows(self, start: int, count: int) -> Iterator[rows.RawRow]:
    values = self._table.slice(start, count).to_pylist()
    for number, row in enumerate(values, start + 1):
      yield _value(row), f'{self._path}:{number}'


def _table(path: str | pathlib.Path):
  """Reads a file as an Arrow table."""
  import pyarrow as pa
  from pyarrow import csv as arrow_csv
  from pyarrow import parquet

  kind = pathlib.Path(path).suffix.lower()
  if kind == '.parquet':
    with parquet.ParquetFile(path) as file:
      return file.read()
  if kind == '.csv':
    with open(path, encoding='utf-8-sig', newline='') as file:
      header = next(csv.reader(file), [])
    return arrow_csv.read_csv(
      path,
      # Its errors name the row only where one thread reads.
      arrow_csv.ReadOptions(use_threads=False, block_size=_MAX_FIELD),
      arrow_csv.ParseOptions(newlines_in_values=True),
      arrow_csv.ConvertOptions(column_types=dict.fromkeys(header, pa.string())),
    )
  with pa.OSFile(os.fspath(path), 'rb') as source:
    try:
      return pa.ipc.open_file(source).read_all()
    except pa.ArrowInvalid:  # a stream, as the datasets library writes
      source.seek(0)
      return pa.ipc.open_stream(source).read_all()


def _value(value: Any) -> Any:
  """Returns a value as JSON would have it, without nulls in objects.

  Bytes are texts in UTF-8; others, such as an image, are only counted.
  """
  if isinstance(value, Mapping):
    return {k: _value(v) for k, v in value.items() if v is not None}
  if isinstance(value, np.ndarray | list):
    return [_value(item) for item in value]
  if isinstance(value, bytes):
    with contextlib.suppress(UnicodeDecodeError):
      return value.decode()
    return f'{len(value)} bytes'
  value = value.item() if isinstance(value, np.generic) else value
  is_plain = value is None or isinstance(value, str | bool | int | float)
  return value if is_plain else str(value)


PREFIX = 'tfds:'
_NAME = re.compile(
  r'tfds:(?P<name>\w+)(/(?P<config>\w[\w.+-]*))?'
  r'(:(?P<version>\d+\.\d+\.\d+))?(:(?P<split>[A-Za-z]\w*(\[[^\[\]]*\])?))?',
  re.ASCII,
)
_VERSION = re.compile(r'\d+\.\d+\.\d+', re.ASCII)


def is_tfds(path: str | os.PathLike[str]) -> bool:
  return os.fspath(path).startswith(PREFIX)


def parse_tfds(text: str) -> dict[str, str | None]:
  """Returns name, config, version and split of a name; None = not given.

  Raises:
    ValueError: the text has another form.
  """
  parts = _NAME.fullmatch(text)
  if not parts:
    raise ValueError(
      'the name of a TFDS data set must have the form '
      f'tfds:NAME[/CONFIG][:VERSION][:SPLIT]: got {text!r:.200}'
    )
  return parts.groupdict()


def find_tfds(text: str) -> tuple[str, str]:
  """Returns the folder of a name, and the name with its config and version.

  A name without a version stands for the newest one.

  Raises:
    ValueError: there is none; names the folder in which it was looked for.
  """
  fields = parse_tfds(text)
  place = os.environ.get('TFDS_DATA_DIR') or '~/tensorflow_datasets'
  root = pathlib.Path(place).expanduser().absolute() / fields['name']
  known = []
  for pattern in ('*', '*/*'):
    for file in root.glob(f'{pattern}/dataset_info.json'):
      *config, version = file.parent.relative_to(root).parts
      if _VERSION.fullmatch(version):
        known.append(('/'.join(config), version))
  fitting = [
    (config, version)
    for config, version in known
    if fields['config'] in (None, config)
    and fields['version'] in (None, version)
  ]
  configs = {config for config, _ in fitting}
  if len(configs) != 1:
    raise ValueError(
      f'{text!s:.200} must name one TFDS data set in {root}: got '
      f'{len(configs)} that fit, of {sorted(known)}; nothing is downloaded, '
      '`tfds build NAME --file_format=array_record` prepares one'
    )
  config, version = max(fitting, key=lambda x: [*map(int, x[1].split('.'))])
  name = '/'.join(filter(None, (fields['name'], config)))
  parts = filter(None, (name, version, fields['split']))
  return str(root / config / version), PREFIX + ':'.join(parts)


VERSION = '1.0.0'


def write_tfds(
  splits: Mapping[str, Iterable[rows.Row]],
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
  import tensorflow_datasets as tfds  # slow to import

  folder = pathlib.Path(folder).expanduser().absolute()
  target = folder / name / VERSION
  if target.exists():
    raise ValueError(f'{str(target)!r} must not exist yet: remove it')
  examples = {split: [] for split in splits}
  for split, split_rows in splits.items():
    for row in split_rows:
      for message in (*row.prompt, *row.completion):
        if set(message) != {'role', 'content'}:
          raise ValueError(
            f'{row.where}: a message must hold role and content only: got '
            f'{message!r:.200}'
          )
      examples[split].append(
        {
          'prompt': list(map(dict, row.prompt)),
          'completion': list(map(dict, row.completion)),
          'info_json': json.dumps(dict(row.info)),
        }
      )
  tfds.disable_progress_bar()
  text = tfds.features.Text()
  messages = tfds.features.Sequence({'role': text, 'content': text})
  features = {'prompt': messages, 'completion': messages, 'info_json': text}
  # Not in TFDS's registry: its data are those of this call.
  with tfds.core.registered.skip_registration():

    class Conversations(tfds.core.GeneratorBasedBuilder):
      """Prompts and completions; nothing is downloaded, so no checksums."""

      url_infos = _checksums_path = None

      def _info(self):
        return tfds.core.DatasetInfo(
          builder=self, features=tfds.features.FeaturesDict(features)
        )

      def _split_generators(self, dl_manager):
        del dl_manager
        return {split: enumerate(items) for split, items in examples.items()}

      def _generate_examples(self):
        raise AssertionError('the splits are given as iterables')

  Conversations.name = name
  Conversations.VERSION = tfds.core.Version(VERSION)
  Conversations(
    data_dir=folder, file_format='array_record'
  ).download_and_prepare()
  return target


class Examples(Sequence[rows.RawRow]):
  """The examples of a split as (row, 'data set:split:number').

  Each is read when it is used; memory holds the index of the shards.
  """

  def __init__(self, path: str | pathlib.Path, split: str):
    """Opens a data set; reads no example.

    Args:
      path: a data set's folder, a parent of exactly one data set, or a name
        that `find_tfds` knows.
      split: 'train'; or 'eval', which also stands for 'validation' or 'test'.
        A name may have another one, which then counts.

    Raises:
      ValueError: there is no such data set or split, or it is not in
        ArrayRecord.
    """
    import tensorflow_datasets as tfds  # slow to import

    folder, named = os.fspath(path), None
    if is_tfds(folder):
      named = parse_tfds(folder)['split']
      folder, _ = find_tfds(folder)
    known = [
      file.parent
      for depth in range(4)
      for file in pathlib.Path(folder).glob('*/' * depth + 'dataset_info.json')
    ]
    if len(known) != 1:
      raise ValueError(
        'a folder must hold .jsonl, .parquet, .arrow or .csv, or one TFDS data '
        f'set: got {[*map(str, known)]} in {folder!r}; of files in .json name '
        "a pattern, as 'DIR/*.json'"
      )
    builder = tfds.builder_from_directory(known[0])
    names = _HELD_OUT if split == 'eval' else (split,)
    names = (named.partition('[')[0],) if named else names
    present = [name for name in names if name in builder.info.splits]
    if not present:
      raise ValueError(
        f'{path} must have a split named one of {names}: got '
        f'{sorted(builder.info.splits)}'
      )
    split = named or present[0]
    self._where = f'{folder}:{split}'
    try:
      self._source = builder.as_data_source(split=split)
    except (NotImplementedError, ValueError) as error:  # another format; slice
      raise ValueError(
        f'{path}: the split {split!r} must be read in any order, from files in '
        f'ArrayRecord (`tfds build --file_format=array_record`): {error}'
      ) from error

  def __len__(self) -> int:
    return len(self._source)

  def __getitem__(self, index: int) -> rows.RawRow:
    index = range(len(self))[index]
    raw = _value(self._source[index])
    for column, fields in raw.items():
      # TFDS gives a list of messages as a dict of lists.
      if isinstance(fields, Mapping) and {'role', 'content'} <= set(fields):
        lists = list(fields.values())
        if all(isinstance(x, list) and len(x) == len(lists[0]) for x in lists):
          raw[column] = [
            dict(zip(fields, values, strict=True))
            for values in zip(*lists, strict=True)
          ]
    raw |= json.loads(raw.pop('info_json', '{}'))
    return raw, f'{self._where}:{index + 1}'
