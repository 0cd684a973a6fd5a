"""The body of a request -> an `ApiRequest`, or a refusal that names the field.

1. The fields of both routes are tables, with the default and the bounds of each
   (`FIELDS`). A field that this server does not know is refused by name, unless
   it has no effect on the response (`IGNORED`, `NEUTRAL`): no field is dropped
   silently.
2. What cannot fit into the context is refused by its size, before it is
   rendered or tokenized: a message has at least one token, and a token on
   average at most `CHARACTERS_PER_TOKEN` characters.
3. The text of a completion is tokenized as other servers do: special tokens in
   it are special, and bos precedes it; the content of messages never is.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain import types
from posttrain.chat import tool_calls
from posttrain.decode import requests, schedule
from posttrain.serve import worker
from posttrain.util import disk, errors

CHARACTERS_PER_TOKEN = 32  # ordinary text has about 4
MAX_MESSAGES = 500  # the time of rendering grows with their square
COMPLETION_TOKENS = 16  # OpenAI's default `max_tokens` of completions
STOPS = 64  # the most stop strings
STOP_CHARACTERS = 4096  # of all stop strings together

# Name -> (default, least, most), or the default of a flag. A number has the
# type of its default; None is that of a whole number.
FIELDS = {
  'n': (1, 1, 128),
  'max_tokens': (None, 0, 2**31),
  'temperature': (1.0, 0, 100),
  'top_k': (0, -1, 2**31 - 1),
  'top_p': (1.0, 1e-6, 1),
  'min_p': (0.0, 0, 0.9999),
  'seed': (None, -(2**63), 2**63 - 1),
  'prompt_logprobs': (None, 0, worker.MAX_ALTERNATIVES),
  'ignore_eos': False,
  'stream': False,
  'return_token_ids': False,
  'return_tokens_as_token_ids': False,
}
COMPLETION_FIELDS = {
  **FIELDS,
  'logprobs': (None, 0, 5),  # OpenAI's most
  'echo': False,
  'add_special_tokens': True,
}
CHAT_FIELDS = {
  **FIELDS,
  'max_completion_tokens': (None, 0, 2**31),
  'logprobs': False,
  'top_logprobs': (0, 0, worker.MAX_ALTERNATIVES),
  'parallel_tool_calls': True,
  'add_generation_prompt': True,
  'continue_final_message': True,
}
# Fields without an effect on the response.
IGNORED = frozenset(
  'user metadata store service_tier safety_identifier prompt_cache_key '
  'prompt_cache_retention function_call '
  'request_id priority include_obfuscation continuous_usage_stats'.split()
)
# Other unsupported fields, with the value that has no effect.
NEUTRAL = {
  'suffix': '',
  'logit_bias': {},
  'presence_penalty': 0,
  'frequency_penalty': 0,
  'repetition_penalty': 1,
  'length_penalty': 1,
  'min_tokens': 0,
  'use_beam_search': False,
  'skip_special_tokens': True,
  'spaces_between_special_tokens': True,
  'include_stop_str_in_output': False,
  'chat_template_kwargs': {},
  'tools': [],
  'functions': [],
  'response_format': {'type': 'text'},
  'modalities': ['text'],
  'bad_words': [],
}
_TYPES = {
  401: 'authentication_error',
  404: 'not_found_error',
  429: 'rate_limit_error',
  500: 'server_error',
  503: 'server_error',
}


class Refused(ValueError):
  """A refused request, with its HTTP status and error object."""

  def __init__(
    self, status: int, message: str, param: str | None = None, code: str = ''
  ):
    """Creates the error.

    Args:
      status: the HTTP status.
      message: the error's text.
      param: the field's name.
      code: OpenAI's error code; '' = none.
    """
    super().__init__(errors.text(message, 600))
    self.status = status
    # The error object, in OpenAI's form.
    self.body = {
      'error': {
        'message': str(self),
        'param': param,
        'code': code or None,
        'type': _TYPES.get(status, 'invalid_request_error'),
      }
    }


def require(ok: Any, name: str, must: str, got: Any, code: str = '') -> None:
  """Raises Refused, with 400, unless a field's value is right."""
  if not ok:
    shown = errors.text(name if name.isprintable() else repr(name), 80)
    message = f'{shown} must {must}: got {errors.quote(got)}'
    raise Refused(400, message, name[:80], code)


def require_fit(ok: bool, name: str, got: str, capacity: int) -> None:
  """Raises Refused unless something fits into the context."""
  must = f'fit into the context of {capacity} tokens'
  require(ok, name, must, got, 'context_length_exceeded')


