"""A check of a server's model and tokenizer.

Logprobs of the wrong tokens look like any others, so the check comes before the
first request.
"""

import logging

from posttrain import schema
from posttrain.chat import renderer as chat
from posttrain.rollout.endpoint import http

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
  renderer: chat.Renderer,
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
    EndpointError: the server does not answer.
  """
  base = cfg.base_url.rstrip('/')
  entries = client.get(f'{base}/models', caller).get('data') or []
  models = {model.get('id'): model for model in entries}
  if cfg.name not in models:
    raise ValueError(
      f'name must be that of a model that {base} serves: got '
      f'{cfg.name!r}, expected one of {list(models)}'
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
      f'got fingerprint {str(fingerprint)[:12]}, expected '
      f'{renderer.fingerprint[:12]}; serve the model with the tokenizer of '
      'this run, or use a model that shares it'
    )


def _check_tokens(
  client: http.Client,
  cfg: schema.Endpoint,
  renderer: chat.Renderer,
  caller: str,
) -> str | None:
  """Compares the ids of a probe; returns the obstacle if it cannot."""
  url = cfg.base_url.rstrip('/').removesuffix('/v1') + '/tokenize'
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
      return f'got {str(response)[:80]} for the tokens of a text'
    if actual != expected:
      raise ValueError(
        f'tokenizer of {cfg} must be that of the policy: got {actual[:8]} '
        f'of {len(actual)} ids for {text!r}, expected {expected[:8]} of '
        f'{len(expected)}; use a model that shares the tokenizer'
      )
  return None
