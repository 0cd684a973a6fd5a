"""Whether a server has the model that a config names, and reads ids as we do.

Logprobs of other tokens than those that were meant look like any others, so
this is settled before the first one is asked for.
"""

import logging

from posttrain import schema
from posttrain.chat import renderer as chat
from posttrain.rollout.endpoint import http

# Tokenizers that differ disagree about one of these: case, digits, space,
# accents, other scripts, signs beyond the basic plane, code.
_PROBE = (
  "The 1st of 20260 tokens\u2019 tests: na\u00efve  caf\u00e9s,\tdon't\n\n"
  'def f(x_i): return {"a": x_i ** 2 != 3.14}  # \u4f60\u597d '
  '\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 '
  '\U0001f642\u221e'
)


def check(
  client: http.Client, cfg: schema.Endpoint, renderer: chat.Renderer, who: str
) -> None:
  """Refuses a server without the model, or with other tokens.

  Our own server says what its tokenizer and template are; others tokenize a
  probe. Where neither is to be had, a warning says so.

  Args:
    client: of the server.
    cfg: the model's name and where the API begins.
    renderer: the policy's.
    who: waits for it.

  Raises:
    ValueError: no model of that name, or other tokens.
    EndpointError: the server does not answer.
  """
  base = cfg.base_url.rstrip('/')
  listed = client.get(f'{base}/models', who).get('data') or []
  models = {model.get('id'): model for model in listed}
  if cfg.name not in models:
    raise ValueError(
      f'name must be that of a model which {base} serves: got '
      f'{cfg.name!r}, expected one of {list(models)}'
    )
  theirs = models[cfg.name].get('tokenizer')
  if theirs is None:
    trouble = _check_tokens(client, cfg, renderer, who)
    if trouble is not None:
      logging.getLogger('absl').warning(
        'NOBODY COULD CHECK that the tokens of %s are those of the policy: '
        'where they are not, all that it says of them is wrong; %s',
        cfg,
        trouble,
      )
  elif theirs != renderer.fingerprint:
    raise ValueError(
      f'tokenizer and chat template of {cfg} must be those of the policy: '
      f'got fingerprint {str(theirs)[:12]}, expected '
      f'{renderer.fingerprint[:12]}; serve the model with the tokenizer of '
      'this run, or use a model that shares it'
    )


def _check_tokens(
  client: http.Client, cfg: schema.Endpoint, renderer: chat.Renderer, who: str
) -> str | None:
  """Compares the ids of a probe; returns why that could not be done."""
  url = cfg.base_url.rstrip('/').removesuffix('/v1') + '/tokenize'
  tokenizer = renderer.tokenizer
  for text in (_PROBE, *map(tokenizer.text, renderer.stop_ids)):
    if not text:
      continue  # a stop token that has no text
    body = {'model': cfg.name, 'prompt': text, 'add_special_tokens': False}
    try:
      answer = client.post(url, body, who)
    except http.EndpointError as error:
      if error.status is None:
        raise
      return str(error)
    theirs, ours = answer.get('tokens'), list(tokenizer.encode_scaffold(text))
    if not theirs or not isinstance(theirs, list):
      return f'got {str(answer)[:80]} for the tokens of a text'
    if theirs != ours:
      raise ValueError(
        f'tokenizer of {cfg} must be that of the policy: got {theirs[:8]} '
        f'of {len(theirs)} ids for {text!r}, expected {ours[:8]} of '
        f'{len(ours)}; use a model that shares the tokenizer'
      )
  return None
