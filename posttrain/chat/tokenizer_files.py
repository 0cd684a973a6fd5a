"""Checks of a `tokenizer.json`, before the `tokenizers` library reads it.

The library takes ids up to 2**32, gives added tokens other ids than the file
says, aborts the process for some sizes, and writes texts of any length for some
normalizers, and any number of ids for some post-processors. What it refuses
itself is not checked here.
"""

import base64
import binascii
import collections
import functools
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

from posttrain.util import foreign, json_files

MAX_ID = 2**24  # ids are smaller
_GROWTH = 64  # characters that normalizers may make of one
_STEPS = 64  # normalizers, pre-tokenizers or decoders
_KEYS = ('normalizer', 'pre_tokenizer', 'decoder')
_ADDED = 64  # ids that a post-processor may add to a text


class Token:
  """A token that a file adds to its vocabulary."""

  def __init__(self, token: Mapping[str, Any]):
    self.id: int = token['id']
    self.text: str = token['content']
    self.special = token.get('special') is True


def check(path: str | pathlib.Path) -> tuple[Token, ...]:
  """Checks a `tokenizer.json`; returns the tokens that it adds.

  Args:
    path: an existing file.

  Raises:
    ValueError: it is no JSON object, has ids that no model has, or steps that
      write texts of any length; names the file.
  """
  path = pathlib.Path(path).expanduser()
  stat = path.stat()
  return _checked(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4)  # a folder's is read twice: a second or more
def _checked(path: pathlib.Path, changed: int, size: int) -> tuple[Token, ...]:
  del changed, size  # a part of the cache's key
  value = json_files.read_object(path)
  ids = _vocabulary(path, value.get('model'))
  tokens = value.get('added_tokens') or []
  if not isinstance(tokens, list):
    _refuse(path, 'added_tokens', 'be a list', tokens)
  for i, token in enumerate(tokens):
    place = f'added_tokens[{i}]'
    if not isinstance(token, dict):
      _refuse(path, place, 'be an object', token)
    text = token.get('content')
    if not isinstance(text, str) or not text:
      _refuse(path, f'{place}.content', 'be a text', text)
    _check_id(path, f'{place}.id', token.get('id'))
    other = ids.setdefault(token['id'], text)
    if other != text:
      pair = f'{foreign.quote(other, 80)} and {foreign.quote(text, 80)}'
      _refuse(
        path, f'{place}.id', f'belong to one token, not {pair}', token['id']
      )
  for key in _KEYS:
    _check_steps(path, key, value.get(key))
  _check_post_processor(path, value.get('post_processor'))
  dropout = value['model'].get('dropout')
  if dropout:
    _refuse(path, 'model.dropout', 'be 0: ids would be random', dropout)
  return tuple(map(Token, tokens))


def _vocabulary(path: pathlib.Path, model: Any) -> dict[int, str]:
  """Returns the texts of a vocabulary by id; {} if it has no ids."""
  vocabulary = model.get('vocab') if isinstance(model, dict) else None
  if not vocabulary:
    _refuse(path, 'model', 'have a vocabulary', model)
  if isinstance(vocabulary, list):  # of (text, score)
    if len(vocabulary) > MAX_ID:
      _refuse(
        path, 'model.vocab', f'have {MAX_ID} tokens at most', len(vocabulary)
      )
    texts = (x[0] if isinstance(x, list) and x else None for x in vocabulary)
    return {i: text for i, text in enumerate(texts) if isinstance(text, str)}
  if not isinstance(vocabulary, dict):
    _refuse(path, 'model.vocab', 'be an object', vocabulary)
  ids: dict[int, str] = {}
  for text, token_id in vocabulary.items():
    if type(token_id) is not int or not 0 <= token_id < MAX_ID:
      _check_id(path, f'model.vocab[{foreign.quote(text, 80)}]', token_id)
    ids[token_id] = text
  if len(ids) < len(vocabulary):
    counts = collections.Counter(vocabulary.values())
    twice = next(i for i, count in counts.items() if count > 1)
    _refuse(path, 'model.vocab', 'have each id once', twice)
  return ids


