"""Readers of a server's JSON responses, which accept certain tokens alone.

A wrong token's logprob looks like any other. So every list must have the
requested length, every token id that a response shows must be the one that was
sent, and a missing value is an error.

Readers raise a ValueError 'REQUIREMENT: got VALUE', and what Python raises
(KeyError, TypeError, ...) for a response of another form; `endpoints` makes an
EndpointError of either.

Axes: n tokens of a sequence.
"""

from typing import Any

import numpy as np

from posttrain.decode import requests
from posttrain.util import errors

_ROUNDING = 1e-2  # nats by which a logprob may exceed 0
_LEAST = -1000.0  # nats; far below what models give, above vLLM's "-infinity"
_MARK = 'token_id:'  # prefix of an id in a list of tokens
_OTHERS = 'read the prompt as the tokens that were sent: got {}'


class Aborted(Exception):
  """The server shuts down: the request may be repeated."""


def prompt_logprobs(
  response: dict[str, Any], ids: np.ndarray
) -> np.ndarray | None:
  """Reads vLLM's `prompt_logprobs`.

      [null, {'<id>': {'logprob': x, ...}, ...}, ...]   # per token

  Every entry has the token's own id, and may have others, in any order.

  Args:
    response: the response to a request with `prompt_logprobs`.
    ids: i32[n], the prompt.

  Returns:
    f32[n] in nats, entry 0 is 0; None if the server ignored the field.
  """
  choice = _choice(response, ids)
  entries = choice.get('prompt_logprobs')
  if entries is None:
    return None
  values = [None]
  for token, entry in zip(ids[1:].tolist(), entries[1:], strict=False):
    value = entry.get(str(token))
    values.append(value.get('logprob') if isinstance(value, dict) else value)
  return _scores(values, ids, len(entries))


def echo(response: dict[str, Any], ids: np.ndarray) -> np.ndarray | None:
  """Reads the older API's `echo`: the prompt is part of the completion.

      {'tokens': [...], 'token_logprobs': [null, x, ...]}

  One sampled token may follow those of the prompt.

  Args:
    response: the response to a request with `echo`, `logprobs` and one token.
    ids: i32[n], the prompt.

  Returns:
    f32[n] in nats, entry 0 is 0; None if the server ignored the fields.
  """
  choice = _choice(response, ids)
  logprobs = choice.get('logprobs') or {}
  entries = logprobs.get('token_logprobs') or ()
  if len(entries) <= 1 < len(ids):
    return None  # at most the sampled token's logprob
  tokens = _marked(logprobs)
  if tokens is not None and tokens[: len(ids)] != ids.tolist():
    raise ValueError(_OTHERS.format(errors.quote(tokens)))
  return _scores(entries[: len(ids)], ids, min(len(entries), len(ids)))


