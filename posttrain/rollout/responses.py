"""Strict readers of a server's JSON responses.

A number is accepted only if its token is certain: every list must have the
requested length, every shown token id must be the one that was sent, and
missing values are errors. Every invalid response is an EndpointError, which
names the server and the field: what a server answers is no mistake of the user.

Each reader takes a response of /completions, and `server`, the server's name in
errors. Axes: n tokens of a sequence.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain.decode import requests
from posttrain.rollout import http
from posttrain.util import errors

_MINUS_INFINITY = -9999.0  # in vLLM's responses: JSON has no infinity
_ROUNDING = 1e-2  # nats by which a logprob may exceed 0
_LEAST = -1000.0  # nats; far below what models give
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
    EndpointError: an entry does not match its prompt token.
  """
  choice = _choice(response, server)
  entries = choice.get('prompt_logprobs')
  if entries is None:
    return None
  _check_prompt(response, choice, ids, server)
  if not isinstance(entries, list) or len(entries) != len(ids):
    raise _invalid(
      server,
      'give one entry of prompt_logprobs per token',
      f'{_size(entries)}, expected {len(ids)}',
    )
  logprobs = np.zeros(len(ids), np.float32)
  for place, (token, entry) in enumerate(
    zip(ids.tolist(), entries, strict=True)
  ):
    if place == 0:
      continue  # the first token has no prediction
    if not isinstance(entry, dict) or str(token) not in entry:
      is_dict = isinstance(entry, dict)
      shown = errors.quote(list(entry)[:8] if is_dict else entry)
      raise _invalid(
        server,
        f'give in prompt_logprobs the logprob of token {place} of the prompt, '
        f'which is id {token}',
        f'ids {shown}' if is_dict else shown,
      )
    value = entry[str(token)]
    if isinstance(value, dict):
      value = value.get('logprob')
    where = f'token {place} (id {token}) in prompt_logprobs'
    logprobs[place] = _number(value, where, server)
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
    EndpointError: an entry does not match its prompt token.
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
    raise _invalid(
      server,
      'echo in logprobs the prompt as the tokens that were sent, and one token '
      'more at most',
      f'{_size(entries)} logprobs and {_size(tokens)} token ids, expected '
      f'{len(ids)}',
    )
  if tokens is not None:
    _check_same(tokens[: len(ids)], ids, 'echo', server)
  scored = np.zeros(len(ids), np.float32)
  for place, token in enumerate(ids.tolist()):
    if place > 0:  # the first token has no prediction
      where = f'token {place} (id {token}) in logprobs.token_logprobs'
      scored[place] = _number(entries[place], where, server)
  return scored


def completion(
  response: dict[str, Any],
  request: requests.Request,
  prompt: np.ndarray,
  max_tokens: int,
  server: str,
  vocab_size: int = 2**31 - 1,
) -> requests.Completion:
  """Reads a completion sampled by the server.

  Args:
    response: the response to a request for token ids.
    request: the sequence's first request.
    prompt: i32[n], the ids that were sent.
    max_tokens: the requested number of tokens.
    server: the server's name.
    vocab_size: ids are below it.

  Returns:
    The sampled ids, stop token included; logprobs that the response does not
    have are 0.

  Raises:
    EndpointError: no token ids, ids outside of the vocabulary, too many of
      them, or an ambiguous stop token.
  """
  choice = _choice(response, server)
  _check_prompt(response, choice, prompt, server)
  ids, stops = _sampled(choice, server, vocab_size), request.stop_ids
  reason = _stop_reason(choice, ids, max_tokens, stops, server)
  kept = len(ids)
  if reason == 'eos' and (not ids or ids[-1] not in stops):
    ids = [*ids, _missing_stop_id(choice, stops, server)]
  early = [place for place, token in enumerate(ids[:-1]) if token in stops]
  if early or len(ids) > max_tokens:
    raise _invalid(
      server,
      f'stop at stop_token_ids {stops} and after {max_tokens} tokens',
      f'{len(ids)}, stop tokens before the end at {early[:8]}',
    )
  return requests.Completion(
    request.id,
    np.asarray(ids, np.int32),
    _sampled_logprobs(choice, kept, len(ids), server),
    reason,
    version=-1,
  )


def text(response: dict[str, Any], server: str) -> str:
  """Reads the reply of a chat; '' if the content is null.

  Half a surrogate pair, which no UTF-8 has, becomes U+FFFD.

  Raises:
    EndpointError: the response has no message, or its content is no text.
  """
  message = _choice(response, server).get('message')
  if not isinstance(message, dict):
    raise _invalid(
      server, 'answer a chat with a message', errors.quote(message)
    )
  content = message.get('content')
  calls = message.get('tool_calls')
  if content is None and not calls:
    return ''
  if not isinstance(content, str):
    raise _invalid(
      server,
      'answer a chat with a text in choices[0].message.content',
      f'tool_calls {errors.quote(calls)}'
      if content is None
      else errors.quote(content),
    )
  return content.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def _invalid(server: str, requirement: str, got: str) -> http.EndpointError:
  return http.EndpointError(f'{server} must {requirement}: got {got}', 200)


