"""JSONL files: one JSON object per line, blank lines allowed."""

import json
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.data import rows


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
    ValueError: the file is missing or empty, or a line is not an object; the
      message begins with file:line.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise ValueError(f'a JSONL file must exist: got {str(path)!r}')
  empty = True
  with file.open('rb') as lines:
    for number, line in enumerate(lines, 1):
      if line.strip():
        empty = False
        where = f'{path}:{number}'
        yield _object(line, where), where
  if empty:
    raise ValueError(f'{path}: a JSONL file must hold rows: got none')


def _object(line: bytes, where: str) -> Mapping[str, Any]:
  try:
    # Some editors write a BOM.
    row = json.loads(line.decode('utf-8-sig'))
  except ValueError as error:  # bad UTF-8 raises one, too
    raise ValueError(
      f'{where}: a line must be one JSON object in UTF-8: got '
      f'{line[:60]!r} ({error})'
    ) from error
  if not isinstance(row, Mapping):
    raise ValueError(f'{where}: a row must be an object: got {row!r}')
  return row