def completion(
  response: dict[str, Any],
  request: requests.Request,
  vocab_size: int = 2**31 - 1,
) -> requests.Completion:
  """Reads a completion sampled by the server.

  Args:
    response: the response to a request for token ids.
    request: the ids that were sent, and the options.
    vocab_size: ids are below it.

  Returns:
    The sampled ids, stop token included, which some servers leave out; logprobs
    that the response does not have are 0.
  """
  choice = _choice(response, request.ids)
  stops, max_tokens = request.stop_ids, request.max_tokens
  logprobs = choice.get('logprobs') or {}
  ids = choice.get('token_ids')
  if ids is None:
    ids = _marked(logprobs)
  if ids is None or not all(
    type(i) is int and 0 <= i < vocab_size for i in ids
  ):
    raise ValueError(
      f'return in token_ids the sampled ids, below {vocab_size}: got '
      f'{errors.quote(ids)}; use a server with return_token_ids, such as vLLM'
    )
  num_scored, finish_reason = len(ids), choice['finish_reason']
  if finish_reason == 'stop' and not (ids and ids[-1] in stops):
    stop = choice.get('stop_reason')
    ids = [*ids, stops[0] if stop is None and len(stops) == 1 else stop]
  reason = None
  if finish_reason in ('stop', 'length') and ids and ids[-1] in stops:
    reason = 'eos'
  elif finish_reason == 'length':  # fewer tokens: the server's context is full
    reason = 'max_tokens' if len(ids) >= max_tokens else 'overflow'
  early = any(i in stops for i in ids[:-1])
  if reason is None or early or len(ids) > max_tokens:
    raise ValueError(
      f'stop after {max_tokens} tokens or at one of the ids {stops}: got '
      f'{len(ids)}, the last {ids[-1:]}, finish_reason '
      f'{errors.quote(finish_reason)}'
    )
  values = np.zeros(len(ids), np.float32)
  entries = logprobs.get('token_logprobs')
  if entries is not None:
    if len(entries) not in (num_scored, len(ids)):
      raise ValueError(
        'give one logprob per sampled token in logprobs.token_logprobs: got '
        f'{len(entries)}, expected {len(ids)}'
      )
    for place, entry in enumerate(entries):
      values[place] = _logprob(entry, f'sampled token {place}')
  return requests.Completion(
    request.id, np.asarray(ids, np.int32), values, reason, version=-1
  )


def models(response: dict[str, Any]) -> dict[str, dict[str, Any]]:
  """Reads the models of a server, by id."""
  return {entry['id']: entry for entry in response['data']}


def tokens(response: dict[str, Any]) -> list[int]:
  """Reads the ids of a text, which is not empty."""
  if not response['tokens']:
    raise ValueError('return the ids of a text in tokens: got none')
  return response['tokens']


def text(response: dict[str, Any]) -> str:
  """Reads the reply of a chat; '' if the content is null.

  Half a surrogate pair, which no UTF-8 has, becomes U+FFFD.
  """
  message = _choice(response)['message']
  content = message['content']
  if content is None and not message.get('tool_calls'):
    return ''
  if not isinstance(content, str):
    raise ValueError(
      'answer a chat with a text in choices[0].message.content: got '
      f'{errors.quote(message)}'
    )
  return content.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')


def _choice(
  response: dict[str, Any], ids: np.ndarray | None = None
) -> dict[str, Any]:
  """Returns the choice, if what it shows of the prompt equals `ids`."""
  (choice,) = response['choices']
  if choice.get('finish_reason') == 'abort':
    raise Aborted('an aborted response')
  if ids is None:
    return choice
  shown = choice.get('prompt_token_ids')
  count = (response.get('usage') or {}).get('prompt_tokens')
  if shown not in (None, ids.tolist()) or count not in (None, len(ids)):
    raise ValueError(_OTHERS.format(errors.quote(shown or count)))
  return choice


def _marked(logprobs: dict[str, Any]) -> list[int] | None:
  """Returns the ids of marked tokens; None unless all are marked."""
  tokens = logprobs.get('tokens')
  if tokens is None or not all(t.startswith(_MARK) for t in tokens):
    return None
  return [int(t.removeprefix(_MARK)) for t in tokens]


def _scores(values: list[Any], ids: np.ndarray, count: int) -> np.ndarray:
  """Returns f32[n]; the first token has no prediction."""
  if count != len(ids):
    raise ValueError(
      f'give one logprob per token of the prompt: got {count}, expected '
      f'{len(ids)}'
    )
  scores = np.zeros(len(ids), np.float32)
  for place, token in list(enumerate(ids.tolist()))[1:]:
    scores[place] = _logprob(values[place], f'token {place} (id {token})')
  return scores


def _logprob(value: Any, where: str) -> float:
  # Comparisons with NaN are False; those of long integers do not overflow.
  if type(value) in (int, float) and _LEAST <= value <= _ROUNDING:
    return float(value)
  raise ValueError(
    f'give a logprob in [{_LEAST:g}, 0] for {where}: got {errors.quote(value)}'
  )