def _check_id(path: pathlib.Path, place: str, value: Any) -> None:
  if type(value) is not int or not 0 <= value < MAX_ID:
    _refuse(path, place, f'be an id of 0 to {MAX_ID - 1}', value)


def _check_steps(path: pathlib.Path, key: str, value: Any) -> None:
  """Checks how much longer than its input a chain of steps makes a text."""
  steps = list(_steps(value))
  if len(steps) > _STEPS:
    _refuse(path, key, f'have {_STEPS} steps at most', len(steps))
  growth = 1.0
  for step in steps:
    pattern, content = step.get('pattern'), step.get('content')
    if isinstance(pattern, dict) and isinstance(content, str):
      replaced = pattern.get('String')
      if replaced == '':
        _refuse(path, f'{key}.pattern', 'be a text', replaced)
      shortest = len(replaced) if isinstance(replaced, str) else 1
      growth *= max(len(content) / shortest, 1)
    prepended = step.get('prepend')
    if growth > _GROWTH or len(str(prepended or '')) > _GROWTH:
      _refuse(path, key, f'make texts at most {_GROWTH} times as long', step)
    charsmap = step.get('precompiled_charsmap')
    if charsmap is not None and not _is_charsmap(charsmap):
      _refuse(path, f'{key}.precompiled_charsmap', 'be one', charsmap)


def _check_post_processor(path: pathlib.Path, value: Any) -> None:
  """Checks that it adds few ids, and repeats no text."""
  added = 0
  for step in _steps(value):
    if step['type'] != 'TemplateProcessing':
      continue
    tokens = step.get('special_tokens')
    tokens = tokens if isinstance(tokens, dict) else {}
    for name, once in (('single', ['A']), ('pair', ['A', 'B'])):
      place, pieces = f'post_processor.{name}', step.get(name) or []
      if not isinstance(pieces, list) or len(pieces) > _ADDED:
        _refuse(path, place, f'be a list of {_ADDED} pieces at most', pieces)
      texts = []
      for piece in pieces:
        texts.append(_piece_id(piece, 'Sequence'))
        token = tokens.get(_piece_id(piece, 'SpecialToken'))
        ids = token.get('ids') if isinstance(token, dict) else None
        added += len(ids) if isinstance(ids, list) else 1
      names = sorted(text for text in texts if text is not None)
      if names != sorted(set(names)) or not set(names) <= set(once):
        _refuse(path, place, f'have each of {once} once at most', names)
  if added > _ADDED:
    _refuse(path, 'post_processor', f'add {_ADDED} ids at most', added)


def _piece_id(piece: Any, kind: str) -> str | None:
  """Returns the name in a piece of a template, if it is of a kind."""
  value = piece.get(kind) if isinstance(piece, dict) else None
  return str(value.get('id')) if isinstance(value, dict) else None


def _steps(value: Any) -> Iterator[dict[str, Any]]:
  """Yields the objects within a step that have a type, and the step."""
  if isinstance(value, list):
    for item in value:
      yield from _steps(item)
  elif isinstance(value, dict):
    if 'type' in value:
      yield value
    for item in value.values():
      yield from _steps(item)


def _is_charsmap(value: Any) -> bool:
  """Returns whether the table that a charsmap begins with is as long as said.

  The library reserves its memory before it looks.
  """
  try:
    table = base64.b64decode(value, validate=True)
  except (TypeError, ValueError, binascii.Error):
    return False
  return 4 <= int.from_bytes(table[:4], 'little') + 4 <= len(table)


def _refuse(path: pathlib.Path, place: str, must: str, value: Any) -> None:
  raise ValueError(
    f'config.tokenizer.path must name a HuggingFace tokenizer.json: {place} of '
    f'{foreign.text(path)} must {must}: got {foreign.quote(value)}'
  )