class Tools(NamedTuple):
  """How the calls of a chat are read."""

  format: str  # one of `tool_calls.FORMATS`
  names: Collection[str]
  parallel: bool  # whether more than the first call of a turn is returned
  turn: str  # what the prompt has of the turn, as environments get it


class Prompt(NamedTuple):
  """A prompt as ids and as text."""

  ids: np.ndarray  # i32[P]
  text: str
  tools: Tools | None = None  # None = the answer's text is returned as it is


class ApiRequest(NamedTuple):
  """A request, parsed and checked."""

  chat: bool
  prompts: tuple[Prompt, ...]
  max_tokens: tuple[int, ...]  # per prompt; 0 = only the prompt is scored
  n: int
  seed: int | None
  sampling: requests.Sampling
  stop: tuple[str, ...]
  stop_ids: tuple[int, ...]
  logprobs: int | None  # alternatives per token; None = no logprobs
  prompt_logprobs: int | None  # the same for the prompt, in vLLM's form
  scores_prompt: bool  # whether the response has logprobs of the prompts
  echo: bool
  return_token_ids: bool
  tokens_as_ids: bool
  stream: bool
  include_usage: bool

  @property
  def temperature(self) -> float:
    """The temperature of logprobs."""
    return self.sampling.temperature or 1.0


def read(content: bytes, served: worker.Worker, *, chat: bool) -> ApiRequest:
  """Reads and checks a request.

  Args:
    content: the body.
    served: the model, and the limits.
    chat: whether the route is /v1/chat/completions.

  Raises:
    Refused: with 400 or 404.
  """
  input_name = 'messages' if chat else 'prompt'
  body, values = _body(
    content,
    served,
    CHAT_FIELDS if chat else COMPLETION_FIELDS,
    (input_name, 'stop', 'stop_token_ids', 'stream_options')
    + ('tools', 'tool_choice', 'chat_template_kwargs') * chat,
  )
  n, stream, echo = values['n'], values['stream'], values.get('echo', False)

  # Logprobs, and what a stream cannot have.
  logprobs, prompt_logprobs = values['logprobs'], values['prompt_logprobs']
  if chat:
    logprobs, top = (0 if logprobs else None), values['top_logprobs']
    ok = logprobs is not None or not top
    require(ok, 'top_logprobs', 'be 0 where logprobs is false', top)
    logprobs = logprobs if logprobs is None else top
  scores_prompt = prompt_logprobs is not None or (echo and logprobs is not None)
  options = body.get('stream_options', {})
  ok = isinstance(options, dict) and (stream or not options)
  require(ok, 'stream_options', 'be an object, and only with stream', options)
  options = _values(options, {'include_usage': False})
  # Clients send `logprobs: 1` for the logprobs of a completion's own tokens.
  late = scores_prompt or (logprobs or 0) > (0 if chat else 1)
  must = 'be false where prompts or alternatives are scored, which takes all'
  require(not (stream and late), 'stream', must, True)

  # Prompts, and the new tokens of each.
  given = body.get(input_name)
  ok = isinstance(given, list if chat else str | list) and given
  require(ok, input_name, 'be given, and not be empty', given)
  items = given
  if chat or isinstance(given, str) or all(type(x) is int for x in given):
    items = [given]
  count, most = len(items) * (n + scores_prompt), served.max_jobs
  require(
    count <= most,
    'n' if len(items) == 1 else input_name,
    f'request at most {most} sequences in all, scored prompts included',
    count,
  )
  prompts = [
    _conversation(body, values, served)
    if chat
    else _prompt(
      item,
      f'prompt[{i}]' if len(items) > 1 else 'prompt',
      served,
      values['add_special_tokens'],
    )
    for i, item in enumerate(items)
  ]
  left = [served.capacity - len(prompt.ids) for prompt in prompts]
  name = 'max_tokens'
  if values.get('max_completion_tokens') is not None:
    name = 'max_completion_tokens'
  limit, other = values[name], values['max_tokens']
  require(other in (None, limit), 'max_tokens', f'agree with {name}', other)
  scores = echo or prompt_logprobs is not None
  require(limit != 0 or scores, name, 'be >= 1 where no prompt is scored', 0)
  least = 1 if limit is None else limit
  require_fit(
    least <= min(left),
    input_name if limit is None else name,
    f'{least} after a prompt of {served.capacity - min(left)}',
    served.capacity,
  )
  if limit is not None:
    max_tokens = [limit] * len(prompts)
  else:
    max_tokens = [x if chat else min(x, COMPLETION_TOKENS) for x in left]

  # What ends a choice.
  stop = body.get('stop', [])
  texts, stop_ids = stops(
    [stop] if isinstance(stop, str) else stop,
    body.get('stop_token_ids', []),
    () if values['ignore_eos'] else served.policy.stop_ids,
    served,
  )
  temperature = values['temperature']
  return ApiRequest(
    chat=chat,
    prompts=tuple(prompts),
    max_tokens=tuple(max_tokens),
    n=n,
    seed=values['seed'],
    sampling=requests.Sampling(
      # Smaller values would overflow; 0 is greedy.
      temperature=float(temperature) if temperature >= 1e-4 else 0.0,
      top_k=max(values['top_k'], 0),
      top_p=float(values['top_p']),
      min_p=float(values['min_p']),
    ),
    stop=texts,
    stop_ids=stop_ids,
    logprobs=logprobs,
    prompt_logprobs=prompt_logprobs,
    scores_prompt=scores_prompt,
    echo=echo,
    return_token_ids=values['return_token_ids'],
    tokens_as_ids=values['return_tokens_as_token_ids'],
    stream=stream,
    include_usage=options['include_usage'],
  )


