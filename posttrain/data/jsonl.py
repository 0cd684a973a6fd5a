"""JSONL files: one JSON object per line, blank lines allowed."""

import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, BinaryIO

from posttrain.data import rows
from posttrain.util import floats, foreign, json_files

MAX_LINE = 64 * 2**20  # bytes of a row


def read(path: str | pathlib.Path) -> tuple[rows.Row, ...]:
  """Reads the rows of conversations in a file, in its order.

  Raises:
    ValueError: as `objects`; or an object is not a row of conversation data.
  """
  return tuple(rows.parse(raw, where) for raw, where in objects(path))


def objects(
  path: str | pathlib.Path,
) -> Iterator[tuple[Mapping[str, Any], str]]:
  """Yields (object, 'file:line') for every line that is not blank.

  Raises:
    ValueError: the file is missing or empty, or a line is not an object, is
      longer than MAX_LINE, or has a number that is not finite; the message
      begins with file:line.
  """
  if not os.path.isfile(path):
    raise ValueError(
      f'a JSONL file must exist: got {foreign.quote(os.fspath(path))}'
    )
  empty = True
  with open(path, 'rb') as file:
    for line, where in _lines(file, path):
      if line.strip():
        empty = False
        yield _object(line, where), where
  if empty:
    raise ValueError(f'{path}: a JSONL file must hold rows: got none')


def _lines(file: BinaryIO, path) -> Iterator[tuple[bytes, str]]:
  """Yields (line, 'file:line'); never holds more than MAX_LINE of a line."""
  number = 0
  while line := file.readline(MAX_LINE + 1):
    number += 1
    where = f'{path}:{number}'
    if len(line) > MAX_LINE:
      raise ValueError(
        f'{where}: a line must have at most {MAX_LINE:,} bytes: got more; '
        'JSONL has one row per line'
      )
    yield line, where


def _object(line: bytes, where: str) -> Mapping[str, Any]:
  try:
    row = json_files.parse(line, f'{where}: a line')
  except ValueError as error:
    raise ValueError(
      f'{error}; it must be one JSON object in UTF-8: got '
      f'{foreign.quote(line, 60)}'
    ) from error
  if not isinstance(row, Mapping):
    raise ValueError(
      f'{where}: a row must be an object: got {foreign.quote(row)}'
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
