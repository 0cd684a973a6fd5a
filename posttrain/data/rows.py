"""Rows of conversation data, from JSONL or TFDS.

Accepted columns: `prompt` and `completion`, each a string or a list of
messages, the completion with or without the prompt before it; or `messages`,
which is split before its first assistant turn. Other columns are kept in
`info`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from posttrain import types
from posttrain.chat import messages
from posttrain.util import foreign

COLUMNS = ('prompt', 'completion', 'messages')


@dataclasses.dataclass(frozen=True)
class Row:
  """A prompt and its demonstrated completion."""

  prompt: types.Messages  # its assistant turns are not trained
  completion: types.Messages  # holds at least one assistant turn
  where: str  # 'file:line', for error messages
  info: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def parse(raw: Any, where: str) -> Row:
  """Reads a row.

  Args:
    raw: a mapping with the columns above.
    where: the row's name in error messages.

  Raises:
    ValueError: a column is missing, contradicts another, or has another form.
  """
  if not isinstance(raw, Mapping):
    raise ValueError(
      f'{where}: a row must be an object: got {foreign.quote(raw)}'
    )
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
  elif named == ('prompt', 'completion'):
    prompt = turns_of(raw['prompt'], 'prompt', 'user', where)
    completion = answer_of(raw, 'completion', prompt, where)
  else:
    raise ValueError(
      f"{where}: a row must have 'prompt' and 'completion', or 'messages': "
      f'got columns {foreign.text(sorted(raw))}; rename or convert them'
    )
  return Row(prompt, completion, where, info)


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
      f'all of the prompt: got {foreign.quote(turns[0])} first; leave out the '
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
      f'{foreign.quote(raw[column])}; nothing would be trained on'
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
      f'{where}: {column} must be {expected}: got {foreign.quote(value)}'
    )
  for index, message in enumerate(value):
    place = f'{where}: {column}[{index}]'
    messages.check(message, place)
    try:
      message['content'].encode()
    except UnicodeEncodeError as error:  # JSON can escape half a character
      raise ValueError(
        f'{place}.content must be Unicode: got half a character (a lone '
        f'surrogate) at {error.start}'
      ) from error
  return tuple(value)