def read_scored(content: bytes, served: worker.Worker) -> np.ndarray:
  """Reads a conversation for a reward model: its ids up to the last answer.

  Raises:
    Refused: with 400 or 404.
  """
  body, _ = _body(content, served, {}, ('messages',))
  name, renderer = 'messages', served.policy.renderer
  assert renderer is not None, 'a run has a tokenizer'
  given, parts = body.get(name), []
  try:
    parts = renderer.demonstrate(given if isinstance(given, list) else [])
  except ValueError as error:
    raise Refused(400, f'{error}', name) from error
  ok = parts and given[-1].get('role') == 'assistant'
  require(ok, name, "end in an assistant's turn", given)
  # In training, what a template writes after the turn's end is not scored.
  end = 1 + np.flatnonzero(parts[-1].sampled)[-1]
  return token_ids(parts[-1].ids[:end], name, served)


def _body(
  content: bytes,
  served: worker.Worker,
  fields: Mapping[str, Any],
  others: tuple[str, ...],
) -> tuple[dict[str, Any], dict[str, Any]]:
  """Returns what was sent for this model, and the values as `_values`."""
  try:
    body = disk.parse_json(content, 'the body')
  except ValueError as error:
    raise Refused(400, f'{error}') from error
  require(isinstance(body, dict), 'the body', 'be a JSON object', body)
  body = {name: value for name, value in body.items() if value is not None}
  values = _values(body, fields, ('model', *others))
  check_model(body.get('model'), served.name)
  return body, values


def _values(
  body: Mapping[str, Any], fields: Mapping[str, Any], others: tuple = ()
) -> dict[str, Any]:
  """Returns the fields' values.

  Args:
    body: what was sent.
    fields: see `FIELDS`.
    others: names of fields that are read elsewhere.

  Raises:
    Refused: a value is out of bounds, or another field has an effect.
  """
  known = (*fields, *others, *IGNORED)
  for name, value in body.items():
    if name in known or name in NEUTRAL and value == NEUTRAL[name]:
      continue
    hint = errors.nearest(name[:80], known)
    must = f'be left out{hint}: this server does not support it'
    require(False, name, must, value, 'unsupported_field')
  values = {}
  for name, rule in fields.items():
    default, *bounds = rule if isinstance(rule, tuple) else (rule,)
    value = values[name] = body.get(name, default)
    if name in body and bounds:
      least, most = bounds
      kinds = (int, float) if isinstance(default, float) else (int,)
      ok = type(value) in kinds and least <= value <= most
      kind = 'number' if float in kinds else 'whole number'
      require(ok, name, f'be a {kind} in [{least}, {most}]', value)
    elif name in body:
      require(type(value) is bool, name, 'be true or false', value)
  return values


def check_model(model: Any, name: str) -> None:
  """Raises Refused, with 404, unless the model is the one of this name."""
  require(isinstance(model, str), 'model', f'be a name, {name!r}', model)
  if model != name:
    message = f'model must be {name!r}: got {errors.quote(model)}'
    raise Refused(404, message, 'model', 'model_not_found')


