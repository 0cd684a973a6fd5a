"""Rows of conversation data, from JSONL, tables or TFDS.

Accepted columns: `prompt` and `completion`, each a string or a list of
messages, the completion with or without the prompt before it; `prompt` alone,
for answers that are sampled; or `messages`, which is split before its first
assistant turn (`prompt` may repeat it). Other columns are kept in `info`;
`tools` and `chat_template_kwargs` are read as well.
Columns of other names are renamed first, and those of ShareGPT and Alpaca are
recognised (`renamed`).
"""

import hashlib
import json
import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain import types
from posttrain.chat import rendering, tool_calls
from posttrain.util import disk, errors

RawRow = tuple[Mapping[str, Any], str]  # with its name, 'file:line'
COLUMNS = ('prompt', 'completion', 'messages')
# What a row may have, for errors.
FORM = (
  "'prompt' and 'completion', or 'messages', or 'prompt' alone where answers "
  'are sampled'
)
_UNREAD = ('images', 'image', 'audio', 'videos', 'functions', 'system')
# Texts of flags: false and true ones in turns.
_FLAGS = 'false true 0 1 0.0 1.0 no yes'.split()
COLUMNS_KEY = 'config.STAGE.envs.ENV.env.columns'


class Row(NamedTuple):
  """A prompt and its demonstrated completion, if it has one."""

  prompt: types.Messages  # its assistant turns are not trained
  completion: types.Messages  # holds at least one assistant turn; or ()
  where: str  # 'file:line', for error messages
  info: Mapping[str, Any] = {}
  as_text: bool = False  # the prompt is a string in the file
  tools: types.Tools | None = None  # of the column `tools`; calls are not read
  # Variables of the chat template, of the column `chat_template_kwargs`.
  variables: Mapping[str, Any] = {}


class Rows(Sequence[Row]):
  """The rows of a data set, each read again and parsed when it is used.

  `hashes`: a number of each row's prompt, u64[rows].
  """

  def __init__(
    self,
    objects: Sequence[RawRow],
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
    for index, (raw, where) in enumerate(check_columns(objects, columns)):
      row = parse(raw, where, columns, key)
      self.hashes[index] = hashed(row.prompt or row.completion)

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
      f'got {len(known)}; set eval_path, or eval_fraction=0'
    )
  # In Python's integers: a float of 2**64 fits into no uint64.
  low, high = int(known[0]), int(known[-1])
  bound = min(max(math.ceil(fraction * 2**64), low + 1), high)
  held_out = hashes < np.uint64(bound)
  return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def check_columns(
  objects: Iterable[RawRow], columns: Mapping[str, str]
) -> Iterator[RawRow]:
  """Yields the objects, to be renamed.

  Raises:
    ValueError: at the end, if no object has a column that `columns` names.
  """
  left, first, shown = set(columns), '', ()
  for raw, where in objects:
    if not first:
      first, shown = where, sorted(raw)
      named = renamed(raw, columns, where)
      if others := raw.keys() - columns.keys() - named.keys():
        logging.getLogger('absl').warning(
          '%s: the columns %s are read as %s; the option `columns` names them '
          'otherwise',
          where,
          sorted(others),
          sorted(x for x in named if named[x] != raw.get(x)),
        )
    left -= raw.keys()
    yield raw, where
  if left:
    raise ValueError(
      f'{first}: columns must name columns of the rows, {shown!s:.200}: got '
      f'{sorted(left)!s:.200}{errors.nearest(min(left), shown)}'
    )


def renamed(
  raw: Mapping[str, Any], columns: Mapping[str, str], where: str
) -> dict[str, Any]:
  """Returns a row whose columns have other names.

  `kto_tag` is `label`; and where it has no prompt then, columns of ShareGPT
  (`conversations`) or Alpaca (`instruction`, `input`, `output`, `history`) get
  our names. `system` becomes the first message.

  Args:
    raw: the row.
    columns: column -> its new name, which replaces a column that had it; a row
      may lack columns.
    where: the row's name in error messages.

  Raises:
    ValueError: two columns would have one name, or a known one is not read.
  """
  named = {columns[key]: raw[key] for key in columns if key in raw}
  if len(named) < len(columns.keys() & raw):
    raise ValueError(
      f'{where}: columns must give each of {list(raw)!s:.200} a name of its own'
      f': got {dict(columns)!s:.200}'
    )
  row = {key: raw[key] for key in raw if key not in columns} | named
  if 'kto_tag' in row:
    row['label'] = row.pop('kto_tag')
  column, history = 'prompt', []
  if 'prompt' in row or 'messages' in row:
    if 'messages' in row and not row.keys() & {'completion', 'chosen'}:
      column = 'messages'
  elif isinstance(row.get('conversations'), list):
    column = 'prompt' if 'chosen' in row else 'messages'
    row[column] = row.pop('conversations')
  elif isinstance(row.get('instruction'), str):
    parts = row.pop('instruction'), row.pop('input', None)
    row[column] = '\n\n'.join(map(str, filter(None, parts)))
    if 'output' in row:
      row['completion'] = row.pop('output')
    history = row.pop('history', None) or []
  if column in row:
    before, turns = [('system', row.pop('system', None))], row[column]
    try:
      for question, answer in history:
        before += ('user', question), ('assistant', answer)
    except (TypeError, ValueError):
      raise ValueError(
        f'{where}: history must be pairs of question and answer: got '
        f'{history!r:.200}'
      ) from None
    if given := [{'role': role, 'content': x} for role, x in before if x]:
      if not isinstance(turns, list):
        turns = [{'role': 'user', 'content': turns}]
      is_repeated = given == turns[:1]  # the system message
      row[column] = turns if is_repeated else [*given, *turns]
  if unread := [x for x in _UNREAD if row.get(x)]:
    raise ValueError(
      f'{where}: {unread[0]} must be left out, or renamed by `columns`: '
      'nothing reads it there'
    )
  return row


