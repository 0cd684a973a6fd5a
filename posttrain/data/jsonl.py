"""Rows of a JSONL file: one JSON object per line, blank lines allowed."""

import json
import pathlib

from posttrain.data import rows


def read(path: str | pathlib.Path) -> tuple[rows.Row, ...]:
  """Reads all rows of a file, in its order.

  Raises:
    ValueError: the file is missing or empty, or a line is not a row; the
      message begins with file:line.
  """
  file = pathlib.Path(path)
  if not file.is_file():
    raise ValueError(f'a JSONL file must exist: got {str(path)!r}')
  found = []
  with file.open('rb') as lines:
    for number, line in enumerate(lines, 1):
      where = f'{path}:{number}'
      if line.strip():
        found.append(rows.parse(_object(line, where), where))
  if not found:
    raise ValueError(f'{path}: a JSONL file must hold rows: got none')
  return tuple(found)


def _object(line: bytes, where: str):
  try:
    return json.loads(line.decode('utf-8-sig'))  # some editors write a BOM
  except ValueError as error:  # also what bad UTF-8 raises
    raise ValueError(
        f'{where}: a line must be one JSON object in UTF-8: got '
        f'{line[:60]!r} ({error})'
    ) from error
