"""The prompts of a request: text, ids or messages -> token ids.

The text of a completion is tokenized as other servers do: special tokens in it
are special, and bos precedes it. The content of messages is never special.
"""

import dataclasses
from typing import Any

import numpy as np

from posttrain.checkpoints import policies
from posttrain.serve import fields as fields_lib

Refused, wrong = fields_lib.Refused, fields_lib.wrong


@dataclasses.dataclass(frozen=True)
class Served:
  """The served policy, its name, and the limits of requests."""

  policy: policies.Policy
  name: str  # of the model
  capacity: int  # tokens of a sequence
  max_sequences: int  # open at a time


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt as ids and as text."""

  ids: np.ndarray  # i32[P]
  text: str


def conversation(fields: fields_lib.Fields, served: Served) -> tuple[Prompt]:
  """Reads `messages` with the renderer's template; raises Refused."""
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
  """Joins the parts of a content; the renderer checks the rest."""
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
  """Reads `prompt` in any of its forms; raises Refused."""
  prompt, specials = (
    fields.take('prompt'),
    fields.flag('add_special_tokens', True),
  )
  must = 'be a text, token ids, or a list of either'
  if not isinstance(prompt, str | list) or not prompt:
    raise wrong('prompt', f'{must}, and not be empty', prompt)
  single = isinstance(prompt, str) or all(type(x) is int for x in prompt)
  items = [prompt] if single else prompt
  if len(items) > served.max_sequences:
    raise wrong(
      'prompt', f'hold at most {served.max_sequences} of them', f'{len(items)}'
    )
  result = []
  for index, item in enumerate(items):
    place = 'prompt' if single else f'prompt[{index}]'
    if isinstance(item, str):
      result.append(_text(item, place, served, specials))
    elif isinstance(item, list) and all(type(x) is int for x in item):
      ids = _checked(item, place, served)
      result.append(Prompt(ids, served.policy.text(ids.tolist())))
    else:
      raise wrong(place, must, item)
  return tuple(result)


def _text(text: str, place: str, served: Served, specials: bool) -> Prompt:
  """Tokenizes a text, with its special tokens, as other servers do."""
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
  """Returns the ids as an array; raises Refused for unknown ids."""
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