def _choice(response: dict[str, Any], server: str) -> dict[str, Any]:
  choices = response.get('choices')
  if isinstance(choices, list) and len(choices) == 1:
    if isinstance(choices[0], dict):
      return choices[0]
  raise _invalid(
    server, 'answer with one choice, in choices', errors.quote(response)
  )


def _check_prompt(
  response: dict[str, Any], choice: dict[str, Any], ids: np.ndarray, server: str
) -> None:
  """Checks the prompt's ids and length, if the response shows them."""
  shown = choice.get('prompt_token_ids')
  if shown is not None:
    _check_same(shown, ids, 'read', server)
  usage = response.get('usage')
  if not isinstance(usage, dict | None):
    raise _invalid(server, 'give usage as an object', errors.quote(usage))
  count = usage.get('prompt_tokens') if usage else None
  if count not in (None, len(ids)):
    raise _invalid(
      server,
      'read the prompt as the tokens that were sent, and count them in '
      'usage.prompt_tokens',
      f'{errors.quote(count)} of them, expected {len(ids)}; it must add none '
      '(bos) and cut none off',
    )


def _check_same(shown: Any, prompt: np.ndarray, verb: str, server: str) -> None:
  ids = prompt.tolist()
  if shown == ids:
    return
  shown = shown if isinstance(shown, list) else []
  pairs = enumerate(zip(shown, ids, strict=False))
  place = next((i for i, (a, b) in pairs if a != b), min(len(shown), len(ids)))
  raise _invalid(
    server,
    f'{verb} the prompt as the tokens that were sent',
    f'{errors.quote(shown[place : place + 4])} from token {place} on, '
    f'expected {ids[place : place + 4]}; it must add none (bos) and cut none '
    'off',
  )


def _marked(logprobs: dict[str, Any]) -> list[int] | None:
  """Returns the ids of marked tokens; None unless all are marked."""
  tokens = logprobs.get('tokens')
  if not isinstance(tokens, list):
    return None
  ids = [
    t[len(_MARK) :]
    for t in tokens
    if isinstance(t, str) and t.startswith(_MARK)
  ]
  complete = len(ids) == len(tokens) and all(
    i.isdecimal() and len(i) < 12 for i in ids
  )
  return [int(i) for i in ids] if complete else None


def _sampled(choice: dict[str, Any], server: str, vocab_size: int) -> list[int]:
  ids = choice.get('token_ids')
  if ids is None and isinstance(choice.get('logprobs'), dict):
    ids = _marked(choice['logprobs'])
  if not isinstance(ids, list) or not all(type(i) is int for i in ids):
    raise _invalid(
      server,
      'return the ids of the sampled tokens in token_ids',
      f'{errors.quote(ids)}; use a server that supports '
      'return_token_ids, as vLLM does: text that is tokenized again may be '
      'other tokens',
    )
  unknown = [i for i in ids if not 0 <= i < vocab_size]
  if unknown:
    raise _invalid(
      server,
      "return in token_ids ids of the policy's tokenizer, which are below "
      f'{vocab_size}',
      f'{errors.quote(unknown[:4])}; use a model that shares the tokenizer',
    )
  return ids


def _sampled_logprobs(
  choice: dict[str, Any], kept: int, count: int, server: str
) -> np.ndarray:
  """Returns f32[count]; the response has `kept` or `count` logprobs."""
  logprobs = choice.get('logprobs')
  if not isinstance(logprobs, dict | None):
    raise _invalid(server, 'give logprobs as an object', errors.quote(logprobs))
  entries = logprobs.get('token_logprobs') if logprobs else None
  values = np.zeros(count, np.float32)
  if entries is None:
    return values
  if not isinstance(entries, list) or len(entries) not in (kept, count):
    raise _invalid(
      server,
      'give one logprob per sampled token in logprobs.token_logprobs',
      f'{_size(entries)}, expected {count}',
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
  raise _invalid(
    server,
    "end a completion by 'stop' or 'length'",
    f'finish_reason {errors.quote(reason)}',
  )


def _missing_stop_id(
  choice: dict[str, Any], stops: Sequence[int], server: str
) -> int:
  """Returns the stop token of a completion whose ids do not include it."""
  stop = choice.get('stop_reason')
  if type(stop) is int and stop in stops:
    return stop
  if stop is None and len(stops) == 1:
    return stops[0]
  raise _invalid(
    server,
    'name the stop token of a completion',
    f'stop_reason {errors.quote(stop)}, expected one of stop_token_ids '
    f'{stops}; use a server that keeps the stop token among the token ids',
  )


def _number(value: Any, where: str, server: str) -> float:
  # Comparisons with NaN are False; those of long integers do not overflow.
  number = type(value) in (int, float) and _LEAST <= value <= _ROUNDING
  if not number or value == _MINUS_INFINITY:
    raise _invalid(
      server,
      f'give a logprob in [{_LEAST:g}, 0] for {where}',
      errors.quote(value),
    )
  return float(value)


def _size(entries: Any) -> str:
  return str(len(entries)) if isinstance(entries, list) else 'no list'
