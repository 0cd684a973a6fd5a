"""A check of a server's model and tokenizer.

Logprobs of the wrong tokens look like any others, so the check comes before the
first request.
"""

import logging
from typing import Any

from posttrain import schema
from posttrain.chat import rendering
from posttrain.rollout.endpoint import http
from posttrain.util import foreign

# Different tokenizers disagree about one of these: case, digits, space,
# accents, other scripts, characters beyond the basic plane, code.
_PROBE = (
  "The 1st of 20260 tokens\u2019 tests: na\u00efve  caf\u00e9s,\tdon't\n\n"
  'def f(x_i): return {"a": x_i ** 2 != 3.14}  # \u4f60\u597d '
  '\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 '
  '\U0001f642\u221e'
)


def check(
  client: http.Client,
  cfg: schema.Endpoint,
  renderer: rendering.Renderer,
  caller: str,
) -> None:
  """Checks that a server has the model and the policy's tokens.

  `posttrain.serve` publishes the fingerprint of its tokenizer and template;
  other servers tokenize a probe. Logs a warning if neither is possible.

  Args:
    client: the server's client.
    cfg: the model's name and the API's base URL.
    renderer: the policy's renderer.
    caller: the caller's name in logs and errors.

  Raises:
    ValueError: no model of that name, or other tokens.
    EndpointError: the server does not answer, or lists no models.
  """
  models = _models(client.get(f'{cfg.address}/models', caller), cfg)
  if cfg.name not in models:
    raise ValueError(
      f'name must be that of a model that {cfg.address} serves: got '
      f'{cfg.name!r}, expected one of {foreign.quote(list(models))}'
    )
  fingerprint = models[cfg.name].get('tokenizer')
  if fingerprint is None:
    obstacle = _check_tokens(client, cfg, renderer, caller)
    if obstacle is not None:
      logging.getLogger('absl').warning(
        'NOT CHECKED that the tokens of %s are those of the policy: if they '
        'differ, all its logprobs are wrong; %s',
        cfg,
        obstacle,
      )
  elif fingerprint != renderer.fingerprint:
    raise ValueError(
      f'tokenizer and chat template of {cfg} must be those of the policy: '
      f'got fingerprint {foreign.text(fingerprint, 12)}, expected '
      f'{renderer.fingerprint[:12]}; serve the model with the tokenizer of '
      'this run, or use a model that shares it'
    )


def _models(
  answer: dict[str, Any], cfg: schema.Endpoint
) -> dict[str, dict[str, Any]]:
  """Returns the entry of each model by its id."""
  entries = answer.get('data')
  if not isinstance(entries, list) or not all(
    isinstance(entry, dict) and isinstance(entry.get('id'), str)
    for entry in entries
  ):
    raise http.EndpointError(
      f'{cfg} must list models with an id each, in data of /models: got '
      f'{foreign.quote(entries)}',
      200,
    )
  return {entry['id']: entry for entry in entries}


def _check_tokens(
  client: http.Client,
  cfg: schema.Endpoint,
  renderer: rendering.Renderer,
  caller: str,
) -> str | None:
  """Compares the ids of a probe; returns the obstacle if it cannot."""
  url = cfg.address.removesuffix('/v1') + '/tokenize'
  tokenizer = renderer.tokenizer
  for text in (_PROBE, *map(tokenizer.text, renderer.stop_ids)):
    if not text:
      continue  # a stop token without text
    body = {'model': cfg.name, 'prompt': text, 'add_special_tokens': False}
    try:
      response = client.post(url, body, caller)
    except http.EndpointError as error:
      if error.status is None:
        raise
      return str(error)
    actual = response.get('tokens')
    expected = list(tokenizer.encode_scaffold(text))
    if not actual or not isinstance(actual, list):
      return f'got {foreign.quote(response)} for the tokens of a text'
    if actual != expected:
      raise ValueError(
        f'tokenizer of {cfg} must be that of the policy: got '
        f'{foreign.quote(actual[:8])} of {len(actual)} ids for {text!r}, '
        f'expected {expected[:8]} of {len(expected)}; use a model that shares '
        'the tokenizer'
      )
  return None
