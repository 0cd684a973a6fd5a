"""What the server of a frozen model answers, read with suspicion.

A number is taken only where it is certain which token it belongs to: every
list must be as long as what was asked for, every token id that is shown must
be the one that was sent, and nothing is filled in.

Each reader takes the answer to a request of /completions, and `server`, which
names it in errors. Axes: n tokens of a sequence.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.decode import requests

_MINUS_INFINITY = -9999.0  # as vLLM writes it: JSON has none
_ROUNDING = 1e-2  # nats that a log probability may lie above 0
_MARK = 'token_id:'  # before an id in a list of tokens


def prompt_logprobs(
  answer: dict[str, Any], ids: np.ndarray, server: str
) -> np.ndarray | None:
  """Reads the form that vLLM has of its own.

      [null, {'<id>': {'logprob': x, ...}, ...}, ...]   # of each token

  Every entry holds the token's own id, and may hold others, in any order.

  Args:
    answer: to a request with `prompt_logprobs`.
    ids: i32[n], the prompt.
    server: its name.

  Returns:
    f32[n] in nats, entry 0 is 0; None where the server ignored the request.

  Raises:
    ValueError: the entries are not those of the prompt; names the token.
  """
  choice = _choice(answer, server)
  entries = choice.get('prompt_logprobs')
  if entries is None:
    return None
  _check_prompt(answer, choice, ids, server)
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
      continue  # nothing predicts it
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
  answer: dict[str, Any], ids: np.ndarray, server: str
) -> np.ndarray | None:
  """Reads the form of the older API: the prompt is part of the completion.

      {'tokens': [...], 'token_logprobs': [null, x, ...]}

  One sampled token may follow the prompt's.

  Args:
    answer: to a request with `echo`, `logprobs` and one token at most.
    ids: i32[n], the prompt.
    server: its name.

  Returns:
    f32[n] in nats, entry 0 is 0; None where the server ignored the request.

  Raises:
    ValueError: the entries are not those of the prompt; names the token.
  """
  choice = _choice(answer, server)
  logprobs = choice.get('logprobs')
  if not isinstance(logprobs, dict):
    return None
  entries = logprobs.get('token_logprobs')
  if not isinstance(entries, list) or len(entries) <= 1 < len(ids):
    return None  # the sampled token's, at most
  _check_prompt(answer, choice, ids, server)
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
    if place > 0:  # nothing predicts the first
      where = f'token {place} (id {token})'
      scored[place] = _number(entries[place], where, server)
  return scored


def completion(
  answer: dict[str, Any],
  request: requests.Request,
  prompt: np.ndarray,
  max_tokens: int,
  server: str,
) -> requests.Completion:
  """Reads what a server sampled behind a prompt.

  Args:
    answer: to a request that asks for token ids.
    request: which the sequence began with.
    prompt: i32[n], all that was sent.
    max_tokens: that were asked for.
    server: its name.

  Returns:
    The server's ids, the stop token included; where it left that out and says
    no logprob of it, or of any token, there are zeros.

  Raises:
    ValueError: no token ids, others than were asked for, or no saying which
      stop token came.
  """
  choice = _choice(answer, server)
  _check_prompt(answer, choice, prompt, server)
  ids, stops = _sampled(choice, server), request.stop_ids
  reason = _stop_reason(choice, ids, max_tokens, stops, server)
  kept = len(ids)
  if reason == 'eos' and (not ids or ids[-1] not in stops):
    ids = [*ids, _left_out(choice, stops, server)]
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


def text(answer: dict[str, Any], server: str) -> str:
  """Reads a chat's reply; '' where the model said nothing but thoughts."""
  message = _choice(answer, server).get('message')
  if not isinstance(message, dict):
    raise ValueError(
      f'{server} must answer a chat with a message: got {message!r}'
    )
  return message.get('content') or ''


