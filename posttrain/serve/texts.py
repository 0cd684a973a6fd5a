"""The prompts of a request: text, ids or messages -> token ids.

The text of a completion is tokenized as other servers do: special tokens in it
are special, and bos precedes it. The content of messages is never special.

What cannot fit into the context is refused by its size, before it is rendered
or tokenized: a message has at least one token, and a token on average at most
`CHARACTERS_PER_TOKEN` characters.
"""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from posttrain.checkpoints import policies
from posttrain.serve import fields as fields_lib

Refused, wrong = fields_lib.Refused, fields_lib.wrong

CHARACTERS_PER_TOKEN = 32  # ordinary text has about 4
# `developer` is the newer name of the role with the instructions.
_ROLES = {'developer': 'system'}
_PROMPT = 'be a text, token ids, or a list of either'


@dataclasses.dataclass(frozen=True)
class Served:
  """The served policy, its name, and the limits of requests."""

  policy: policies.Policy
  name: str  # of the model
  capacity: int  # tokens of a sequence
  max_sequences: int  # open at a time

  @property
  def max_characters(self) -> int:
    """The most characters of a prompt."""
    return self.capacity * CHARACTERS_PER_TOKEN


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt as ids and as text."""

  ids: np.ndarray  # i32[P]
  text: str


def take_messages(fields: fields_lib.Fields, served: Served) -> list[Any]:
  """Takes the field `messages`; checks its form and its size.

  Raises:
    Refused: with 400.
  """
  messages = fields.take('messages')
  if served.policy.renderer is None:
    raise Refused(
      400,
      'messages must be read by a tokenizer: the model has none; send '
      'token ids to /v1/completions',
      'messages',
    )
  if not isinstance(messages, list) or not messages:
    raise wrong('messages', 'be a list of some messages', messages)
  if len(messages) > served.capacity:
    raise _too_long('messages', len(messages), 'messages', served)
  _check_size(messages, 'messages', served)
  names = _names(served.policy.renderer.template)
  return [_message(x, f'messages[{i}]', names) for i, x in enumerate(messages)]


def conversation(
  messages: list[Any],
  served: Served,
  cancelled: Callable[[], bool] | None = None,
) -> tuple[Prompt, ...]:
  """Renders messages with the renderer's template.

  Args:
    messages: the conversation.
    served: the model, and the limits.
    cancelled: returns whether the result is no longer wanted.

  Raises:
    Refused: with 400.
  """
  renderer = served.policy.renderer
  assert renderer is not None
  try:
    rendered = renderer.prompt(messages, cancelled)
  except ValueError as error:
    raise Refused(400, f'{error}', 'messages') from error
  return (Prompt(_checked(rendered.ids, 'messages', served), rendered.text),)


@functools.lru_cache(maxsize=4)
def _names(template: str | None) -> frozenset[str]:
  """Returns the fields of a message that a template may read: all its words."""
  if template is None:
    # It refuses tool calls itself, and says what to do instead.
    return frozenset({'role', 'content', 'tool_calls'})
  return frozenset({'role', 'content', *re.findall(r'\w+', template)})


def _message(message: Any, place: str, names: frozenset[str]) -> Any:
  """Joins the parts of a content; the renderer checks the rest.

  Args:
    message: a JSON value.
    place: its name in errors.
    names: the fields that the chat template may read.
  """
  if not isinstance(message, dict):
    raise wrong(place, 'be an object', message)
  for name, value in message.items():
    if name not in names:
      _check_absent(f'{place}.{name}', value, 'the chat template')
  role = message.get('role')
  if isinstance(role, str):
    message = {**message, 'role': _ROLES.get(role, role)}
  parts = message.get('content')
  if not isinstance(parts, list):
    return message
  for part in parts:
    text = isinstance(part, dict) and part.get('type') == 'text'
    if not text or not isinstance(part.get('text'), str):
      raise wrong(f'{place}.content', 'be text, or parts of text', part)
    for name, value in part.items():
      if name not in ('type', 'text'):
        _check_absent(f'{place}.content.{name}', value, 'this server')
  return {**message, 'content': ''.join(part['text'] for part in parts)}


def _check_absent(place: str, value: Any, reader: str) -> None:
  """Raises Refused for a value that would be dropped."""
  if value not in (None, '', [], {}):
    raise wrong(
      place,
      f'be left out: {reader} does not read it',
      value,
      'unsupported_field',
    )


def _check_size(value: Any, name: str, served: Served) -> None:
  """Raises Refused if a JSON value has too much text; stops at the limit."""
  size, values = 0, [value]
  while values:
    value = values.pop()
    if isinstance(value, dict):
      values += value.keys()
      values += value.values()
    elif isinstance(value, list):
      values += value
    size += 1 + (len(value) if isinstance(value, str) else 0)
    # Each message has keys, braces and a role besides its text.
    if size > served.max_characters + 16 * served.capacity:
      raise _too_long(name, size, 'characters or more', served)


def _too_long(name: str, count: int, unit: str, served: Served) -> Refused:
  return Refused(
    400,
    f'{name} must fit into the context of {served.capacity} tokens: got '
    f'{count} {unit}',
    name.partition('[')[0],
    'context_length_exceeded',
  )


def take_prompts(fields: fields_lib.Fields, served: Served) -> list[Any]:
  """Takes the field `prompt` in any of its forms; checks its size.

  Returns:
    Texts or lists of ids; not yet checked.

  Raises:
    Refused: with 400.
  """
  prompt = fields.take('prompt')
  if not isinstance(prompt, str | list) or not prompt:
    raise wrong('prompt', f'{_PROMPT}, and not be empty', prompt)
  if len(prompt) > max(served.max_characters, served.max_sequences):
    unit = 'characters' if isinstance(prompt, str) else 'entries'
    raise _too_long('prompt', len(prompt), unit, served)
  single = isinstance(prompt, str) or all(type(x) is int for x in prompt)
  items = [prompt] if single else prompt
  if len(items) > served.max_sequences:
    raise wrong(
      'prompt', f'hold at most {served.max_sequences} of them', len(items)
    )
  return items


def prompts(
  items: list[Any], served: Served, *, specials: bool
) -> tuple[Prompt, ...]:
  """Tokenizes prompts.

  Args:
    items: texts or lists of ids.
    served: the model, and the limits.
    specials: whether bos precedes a text.

  Raises:
    Refused: with 400.
  """
  result = []
  for index, item in enumerate(items):
    place = 'prompt' if len(items) == 1 else f'prompt[{index}]'
    if isinstance(item, str):
      result.append(_text(item, place, served, specials))
    elif isinstance(item, list) and all(type(x) is int for x in item):
      ids = _checked(item, place, served)
      result.append(Prompt(ids, served.policy.text(ids.tolist())))
    else:
      raise wrong(place, _PROMPT, item)
  return tuple(result)


def _text(text: str, place: str, served: Served, specials: bool) -> Prompt:
  """Tokenizes a text, with its special tokens, as other servers do."""
  if served.policy.renderer is None:
    raise Refused(
      400, f'{place} must be token ids: the model has no tokenizer', 'prompt'
    )
  if len(text) > served.max_characters:
    raise _too_long(place, len(text), 'characters', served)
  tokenizer = served.policy.renderer.tokenizer
  ids = list(tokenizer.encode_scaffold(text)) if text else []
  bos = tokenizer.bos_id
  if specials and bos is not None and ids[:1] != [bos]:
    ids = [bos, *ids]
  return Prompt(_checked(ids, place, served), text)


def _checked(ids, place: str, served: Served) -> np.ndarray:
  """Returns the ids as an array; raises Refused for unknown ids."""
  size = served.policy.model.vocab_size
  name = place.partition('[')[0]
  if not len(ids):
    raise Refused(400, f'{place} must have a token: got none', name)
  if len(ids) > served.capacity:
    raise _too_long(place, len(ids), 'tokens', served)
  bad = next((i for i in ids if not 0 <= i < size), None)
  if bad is not None:
    raise Refused(
      400,
      f'{place} must be of ids in [0, {size}), the vocabulary: got '
      f'{fields_lib.quote(int(bad))}',
      name,
    )
  return np.asarray(ids, np.int32)
