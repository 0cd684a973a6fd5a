"""Rows of conversation data, from JSONL, tables or TFDS.

Accepted columns: `prompt` and `completion`, each a string or a list of
messages, the completion with or without the prompt before it; `prompt` alone,
for answers that are sampled; or `messages`, which is split before its first
assistant turn. Other columns are kept in `info`; `tools` is read as well.
Columns of other names are renamed first (`renamed`).
"""

import dataclasses
import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import types
from posttrain.chat import rendering, tool_calls
from posttrain.util import errors

COLUMNS = ('prompt', 'completion', 'messages')
# What a row may have, for errors.
FORM = (
  "'prompt' and 'completion', or 'messages', or 'prompt' alone where answers "
  'are sampled'
)
COLUMNS_KEY = 'config.STAGE.envs.ENV.env.columns'


@dataclasses.dataclass(frozen=True)
class Row:
  """A prompt and its demonstrated completion, if it has one."""

  prompt: types.Messages  # its assistant turns are not trained
  completion: types.Messages  # holds at least one assistant turn; or ()
  where: str  # 'file:line', for error messages
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  as_text: bool = False  # the prompt is a string in the file
  tools: types.Tools | None = None  # of the column `tools`; calls are not read


class Rows(Sequence[Row]):
  """The rows of a data set, each read again and parsed when it is used.

  `hashes`: a number of each row's prompt, u64[rows].
  """

  def __init__(
    self,
    objects: Sequence[tuple[Mapping[str, Any], str]],
    columns: Mapping[str, str],
    key: str = COLUMNS_KEY,
  ):
    """Reads and checks every row once; keeps 8 bytes of each.

    Args:
      objects: (object, its name in error messages) of each row.
      columns: column of an object -> the name that it gets, see `renamed`.
      key: dotted key of `columns`, for errors.

    Raises:
      ValueError: an object is no row of conversation data, or no object has a
        column of `columns`.
    """
    self._objects, self._columns = objects, columns
    self._key = key
    self.hashes = np.zeros(len(objects), np.uint64)
    checked = check_columns(objects, columns)
    empty = []
    for index, (raw, where) in enumerate(checked):
      row = parse(raw, where, columns, key)
      self.hashes[index] = hashed(row.prompt)
      turns = [x for x in row.completion if x['role'] == 'assistant']
      texts = (x['content'].strip() or 'tool_calls' in x for x in turns)
      if turns and not any(texts):
        empty.append(where)
    if empty:
      logging.getLogger('absl').warning(
        '%d of %d rows have an empty completion, of which nothing but its end '
        'is learned; the first is %s',
        len(empty),
        len(objects),
        empty[0],
      )

  def __len__(self) -> int:
    return len(self._objects)

  def __getitem__(self, index: int) -> Row:
    return parse(*self._objects[index], self._columns, self._key)

  def __iter__(self) -> Iterator[Row]:
    for raw, where in self._objects:
      yield parse(raw, where, self._columns, self._key)


def split(hashes: np.ndarray, fraction: float) -> tuple[np.ndarray, np.ndarray]:
  """Returns the indices of (rows to train on, held-out rows): i64 each.

  Where the hash puts all prompts on one side, the prompt of the smallest hash
  is held out alone, or that of the largest one trained on.

  Args:
    hashes: a number of each row's prompt, u64[rows].
    fraction: the expected share of held-out prompts, in (0, 1).

  Raises:
    ValueError: the rows have one prompt, or none.
  """
  known = np.unique(hashes)
  if len(known) < 2:
    raise ValueError(
      'eval_fraction must have rows of two prompts at least to hold one out: '
      f'got {len(known)}; add rows, name held-out ones (eval_path, or a second '
      "file after the recipe's name, as in :DIR,DATA,HELD_OUT), or set "
      'eval_fraction=0, which holds out none'
    )
  # In Python's integers: a float of 2**64 fits into no uint64.
  low, high = int(known[0]), int(known[-1])
  bound = min(max(math.ceil(fraction * 2**64), low + 1), high)
  held_out = hashes < np.uint64(bound)
  return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def check_columns(
  objects: Iterable[tuple[Mapping[str, Any], str]], columns: Mapping[str, str]
) -> Iterator[tuple[Mapping[str, Any], str]]:
  """Yields the objects, to be renamed.

  Raises:
    ValueError: at the end, if no object has a column that `columns` names.
  """
  left, first, shown = set(columns), '', ()
  for raw, where in objects:
    if left:
      first, shown = first or where, shown or sorted(raw)
      left -= set(raw)
    yield raw, where
  if left:
    raise ValueError(
      f'{first}: columns must name columns that the rows have: got '
      f'{sorted(left)!s:.200}, expected some of {shown!s:.200}'
      f'{errors.nearest(min(left), shown)}'
    )


def renamed(
  raw: Mapping[str, Any], columns: Mapping[str, str], where: str
) -> dict[str, Any]:
  """Returns a row whose columns have other names.

  Args:
    raw: the row.
    columns: column -> its new name; a row may lack columns.
    where: the row's name in error messages.

  Raises:
    ValueError: two columns would have one name.
  """
  names = {}
  for old in raw:
    new = columns.get(old, old)
    if new in names:
      raise ValueError(
        f'{where}: columns must give each column a name of its own: got '
        f'{new!r:.200} for {[names[new], old]!r:.200}; give '
        'the other one another name'
      )
    names[new] = old
  return {new: raw[old] for new, old in names.items()}


