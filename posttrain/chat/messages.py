"""The check of a message's form, for files and environments."""

from collections.abc import Mapping
from typing import Any

from posttrain import types
from posttrain.util import foreign

# What to do about the messages of another format.
SHAREGPT = (
  'messages of ShareGPT, {"from": "human", "value": ...} and {"from": "gpt", '
  '"value": ...}, are {"role": "user", "content": ...} and {"role": '
  '"assistant", "content": ...} here: convert them'
)


def check(message: Any, place: str) -> None:
  """Checks that a value is a message.

  Args:
    message: must be a mapping with a role of `types.ROLES` and a str content.
    place: its name in the error, such as 'rows.jsonl:3: messages[0]'.

  Raises:
    ValueError: the value is no message.
  """
  if not isinstance(message, Mapping):
    raise ValueError(
      f'{place} must be an object: got {foreign.quote(message)}, expected '
      "{'role': ..., 'content': ...}"
    )
  role, content = message.get('role'), message.get('content')
  if role not in types.ROLES:
    hint = f'; {SHAREGPT}' if role is None and 'from' in message else ''
    raise ValueError(
      f'{place}.role must be one of {types.ROLES}: got {foreign.quote(role)}'
      f'{hint}'
    )
  if not isinstance(content, str):
    raise ValueError(
      f'{place}.content must be a string: got {foreign.quote(content)}'
    )
