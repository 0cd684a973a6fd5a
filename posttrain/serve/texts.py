"""The prompts of a request: text, ids or messages -> ids that the model reads.

Text of a completion is read as other servers do: a special token in it is
special, and bos goes before it. What messages say is never special.
"""

import dataclasses
from typing import Any

import numpy as np

from posttrain.checkpoints import policies
from posttrain.serve import fields as fields_lib

Refused, wrong = fields_lib.Refused, fields_lib.wrong


@dataclasses.dataclass(frozen=True)
class Served:
  """What is served, and how much of it."""

  policy: policies.Policy
  name: str  # of the model
  capacity: int  # tokens of a sequence
  room: int  # sequences under way


@dataclasses.dataclass(frozen=True)
class Prompt:
  """What is to be gone on with."""

  ids: np.ndarray  # i32[P]
  text: str


def conversation(fields: fields_lib.Fields, served: Served) -> tuple[Prompt]:
  """Reads `messages`, by the renderer's template."""
  renderer, messages = served.policy.renderer, fields.take('messages')
  if renderer is None:
    raise Refused(
      400,
      'messages must be read by a tokenizer: the model has none; send '
      'token ids to /v1/completions',
      'messages',
    )
  if not isinstance(messages, list) or not messages:
    raise wrong('messages', 'be a list of some messages', messages)
  messages = [_message(x, f'messages[{i}]') for i, x in enumerate(messages)]
  try:
    rendered = renderer.render(messages, add_generation_prompt=True)
  except ValueError as error:
    raise Refused(400, f'{error}', 'messages') from error
  return (Prompt(_checked(rendered.ids, 'messages', served), rendered.text),)


def _message(message: Any, place: str) -> Any:
  """Joins a content that comes in parts; the renderer checks the rest."""
  if not isinstance(message, dict):
    raise wrong(place, 'be an object', message)
  parts = message.get('content')
  if not isinstance(parts, list):
    return message
  for part in parts:
    text = isinstance(part, dict) and part.get('type') == 'text'
    if not text or not isinstance(part.get('text'), str):
      raise wrong(f'{place}.content', 'be text, or parts of text', part)
  return {**message, 'content': ''.join(part['text'] for part in parts)}


def prompts(fields: fields_lib.Fields, served: Served) -> tuple[Prompt, ...]:
  """Reads `prompt`, in any of its forms."""
  prompt, specials = (
    fields.take('prompt'),
    fields.flag('add_special_tokens', True),
  )
  must = 'be a text, token ids, or a list of either'
  if not isinstance(prompt, str | list) or not prompt:
    raise wrong('prompt', f'{must}, and not be empty', prompt)
  one = isinstance(prompt, str) or all(type(x) is int for x in prompt)
  several = [prompt] if one else prompt
  if len(several) > served.room:
    raise wrong(
      'prompt', f'hold at most {served.room} of them', f'{len(several)}'
    )
  made = []
  for index, item in enumerate(several):
    place = 'prompt' if one else f'prompt[{index}]'
    if isinstance(item, str):
      made.append(_text(item, place, served, specials))
    elif isinstance(item, list) and all(type(x) is int for x in item):
      ids = _checked(item, place, served)
      made.append(Prompt(ids, served.policy.text(ids.tolist())))
    else:
      raise wrong(place, must, item)
  return tuple(made)


def _text(text: str, place: str, served: Served, specials: bool) -> Prompt:
  """Tokenizes as other servers do: special tokens in a text are special."""
  if served.policy.renderer is None:
    raise Refused(
      400, f'{place} must be token ids: the model has no tokenizer', 'prompt'
    )
  tokenizer = served.policy.renderer.tokenizer
  ids = list(tokenizer.encode_scaffold(text)) if text else []
  bos = tokenizer.bos_id
  if specials and bos is not None and ids[:1] != [bos]:
    ids = [bos, *ids]
  return Prompt(_checked(ids, place, served), text)


def _checked(ids, place: str, served: Served) -> np.ndarray:
  """The ids as an array, if the model can read them."""
  size = served.policy.model.vocab_size
  name = place.partition('[')[0]
  if not len(ids):
    raise Refused(400, f'{place} must have a token: got none', name)
  bad = next((int(i) for i in ids if not 0 <= i < size), None)
  if bad is not None:
    raise Refused(
      400,
      f'{place} must be of ids in [0, {size}), the vocabulary: got {bad}',
      name,
    )
  if len(ids) > served.capacity:
    raise Refused(
      400,
      f'{place} must fit into the context of {served.capacity} tokens: '
      f'got {len(ids)}',
      name,
      'context_length_exceeded',
    )
  return np.asarray(ids, np.int32)