def hashed(prompt: types.Messages) -> int:
  """Returns a number in [0, 2**64), the same for equal messages."""
  text = json.dumps(prompt, sort_keys=True)
  digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
  return int.from_bytes(digest, 'big')


def parse(
  raw: Any,
  where: str,
  columns: Mapping[str, str] | None = None,
  key: str = COLUMNS_KEY,
) -> Row:
  """Reads a row.

  Args:
    raw: a mapping with the columns above.
    where: the row's name in error messages.
    columns: column -> its name among those above, see `renamed`.
    key: dotted key of `columns`, for errors.

  Raises:
    ValueError: a column is missing, contradicts another, or has another form.
  """
  if not isinstance(raw, Mapping):
    raise ValueError(f'{where}: a row must be an object: got {raw!r:.200}')
  raw = renamed(raw, columns, where) if columns else raw
  named = tuple(column for column in COLUMNS if column in raw)
  info = {key: value for key, value in raw.items() if key not in COLUMNS}
  if named == ('messages',):
    turns = _messages(raw['messages'], 'messages', where)
    first = next(
      (i for i, turn in enumerate(turns) if turn['role'] == 'assistant'),
      len(turns),
    )
    prompt, completion = turns[:first], turns[first:]
    _require_answer(completion, raw, 'messages', where)
  elif named in (('prompt', 'completion'), ('prompt',)):
    prompt = turns_of(raw['prompt'], 'prompt', 'user', where)
    completion = ()
    if 'completion' in named:
      completion = answer_of(raw, 'completion', prompt, where)
  else:
    raise ValueError(
      f'{where}: a row must have {FORM}: '
      f'{wrong_columns(raw, COLUMNS, columns, key)}'
    )
  as_text = isinstance(raw.get('prompt'), str)
  tools = _tools(info.get('tools'), where)
  return Row(prompt, completion, where, info, as_text, tools)


def wrong_columns(
  raw: Mapping[str, Any],
  known: Sequence[str],
  columns: Mapping[str, str] | None,
  key: str,
) -> str:
  """Returns the columns of a row with wrong ones, and what to do about it.

  Args:
    raw: the row, renamed.
    known: the columns that it may have.
    columns: the new names, see `renamed`.
    key: dotted key of the new names.
  """
  shown = f'got columns {sorted(raw)!s:.200}'
  if columns:
    shown += f', renamed by {dict(columns)!s:.200}'
  if 'conversations' in raw:
    column = 'messages' if 'messages' in known else 'prompt'
    return f'{shown}; {rendering.SHAREGPT}, in a column {column!r}'
  return f"""{shown}; --{key}='{{"OWN": "prompt", ...}}' names them anew"""


def _tools(value: Any, where: str) -> types.Tools | None:
  """Reads the column `tools`, a list of tools or its JSON; None = no tools."""
  try:
    if isinstance(value, str) and value.strip():
      value = json.loads(value)
    if not value:
      return None
    return types.Tools(tuple(tool_calls.plain(value)), 'text')
  except ValueError as error:
    raise ValueError(
      f'{where}: column tools: {error}; a column of another meaning needs '
      'another name, by '
      'the option `columns`'
    ) from None


def answer_of(
  raw: Mapping[str, Any], column: str, prompt: types.Messages, where: str
) -> types.Messages:
  """Reads an answer; a prompt that it begins with is cut off."""
  turns = turns_of(raw[column], column, 'assistant', where)
  if turns[: len(prompt)] == prompt:
    turns = turns[len(prompt) :]
  _require_answer(turns, raw, column, where)
  if turns[0]['role'] not in ('assistant', 'tool'):
    raise ValueError(
      f'{where}: {column} must begin with an assistant or tool turn, or with '
      f'all of the prompt: got {turns[0]!r:.200} first; leave out the '
      'prompt'
    )
  return turns


def _require_answer(
  turns: types.Messages, raw: Mapping[str, Any], column: str, where: str
) -> None:
  """Raises ValueError where a column has no assistant turn."""
  if not any(message['role'] == 'assistant' for message in turns):
    raise ValueError(
      f'{where}: {column} must hold an assistant turn: got '
      f'{raw[column]!r:.200}; nothing would be trained on'
    )


def turns_of(value: Any, column: str, role: str, where: str) -> types.Messages:
  """Reads a column; a string is one message with the role.

  Raises:
    ValueError: it is neither a string nor a list of messages.
  """
  if isinstance(value, str):
    value = ({'role': role, 'content': value},)
  return _messages(value, column, where)


def _messages(value: Any, column: str, where: str) -> types.Messages:
  if not isinstance(value, list | tuple):
    expected = (
      'a list of messages'
      if column == 'messages'
      else 'a string or a list of messages'
    )
    raise ValueError(
      f'{where}: {column} must be {expected}: got {value!r:.200}'
    )
  for index, message in enumerate(value):
    place = f'{where}: {column}[{index}]'
    rendering.check_message(message, place)
    try:
      message['content'].encode()
    except UnicodeEncodeError as error:  # JSON can escape half a character
      raise ValueError(
        f'{place}.content must be Unicode: got half a character (a lone '
        f'surrogate) at {error.start}'
      ) from error
  return tuple(value)