def _conversation(
  body: Mapping[str, Any], values: Mapping[str, Any], served: worker.Worker
) -> Prompt:
  """Checks messages by their form and size, and renders them with tools.

  Args:
    body: what was sent.
    values: the values of `CHAT_FIELDS`.
    served: the model, and the limits.
  """
  messages, renderer = body['messages'], served.policy.renderer
  must = 'be left out: the model has no tokenizer; send ids to /v1/completions'
  require(renderer, 'messages', must, messages)
  assert renderer is not None
  # Each message has keys, braces and a role besides its text.
  size, most = len(json.dumps(messages, ensure_ascii=False)), served.capacity
  ok = len(messages) <= min(most, MAX_MESSAGES)
  ok = ok and size <= (CHARACTERS_PER_TOKEN + 16) * most
  got = f'{len(messages)} messages of {size} characters'
  require_fit(ok, 'messages', got, served.capacity)
  tools, choice = body.get('tools'), body.get('tool_choice', 'auto')
  must = "be 'auto' or 'none': this server forces no calls"
  require(choice in ('auto', 'none'), 'tool_choice', must, choice)
  own = ('tool_call_id', 'name', 'tool_calls')
  field = 'chat_template_kwargs'
  variables = body.get(field, {})
  require(isinstance(variables, dict), field, 'be an object', variables)
  try:
    renderer.with_tools(None, variables)
    field = 'tools'
    described = types.Tools(tools, served.tool_format) if tools else None
    renderer = renderer.with_tools(described, variables)
    field = 'messages'
    messages = renderer.normalize(messages, own if renderer.style else own[:1])
    has_called = messages[-1].get('tool_calls')
    if renderer.style is not None:
      messages = tool_calls.write(messages, renderer.style)
    rendered = renderer.render(
      messages,
      add_generation_prompt=True,
      continue_final_message=not has_called
      and values['continue_final_message'],
    )
  except ValueError as error:
    raise Refused(400, f'{error}', field) from error
  name, must = 'add_generation_prompt', 'be true where no turn is continued'
  require(values[name] or rendered.given, name, must, False)
  called = None
  if renderer.style is not None and choice != 'none':
    called = Tools(
      renderer.style.format,
      tool_calls.parameters(tools),
      values['parallel_tool_calls'],
      tool_calls.THOUGHT * rendered.thinking + rendered.given,
    )
  return Prompt(
    token_ids(rendered.ids, 'messages', served), rendered.text, called
  )


def _prompt(
  item: Any, name: str, served: worker.Worker, specials: bool
) -> Prompt:
  """Checks a prompt, and tokenizes a text.

  Args:
    item: a text or a list of ids.
    name: its name in errors.
    served: the model, and the limits.
    specials: whether bos precedes a text.
  """
  policy = served.policy
  if isinstance(item, list) and all(type(x) is int for x in item):
    ids = token_ids(item, 'prompt', served)
    return Prompt(ids, policy.text(ids.tolist()))
  must = 'be a text, if the model has a tokenizer, or token ids'
  require(isinstance(item, str) and policy.renderer, name, must, item)
  assert policy.renderer is not None
  ok = len(item) <= CHARACTERS_PER_TOKEN * served.capacity
  require_fit(ok, 'prompt', f'{len(item)} characters', served.capacity)
  tokenizer = policy.renderer.tokenizer
  ids = list(tokenizer.encode_scaffold(item)) if item else []
  bos = tokenizer.bos_id
  if specials and bos is not None and ids[:1] != [bos]:
    ids = [bos, *ids]
  return Prompt(token_ids(ids, 'prompt', served), item)


def stops(
  texts: Any, ids: Any, own: Sequence[int], served: worker.Worker
) -> tuple[tuple[str, ...], tuple[int, ...]]:
  """Returns what ends a completion: texts, and token ids.

  Args:
    texts, ids: what was sent.
    own: the model's own ids.
    served: the model, and the limits.

  Raises:
    Refused: they are no lists of texts and ids, or too many.
  """
  require(
    isinstance(texts, list)
    and len(texts) <= STOPS
    and all(isinstance(x, str) and x for x in texts)
    and sum(map(len, texts)) <= STOP_CHARACTERS
    and not (texts and served.policy.renderer is None),
    'stop',
    f'be at most {STOPS} texts of at most {STOP_CHARACTERS} characters in all, '
    'of a model with a tokenizer',
    texts,
  )
  size, most = served.policy.model.vocab_size, schedule.STOP_IDS
  ok = isinstance(ids, list)
  ok = ok and all(type(x) is int and 0 <= x < size for x in ids)
  stop_ids = tuple(dict.fromkeys((*own, *ids))) if ok else ()
  require(
    ok and len(stop_ids) <= most,
    'stop_token_ids',
    f"be a list of ids in [0, {size}), at most {most} with the model's own",
    ids,
  )
  return tuple(texts), stop_ids


def token_ids(ids: Any, name: str, served: worker.Worker) -> np.ndarray:
  """Returns token ids as an array, i32[P].

  Raises:
    Refused: they do not fit into the context, or are no ids of the vocabulary.
  """
  size = served.policy.model.vocab_size
  ok = len(ids) <= served.capacity
  require_fit(ok, name, f'{len(ids)} tokens', served.capacity)
  ok = len(ids) and all(0 <= i < size for i in ids)
  require(ok, name, f'have some tokens, with ids in [0, {size})', ids)
  return np.asarray(ids, np.int32)
