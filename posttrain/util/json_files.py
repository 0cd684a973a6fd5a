"""JSON files, and errors that name the place."""

import json
import os
import pathlib
from typing import Any

from posttrain.util import errors


def read(path: str | os.PathLike[str]) -> Any:
  """Returns the value of a JSON file.

  Args:
    path: the file; UTF-8, with or without a byte order mark.

  Raises:
    ValueError: it is missing, cannot be read, or is no JSON; names the file.
  """
  try:
    data = pathlib.Path(path).read_bytes()
  except OSError as error:
    raise ValueError(f'{path} must be a file with JSON: {error}') from error
  return parse(data, os.fspath(path))


def read_object(path: str | os.PathLike[str]) -> dict[str, Any]:
  """Returns the JSON object in a file; see `read`."""
  value = read(path)
  if not isinstance(value, dict):
    raise ValueError(
      f'{os.fspath(path)} must hold a JSON object: got {errors.quote(value)}'
    )
  return value


def parse(data: bytes | str, where: str) -> Any:
  """Returns the value of a JSON text.

  Args:
    data: the text; bytes are UTF-8, with or without a byte order mark.
    where: the name of its place in errors, such as a path or 'rows.jsonl:3'.

  Raises:
    ValueError: it is no JSON; names the place.
  """
  try:
    return json.loads(data)
  except (ValueError, RecursionError) as error:
    raise ValueError(f'{where} must be JSON: {errors.text(error)}') from None
