"""Strict readers of a server's JSON responses.

A number is accepted only if its token is certain: every list must have the
requested length, every shown token id must be the one that was sent, and
missing values are errors.

Each reader takes a response of /completions, and `server`, the server's name in
errors. Axes: n tokens of a sequence.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.decode import requests

_MINUS_INFINITY = -9999.0  # in vLLM's responses: JSON has no infinity
_ROUNDING = 1e-2  # nats by which a logprob may exceed 0
_MARK = 'token_id:'  # prefix of an id in a list of tokens


def prompt_logprobs(
  response: dict[str, Any], ids: np.ndarray, server: str
) -> np.ndarray | None:
  """Reads vLLM's `prompt_logprobs`.

      [null, {'<id>': {'logprob': x, ...}, ...}, ...]   # per token

  Every entry has the token's own id, and may have others, in any order.

  Args:
    response: the response to a request with `prompt_logprobs`.
    ids: i32[n], the prompt.
    server: the server's name.

  Returns:
    f32[n] in nats, entry 0 is 0; None if the server ignored the field.

  Raises:
    ValueError: an entry does not match its prompt token.
  """
  choice = _choice(response, server)
  entries = choice.get('prompt_logprobs')
  if entries is None:
    return None
  _check_prompt(response, choice, ids, server)
  if not isinstance(entries, list) or len(entries) != len(ids):
    raise ValueError(
      f'{server} must give one entry of prompt_logprobs per token: got '
      f'{_size(entries)}, expected {len(ids)}'
    )
  logprobs = np.zeros(len(ids), np.float32)
  for place, (token, entry) in enumerate(
    zip(ids.tolist(), entries, strict=True)
  ):
    if place == 0:
      continue  # the first token has no prediction
    if not isinstance(entry, dict) or str(token) not in entry:
      shown = list(entry)[:8] if isinstance(entry, dict) else entry
      raise ValueError(
        f'{server} must give the logprob of token {place} of the prompt, '
        f'which is id {token}: got ids {shown!r}'
      )
    value = entry[str(token)]
    if isinstance(value, dict):
      value = value.get('logprob')
    logprobs[place] = _number(value, f'token {place} (id {token})', server)
  return logprobs


def echo(
  response: dict[str, Any], ids: np.ndarray, server: str
) -> np.ndarray | None:
  """Reads the older API's `echo`: the prompt is part of the completion.

      {'tokens': [...], 'token_logprobs': [null, x, ...]}

  One sampled token may follow those of the prompt.

  Args:
    response: the response to a request with `echo`, `logprobs` and at most one
      token.
    ids: i32[n], the prompt.
    server: the server's name.

  Returns:
    f32[n] in nats, entry 0 is 0; None if the server ignored the fields.

  Raises:
    ValueError: an entry does not match its prompt token.
  """
  choice = _choice(response, server)
  logprobs = choice.get('logprobs')
  if not isinstance(logprobs, dict):
    return None
  entries = logprobs.get('token_logprobs')
  if not isinstance(entries, list) or len(entries) <= 1 < len(ids):
    return None  # at most the sampled token's logprob
  _check_prompt(response, choice, ids, server)
  tokens = _marked(logprobs)
  if len(entries) - len(ids) not in (0, 1) or (
    tokens is not None and len(tokens) != len(entries)
  ):
    raise ValueError(
      f'{server} must echo the prompt as the tokens that were sent, and one '
      f'token more at most: got {_size(entries)} logprobs and '
      f'{_size(tokens)} token ids, expected {len(ids)}'
    )
  if tokens is not None:
    _check_same(tokens[: len(ids)], ids, 'echo', server)
  scored = np.zeros(len(ids), np.float32)
  for place, token in enumerate(ids.tolist()):
    if place > 0:  # the first token has no prediction
      where = f'token {place} (id {token})'
      scored[place] = _number(entries[place], where, server)
  return scored


def completion(
  response: dict[str, Any],
  request: requests.Request,
  prompt: np.ndarray,
  max_tokens: int,
  server: str,
) -> requests.Completion:
  """Reads a completion sampled by the server.

  Args:
    response: the response to a request for token ids.
    request: the sequence's first request.
    prompt: i32[n], the ids that were sent.
    max_tokens: the requested number of tokens.
    server: the server's name.

  Returns:
    The sampled ids, stop token included; logprobs that the response does not
    have are 0.

  Raises:
    ValueError: no token ids, too many of them, or an ambiguous stop token.
  """
  choice = _choice(response, server)
  _check_prompt(response, choice, prompt, server)
  ids, stops = _sampled(choice, server), request.stop_ids
  reason = _stop_reason(choice, ids, max_tokens, stops, server)
  kept = len(ids)
  if reason == 'eos' and (not ids or ids[-1] not in stops):
    ids = [*ids, _missing_stop_id(choice, stops, server)]
  early = [place for place, token in enumerate(ids[:-1]) if token in stops]
  if early or len(ids) > max_tokens:
    raise ValueError(
      f'{server} must stop at stop_token_ids {stops} and after {max_tokens} '
      f'tokens: got {len(ids)}, stop tokens before the end at {early[:8]}'
    )
  return requests.Completion(
    request.id,
    np.asarray(ids, np.int32),
    _sampled_logprobs(choice, kept, len(ids), server),
    reason,
    version=-1,
  )


def text(response: dict[str, Any], server: str) -> str:
  """Reads the reply of a chat; '' if the content is null."""
  message = _choice(response, server).get('message')
  if not isinstance(message, dict):
    raise ValueError(
      f'{server} must answer a chat with a message: got {message!r}'
    )
  return message.get('content') or ''


def _choice(response: dict[str, Any], server: str) -> dict[str, Any]:
  choices = response.get('choices')
  if isinstance(choices, list) and len(choices) == 1:
    if isinstance(choices[0], dict):
      return choices[0]
  raise ValueError(
    f'{server} must answer with one choice: got {str(response)[:200]}'
  )


def _check_prompt(
  response: dict[str, Any], choice: dict[str, Any], ids: np.ndarray, server: str
) -> None:
  """Checks the prompt's ids and length, if the response shows them."""
  shown = choice.get('prompt_token_ids')
  if shown is not None:
    _check_same(shown, ids, 'read', server)
  usage = response.get('usage')
  count = usage.get('prompt_tokens') if isinstance(usage, dict) else None
  if count not in (None, len(ids)):
    raise ValueError(
      f'{server} must read the prompt as the tokens that were sent: got '
      f'{count} of them, expected {len(ids)}; it must add none (bos) and '
      'cut none off'
    )


