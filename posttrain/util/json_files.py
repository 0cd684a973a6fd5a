"""JSON from outside, read under limits.

Configs, tokenizers, model directories, rows and the replies of servers are
JSON of other people. Python's parser takes any size, raises RecursionError for
deep nesting, a ValueError about digits for long numbers, and keeps the last of
two equal keys in silence. Here each of these is one line that names the place.
"""

import collections
import json
import os
import pathlib
import re
from typing import Any

import numpy as np

from posttrain.util import foreign

MAX_BYTES = 256 * 2**20
MAX_DEPTH = 100  # of nested lists and objects
MAX_DIGITS = 1000  # of a number

# Possessive: the memory of a repeated group would grow with the text.
_STRING = re.compile(r'"[^"\\]*+(?:\\.[^"\\]*+)*+"?', re.DOTALL)
_NO_BRACKETS = bytes(i for i in range(256) if chr(i) not in '[]{}')
_PART = 2**16  # brackets that are counted at a time
_DIGITS_TO_ZERO = bytes.maketrans(b'123456789', b'000000000')


def read(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> Any:
  """Returns the value of a JSON file.

  Args:
    path: the file; UTF-8, with or without a byte order mark.
    max_bytes: the largest size.

  Raises:
    ValueError: it is missing, cannot be read, or is not JSON within the limits;
      names the file.
  """
  place = pathlib.Path(path)
  try:
    if place.exists() and not place.is_file():
      raise ValueError(f'{place} must be a file with JSON: it is not a file')
    size = place.stat().st_size
    if size > max_bytes:
      raise ValueError(
        f'{place} must have at most {max_bytes} bytes: got {size}'
      )
    data = place.read_bytes()
  except OSError as error:
    raise ValueError(
      f'{place} must be a file with JSON: {foreign.text(error)}'
    ) from error
  return parse(data, str(place), max_bytes)


def read_object(
  path: str | os.PathLike[str], max_bytes: int = MAX_BYTES
) -> dict[str, Any]:
  """Returns the JSON object in a file; see `read`."""
  value = read(path, max_bytes)
  if not isinstance(value, dict):
    raise ValueError(
      f'{os.fspath(path)} must hold a JSON object: got {foreign.quote(value)}'
    )
  return value


def parse(data: bytes | str, where: str, max_bytes: int = MAX_BYTES) -> Any:
  """Returns the value of a JSON text.

  Args:
    data: the text; bytes are UTF-8, with or without a byte order mark.
    where: the name of its place in errors, such as a path or 'rows.jsonl:3'.
    max_bytes: the largest size.

  Raises:
    ValueError: it is not JSON, is too large or nested deeper than MAX_DEPTH,
      has a number of more than MAX_DIGITS digits, or a key twice in an object.
  """
  if len(data) > max_bytes:
    raise ValueError(
      f'{where} must have at most {max_bytes} bytes: got {len(data)}'
    )
  try:
    text = data.decode('utf-8-sig') if isinstance(data, bytes) else data
    _check_depth(text)
    # Without the hook, a list of numbers is read in a third of the time.
    decoder = _CAREFUL if _has_long_number(text) else _DECODER
    return decoder.decode(text)
  except RecursionError:
    problem = f'nested deeper than {MAX_DEPTH} levels'
  except UnicodeDecodeError as error:
    problem = f'no UTF-8 at byte {error.start}'
  except json.JSONDecodeError as error:
    problem = f'{error.msg.removesuffix(" at")} at {_place(error)}'
  except ValueError as error:
    problem = foreign.text(error)
  raise ValueError(f'{where} must be JSON: {problem}')


def _place(error: json.JSONDecodeError) -> str:
  """Returns the column of an error, and the line if the text has several.

  `where` has the line of a text that is one line of a file.
  """
  text = error.doc.rstrip()
  if '\n' not in text:
    return f'column {min(error.pos, len(text)) + 1}'
  return f'line {error.lineno}, column {error.colno}'


def _check_depth(text: str) -> None:
  if text.count('[') + text.count('{') <= MAX_DEPTH:
    return
  # Brackets within strings do not nest; a long string is skipped in one step.
  rest = _STRING.sub('', text).encode('ascii', 'replace')
  brackets = rest.translate(None, _NO_BRACKETS)
  depth = 0
  for start in range(0, len(brackets), _PART):
    part = np.frombuffer(brackets[start : start + _PART], np.uint8)
    opens = (part == ord('[')) | (part == ord('{'))
    depths = depth + np.cumsum(np.where(opens, 1, -1))
    if depths.max() > MAX_DEPTH:
      raise RecursionError
    depth = int(depths[-1])


def _has_long_number(text: str) -> bool:
  """Returns whether there are more than MAX_DIGITS digits in a row."""
  if len(text) <= MAX_DIGITS:
    return False
  digits = text.encode('ascii', 'replace').translate(_DIGITS_TO_ZERO)
  return b'0' * (MAX_DIGITS + 1) in digits


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
  value = dict(pairs)
  if len(value) < len(pairs):
    counts = collections.Counter(key for key, _ in pairs)
    twice = next(key for key, count in counts.items() if count > 1)
    raise ValueError(f'the key {foreign.quote(twice, 80)} is there twice')
  return value


def _int(digits: str) -> int:
  if len(digits) > MAX_DIGITS:
    raise ValueError(
      f'a number of {len(digits)} digits; at most {MAX_DIGITS} are read'
    )
  return int(digits)


_DECODER = json.JSONDecoder(object_pairs_hook=_object)
_CAREFUL = json.JSONDecoder(object_pairs_hook=_object, parse_int=_int)