def flag(raw: Mapping[str, Any], column: str, where: str) -> bool:
  """Reads a column of true and false, 1 and 0, or their texts."""
  text = str(raw[column]).lower()
  if text not in _FLAGS:
    raise ValueError(
      f'{where}: {column} must be true or false, 1 or 0: got '
      f'{raw[column]!r:.200}'
    )
  return _FLAGS.index(text) % 2 == 1


def hashed(prompt: types.Messages) -> int:
  """Returns a number in [0, 2**64), the same for equal messages."""
  text = json.dumps(prompt, sort_keys=True)
  return int(hashlib.blake2b(text.encode(), digest_size=8).hexdigest(), 16)


def parse(
  raw: Mapping[str, Any],
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
  raw = renamed(raw, columns or {}, where)
  info = {key: value for key, value in raw.items() if key not in COLUMNS}
  if 'messages' in raw and 'completion' not in raw:
    turns = turns_of(raw['messages'], 'messages', '', where)
    roles = [turn['role'] for turn in turns]
    if 'assistant' not in roles:
      raise ValueError(
        f'{where}: messages must hold an assistant turn: got {roles}; delete '
        "such rows, or name the column 'prompt', where answers are sampled"
      )
    first = roles.index('assistant')
    prompt, completion = turns[:first], turns[first:]
    if 'prompt' in raw:  # as data sets repeat it
      repeated = turns_of(raw['prompt'], 'prompt', 'user', where)
      if prompt[-len(repeated) :] != repeated:
        raise ValueError(
          f'{where}: prompt must be what messages have before the first '
          f'assistant turn: got {raw["prompt"]!r:.200}; rename one of them'
        )
  elif 'prompt' in raw:
    prompt = turns_of(raw['prompt'], 'prompt', 'user', where)
    completion = ()
    if 'completion' in raw:
      completion = answer_of(raw, 'completion', prompt, where)
  else:
    got = wrong_columns(raw, columns, key)
    raise ValueError(f'{where}: a row must have {FORM}: {got}')
  as_text = isinstance(raw.get('prompt'), str) and 'messages' not in raw
  return Row(
    prompt, completion, where, info, as_text, **template_options(info, where)
  )


def template_options(info: Mapping[str, Any], where: str) -> dict[str, Any]:
  """Reads the columns for the chat template, each a value or its JSON.

  Returns:
    `tools` and `variables` of a row.

  Raises:
    ValueError: a column has another form.
  """
  try:
    tools, variables = (
      disk.parse_json(x, column)
      if isinstance(x := info.get(column), str) and x.strip()
      else x
      for column in ('tools', 'chat_template_kwargs')
    )
    if tools:
      tools = types.Tools(tuple(tool_calls.plain(tools)), 'text')
    if not isinstance(variables or {}, Mapping):
      raise ValueError(
        f'chat_template_kwargs must be an object: got {variables!r:.80}'
      )
  except ValueError as error:
    raise ValueError(
      f'{where}: column {error}; a column of another meaning needs another '
      'name, by the option `columns`'
    ) from None
  return {'tools': tools or None, 'variables': variables or {}}


def wrong_columns(
  raw: Mapping[str, Any], columns: Mapping[str, str] | None, key: str
) -> str:
  """Returns the columns of a row with wrong ones, and what to do about it.

  Args:
    raw: the row, renamed.
    columns: the new names, see `renamed`.
    key: dotted key of the new names.
  """
  shown = f'got columns {sorted(raw)!s:.200}'
  if columns:
    shown += f', renamed by {dict(columns)!s:.200}'
  if ';' in shown:
    return f'{shown}; the columns of a .csv have commas between them'
  likely = 'question problem instruction query input'.split()
  own = next((x for x in likely if x in raw), 'OWN')
  columns = {**(columns or {}), own: 'prompt'}
  return f"{shown}; --{key}='{json.dumps(columns)}' names them anew"


def answer_of(
  raw: Mapping[str, Any], column: str, prompt: types.Messages, where: str
) -> types.Messages:
  """Reads an answer; a prompt that it begins with is cut off."""
  turns = turns_of(raw[column], column, 'assistant', where)
  if turns[: len(prompt)] == prompt:
    rendering.note(f'{column} begins with the prompt, which is taken off it')
    turns = turns[len(prompt) :]
  roles = [turn['role'] for turn in turns]
  if 'assistant' not in roles or roles[0] not in ('assistant', 'tool'):
    raise ValueError(
      f'{where}: {column} must hold an assistant turn, and begin with it, a '
      f'tool turn or all of the prompt: got {raw[column]!r:.200}'
    )
  return turns


def turns_of(value: Any, column: str, role: str, where: str) -> types.Messages:
  """Reads a column; a string is one message with the role, if it has one.

  Raises:
    ValueError: it is neither a string nor a list of messages.
  """
  if isinstance(value, str) and role:
    value = {'role': role, 'content': value}
  if isinstance(value, Mapping):  # one message
    value = (value,)
  if not isinstance(value, list | tuple):
    raise ValueError(
      f'{where}: {column} must be a list of messages{role and " or a string"}: '
      f'got {value!r:.200}'
    )
  return rendering.normalize(value, f'{where}: {column}')