def _check_same(shown: Any, prompt: np.ndarray, verb: str, server: str) -> None:
  ids = prompt.tolist()
  if shown == ids:
    return
  shown = shown if isinstance(shown, list) else []
  pairs = enumerate(zip(shown, ids, strict=False))
  place = next((i for i, (a, b) in pairs if a != b), min(len(shown), len(ids)))
  raise ValueError(
    f'{server} must {verb} the prompt as the tokens that were sent: got '
    f'{shown[place : place + 4]} from token {place} on, expected '
    f'{ids[place : place + 4]}; it must add none (bos) and cut none off'
  )


def _marked(logprobs: dict[str, Any]) -> list[int] | None:
  """Returns the ids of marked tokens; None unless all are marked."""
  tokens = logprobs.get('tokens')
  if not isinstance(tokens, list):
    return None
  ids = [str(t)[len(_MARK) :] for t in tokens if str(t).startswith(_MARK)]
  complete = len(ids) == len(tokens) and all(map(str.isdecimal, ids))
  return [int(i) for i in ids] if complete else None


def _sampled(choice: dict[str, Any], server: str) -> list[int]:
  ids = choice.get('token_ids')
  if ids is None and isinstance(choice.get('logprobs'), dict):
    ids = _marked(choice['logprobs'])
  if not isinstance(ids, list) or not all(type(i) is int for i in ids):
    raise ValueError(
      f'{server} must return the ids of the sampled tokens: got '
      f'{str(ids)[:80]}; use a server that supports return_token_ids, as vLLM '
      'does: text that is tokenized again may be other tokens'
    )
  return ids


def _sampled_logprobs(
  choice: dict[str, Any], kept: int, count: int, server: str
) -> np.ndarray:
  """Returns f32[count]; the response has `kept` or `count` logprobs."""
  logprobs = choice.get('logprobs')
  entries = logprobs.get('token_logprobs') if logprobs else None
  values = np.zeros(count, np.float32)
  if entries is None:
    return values
  if len(entries) not in (kept, count):
    raise ValueError(
      f'{server} must give one logprob per sampled token: got '
      f'{len(entries)}, expected {count}'
    )
  for place, entry in enumerate(entries):
    values[place] = _number(entry, f'sampled token {place}', server)
  return values


def _stop_reason(
  choice: dict[str, Any],
  ids: Sequence[int],
  max_tokens: int,
  stops: Sequence[int],
  server: str,
) -> str:
  reason = choice.get('finish_reason')
  if reason == 'stop' or reason == 'length' and ids and ids[-1] in stops:
    return 'eos'
  if reason == 'length':
    # Fewer tokens than requested: the server's context is full.
    return 'max_tokens' if len(ids) >= max_tokens else 'overflow'
  raise ValueError(
    f"{server} must end a completion by 'stop' or 'length': got "
    f'finish_reason {reason!r}'
  )


def _missing_stop_id(
  choice: dict[str, Any], stops: Sequence[int], server: str
) -> int:
  """Returns the stop token of a completion whose ids do not include it."""
  stop = choice.get('stop_reason')
  if stop in stops:
    return stop
  if stop is None and len(stops) == 1:
    return stops[0]
  raise ValueError(
    f'{server} must name the stop token of a completion: got stop_reason '
    f'{stop!r}, expected one of stop_token_ids {stops}; use a server that '
    'keeps the stop token among the token ids'
  )


def _number(value: Any, where: str, server: str) -> float:
  number = type(value) in (int, float) and math.isfinite(value)
  if not number or value == _MINUS_INFINITY or value > _ROUNDING:
    raise ValueError(
      f'{server} must give a finite logprob, at most 0, for {where}: got '
      f'{value!r}'
    )
  return float(value)


def _size(entries: Any) -> str:
  return str(len(entries)) if isinstance(entries, list) else 'no list'