def _choice(answer: dict[str, Any], server: str) -> dict[str, Any]:
  choices = answer.get('choices')
  if isinstance(choices, list) and len(choices) == 1:
    if isinstance(choices[0], dict):
      return choices[0]
  raise ValueError(
    f'{server} must answer with one choice: got {str(answer)[:200]}'
  )


def _check_prompt(
  answer: dict[str, Any], choice: dict[str, Any], ids: np.ndarray, server: str
) -> None:
  """Refuses an answer to another prompt, where it shows which it is to."""
  shown = choice.get('prompt_token_ids')
  if shown is not None:
    _check_same(shown, ids, 'read', server)
  usage = answer.get('usage')
  counted = usage.get('prompt_tokens') if isinstance(usage, dict) else None
  if counted not in (None, len(ids)):
    raise ValueError(
      f'{server} must read the prompt as the tokens that were sent: got '
      f'{counted} of them, expected {len(ids)}; it must add none (bos) and '
      'cut none off'
    )


def _check_same(
  shown: Sequence[int], ids: np.ndarray, does: str, server: str
) -> None:
  ids = ids.tolist()
  if shown == ids:
    return
  shown = shown if isinstance(shown, list) else []
  pairs = enumerate(zip(shown, ids, strict=False))
  place = next((i for i, (a, b) in pairs if a != b), min(len(shown), len(ids)))
  raise ValueError(
    f'{server} must {does} the prompt as the tokens that were sent: got '
    f'{shown[place : place + 4]} from token {place} on, expected '
    f'{ids[place : place + 4]}; it must add none (bos) and cut none off'
  )


def _marked(logprobs: dict[str, Any]) -> list[int] | None:
  """The ids of a list of tokens, if it shows ids."""
  tokens = logprobs.get('tokens')
  if not isinstance(tokens, list):
    return None
  ids = [str(t)[len(_MARK) :] for t in tokens if str(t).startswith(_MARK)]
  whole = len(ids) == len(tokens) and all(map(str.isdecimal, ids))
  return [int(i) for i in ids] if whole else None


def _sampled(choice: dict[str, Any], server: str) -> list[int]:
  ids = choice.get('token_ids')
  if ids is None and isinstance(choice.get('logprobs'), dict):
    ids = _marked(choice['logprobs'])
  if not isinstance(ids, list) or not all(type(i) is int for i in ids):
    raise ValueError(
      f'{server} must return the ids of the sampled tokens: got '
      f'{str(ids)[:80]}; use a server that knows return_token_ids, as vLLM '
      'does: text that is tokenized again may be other tokens'
    )
  return ids


def _sampled_logprobs(
  choice: dict[str, Any], kept: int, count: int, server: str
) -> np.ndarray:
  """f32[count]; of the tokens that the server kept, or of all."""
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
  said = choice.get('finish_reason')
  if said == 'stop' or said == 'length' and ids and ids[-1] in stops:
    return 'eos'
  if said == 'length':
    # Fewer than were asked for: the server has no room for more.
    return 'max_tokens' if len(ids) >= max_tokens else 'overflow'
  raise ValueError(
    f"{server} must say that a completion ended by 'stop' or 'length': got "
    f'finish_reason {said!r}'
  )


def _left_out(choice: dict[str, Any], stops: Sequence[int], server: str) -> int:
  """The stop token of a completion that does not end with it."""
  said = choice.get('stop_reason')
  if said in stops:
    return said
  if said is None and len(stops) == 1:
    return stops[0]
  raise ValueError(
    f'{server} must say which stop token ended a completion: got stop_reason '
    f'{said!r}, expected one of stop_token_ids {stops}; use a server that '
    'keeps the stop token among the token ids'
  )


def _number(value: Any, where: str, server: str) -> float:
  number = type(value) in (int, float) and math.isfinite(value)
  if not number or value == _MINUS_INFINITY or value > _ROUNDING:
    raise ValueError(
      f'{server} must give a finite logprob, at most 0, of {where}: got '
      f'{value!r}'
    )
  return float(value)


def _size(entries: Any) -> str:
  return str(len(entries)) if isinstance(entries, list) else 'no list'
