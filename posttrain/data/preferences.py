"""Preferences in files of rows: a prompt, a chosen and a rejected answer.

    {"prompt": ..., "chosen": ..., "rejected": ...}      a pair
    {"prompt": ..., "completion": ..., "label": true}    one answer, for KTO

Each of prompt, chosen, rejected and completion is a string or a list of
messages; a prompt that an answer begins with is cut off. Where `prompt` is
missing, chosen and rejected are whole conversations, and the prompt is their
common beginning, up to the last message that is not an assistant's. A pair may
have a `margin`, which the ranking loss subtracts from the difference of the two
rewards. Other columns are kept in `info`. Columns of other names are renamed
first (`rows.renamed`).
"""

import dataclasses
import errno
import json
import os
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import types
from posttrain.data import row_files, rows
from posttrain.util import disk

COLUMNS = ('prompt', 'chosen', 'rejected', 'completion', 'label', 'margin')
# What a preference may have, for errors.
_FORM = (
  "'prompt', 'chosen' and 'rejected', or 'prompt', 'completion' and 'label'"
)
_KEY = 'config.STAGE.pairs.columns'
MAX_MARGIN = 1e6  # of rewards; sums of its loss stay far from infinity


@dataclasses.dataclass(frozen=True)
class Preference:
  """Two answers to a prompt; a missing one is None."""

  prompt: types.Messages
  chosen: types.Messages | None
  rejected: types.Messages | None
  where: str  # 'file:line', for error messages
  margin: float = 0.0
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def read(
  path: str | pathlib.Path,
  columns: Mapping[str, str] | None = None,
  split: str = 'train',
) -> tuple[Preference, ...]:
  """Reads a data set, in its order.

  Args:
    path: see `row_files.objects`.
    columns: column -> its name among those above.
    split: see `row_files.objects`.

  Raises:
    ValueError: as `row_files.objects`; a row is not a preference; or no row has
      a column of `columns`.
  """
  columns = columns or {}
  try:
    objects = rows.check_columns(row_files.objects(path, split), columns)
    return tuple(parse(raw, where, columns) for raw, where in objects)
  except row_files.NoRows as error:
    raise ValueError(f'{error}; a preference must have {_FORM}') from None


def write(path: str | pathlib.Path, pairs: Sequence[Preference]) -> None:
  """Writes pairs for `read`, atomically."""
  pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
  with disk.replacing(path) as file:
    for pair in pairs:
      file.write(json.dumps(_raw(pair)) + '\n')


def check_writable(path: str | pathlib.Path) -> None:
  """Refuses a path that `write` cannot write; changes no existing file.

  Raises:
    OSError: the path is a folder, or cannot be written.
  """
  if pathlib.Path(path).is_dir():
    raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  with disk.replacing(path.with_name(f'{path.name}.check')):
    pass
  path.with_name(f'{path.name}.check').unlink()


def split(
  pairs: Sequence[Preference], fraction: float
) -> tuple[list[Preference], list[Preference]]:
  """Returns (pairs to train on, held-out pairs), by a hash of their prompts.

  Each has a pair at least, unless `fraction` is 0.

  Args:
    pairs: the pairs.
    fraction: the expected share of held-out prompts, in [0, 1).

  Raises:
    ValueError: the pairs have one prompt, or none, and `fraction` is not 0.
  """
  if not fraction:
    return list(pairs), []
  hashes = np.array([rows.hashed(pair.prompt) for pair in pairs], np.uint64)
  train, held_out = rows.split(hashes, fraction)
  return [pairs[i] for i in train], [pairs[i] for i in held_out]


def parse(
  raw: Mapping[str, Any], where: str, columns: Mapping[str, str] | None = None
) -> Preference:
  """Reads a row.

  Args:
    raw: a mapping with the columns above.
    where: the row's name in error messages.
    columns: column -> its name among those above, see `rows.renamed`.

  Raises:
    ValueError: a column is missing, or has another form; the two answers are
      equal.
  """
  raw = rows.renamed(raw, columns, where) if columns else raw
  named = {column for column in COLUMNS if column in raw} - {'margin'}
  info = {key: value for key, value in raw.items() if key not in COLUMNS}
  if named == {'prompt', 'completion', 'label'}:
    prompt = rows.turns_of(raw['prompt'], 'prompt', 'user', where)
    answer = rows.answer_of(raw, 'completion', prompt, where)
    if not isinstance(raw['label'], bool):
      raise ValueError(
        f'{where}: label must be true or false: got {raw["label"]!r:.200}'
      )
    if 'margin' in raw:
      raise ValueError(
        f'{where}: margin must be left out: got {raw["margin"]!r:.200}, but '
        'there is one answer'
      )
    both = (answer, None) if raw['label'] else (None, answer)
    return Preference(prompt, *both, where, info=info)
  if named not in ({'prompt', 'chosen', 'rejected'}, {'chosen', 'rejected'}):
    raise ValueError(
      f'{where}: a preference must have {_FORM}: '
      f'{rows.wrong_columns(raw, COLUMNS, columns, _KEY)}'
    )
  if 'prompt' in raw:
    prompt = rows.turns_of(raw['prompt'], 'prompt', 'user', where)
  else:
    prompt = _shared(raw, where)
  answers = [
    rows.answer_of(raw, column, prompt, where)
    for column in ('chosen', 'rejected')
  ]
  if answers[0] == answers[1]:
    raise ValueError(
      f'{where}: rejected must be another answer than chosen: got '
      f'{raw["rejected"]!r:.200} twice; drop the row'
    )
  margin = raw.get('margin', 0.0)
  is_number = isinstance(margin, int | float) and not isinstance(margin, bool)
  # NaN compares false, and integers of any size exactly.
  if not (is_number and abs(margin) <= MAX_MARGIN):
    raise ValueError(
      f'{where}: margin must be a finite number of at most {MAX_MARGIN:g}: got '
      f'{margin!r:.200}'
    )
  return Preference(prompt, *answers, where, float(margin), info)


def _shared(raw: Mapping[str, Any], where: str) -> types.Messages:
  """Returns the common beginning of two conversations, as their prompt."""
  chosen, rejected = (
    rows.turns_of(raw[column], column, 'assistant', where)
    for column in ('chosen', 'rejected')
  )
  shared = 0
  for ours, theirs in zip(chosen, rejected, strict=False):
    if ours != theirs:
      break
    shared += 1
  while shared and chosen[shared - 1]['role'] == 'assistant':
    shared -= 1
  if all(turn['role'] == 'system' for turn in chosen[:shared]):
    raise ValueError(
      f'{where}: chosen and rejected must be lists of messages that begin '
      "with the same question, where there is no column 'prompt': got "
      f'{raw["chosen"]!r:.60} and {raw["rejected"]!r:.60}; put the question '
      "into 'prompt', or at the beginning of both"
    )
  return chosen[:shared]


def _raw(pair: Preference) -> dict[str, Any]:
  """Returns the row of a pair, the inverse of `parse`."""
  raw = {**pair.info, 'prompt': list(pair.prompt)}
  if pair.chosen and pair.rejected:
    raw |= {'chosen': list(pair.chosen), 'rejected': list(pair.rejected)}
    return raw | ({'margin': pair.margin} if pair.margin else {})
  answer = pair.chosen or pair.rejected
  return raw | {'completion': list(answer), 'label': pair.chosen is not None}
