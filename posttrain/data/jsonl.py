"""JSONL files: one JSON object per line, blank lines allowed.

`objects` reads a file once, from its beginning. `Lines` reads any line again,
from its position in the file, so that the text of a large file is not held.
"""

import array
import io
import os
import pathlib
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from posttrain.util import floats, foreign, json_files

MAX_LINE = 64 * 2**20  # bytes of a row
HELD = 64 * 2**20  # bytes of a file whose text is held


class NoRows(ValueError):
  """A file of rows, a table too, has none."""


def objects(
  path: str | pathlib.Path,
) -> Iterator[tuple[Mapping[str, Any], str]]:
  """Yields (object, 'file:line') for every line that is not blank.

  Raises:
    ValueError: the file is missing or empty, or a line is not an object, is
      longer than MAX_LINE, or has a number that is not finite; the message
      begins with file:line.
  """
  empty = True
  with _open(path) as file:
    for line, number in _lines(file, path):
      empty = False
      where = f'{path}:{number}'
      yield _object(line, where), where
  if empty:
    raise NoRows(f'{path}: a JSONL file must hold rows: got none')


class Lines(Sequence[tuple[Mapping[str, Any], str]]):
  """The rows of a file as (object, 'file:line'), each read when it is used.

  It holds 24 bytes per row: the position, length and number of the line, and a
  checksum, so that a line that has changed since is refused. A file of at most
  `HELD` bytes is held as well, and may change.
  """

  def __init__(self, path: str | pathlib.Path):
    """Finds the lines that are not blank; reads none of them as JSON.

    Raises:
      ValueError: the file is missing or empty, or a line is longer than
        MAX_LINE.
    """
    self._path = path
    self._starts, self._numbers = array.array('q'), array.array('q')
    self._lengths, self._sums = array.array('i'), array.array('I')
    self._text: bytes | None = None
    with _open(path) as file:
      if os.fstat(file.fileno()).st_size <= HELD:
        self._text = file.read()
    with self._reopened() as file:
      for line, number in _lines(file, path):
        self._starts.append(file.tell() - len(line))
        self._lengths.append(len(line))
        self._numbers.append(number)
        self._sums.append(zlib.crc32(line))
    if not self._starts:
      raise NoRows(f'{path}: a JSONL file must hold rows: got none')

  def __len__(self) -> int:
    return len(self._starts)

  def __getitem__(self, index: int) -> tuple[Mapping[str, Any], str]:
    with self._reopened() as file:
      return self._read(file, index)

  def __iter__(self) -> Iterator[tuple[Mapping[str, Any], str]]:
    with self._reopened() as file:
      for index in range(len(self)):
        yield self._read(file, index)

  def _reopened(self) -> BinaryIO:
    held = self._text
    return _open(self._path) if held is None else io.BytesIO(held)

  def _read(self, file: BinaryIO, index: int) -> tuple[Mapping[str, Any], str]:
    where = f'{self._path}:{self._numbers[index]}'
    file.seek(self._starts[index])
    line = file.read(self._lengths[index])
    if zlib.crc32(line) != self._sums[index]:
      raise ValueError(
        f'{where}: a line must stay as it is while a run reads the file: it '
        'has changed; restore it, or start a new run'
      )
    return _object(line, where), where


def _open(path: str | pathlib.Path) -> BinaryIO:
  if not os.path.isfile(path):
    raise ValueError(
      f'a JSONL file must exist: got {foreign.quote(os.fspath(path))}'
    )
  return open(path, 'rb')


def _lines(file: BinaryIO, path) -> Iterator[tuple[bytes, int]]:
  """Yields lines that are not blank, with their numbers from 1.

  It never holds more than MAX_LINE of a line.
  """
  number = 0
  while line := file.readline(MAX_LINE + 1):
    number += 1
    if len(line) > MAX_LINE:
      raise ValueError(
        f'{path}:{number}: a line must have at most {MAX_LINE:,} bytes: got '
        'more; JSONL has one row per line'
      )
    if line.strip():
      yield line, number


def _list_hint(line: bytes, where: str) -> str:
  """Returns what to do about a JSON list in place of lines, or ''."""
  if line.lstrip()[:1] != b'[' or not where.endswith(':1'):
    return ''
  return '; this file looks like a JSON list: JSONL has an object on each line'


def _object(line: bytes, where: str) -> Mapping[str, Any]:
  try:
    row = json_files.parse(line, f'{where}: a line')
  except ValueError as error:
    raise ValueError(
      f'{error}; it must be one JSON object in UTF-8: got '
      f'{foreign.quote(line, 60)}{_list_hint(line, where)}'
    ) from error
  if not isinstance(row, Mapping):
    raise ValueError(
      f'{where}: a row must be an object: got {foreign.quote(row, 60)}'
      f'{_list_hint(line, where)}'
    )
  for key, value in row.items():
    if not _is_finite(value):
      raise ValueError(
        f'{where}: {foreign.text(key, 80)} must hold finite numbers: got '
        f'{foreign.quote(value)}'
      )
  return row


def _is_finite(value: Any) -> bool:
  """Returns whether all numbers in a value are finite floats, or would be."""
  if isinstance(value, str):
    return True
  if isinstance(value, dict):
    return all(map(_is_finite, value.values()))
  if isinstance(value, list):
    return all(map(_is_finite, value))
  return value is None or floats.is_finite(value)
