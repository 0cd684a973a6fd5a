"""The body of a request -> an `ApiRequest`, or a refusal that names the field.

Both routes share one type. A field that this server does not know is refused by
name, unless its value is one that has no effect on the response (`NEUTRAL`): no
field is dropped silently.

The text of a completion is tokenized as other servers do: special tokens in it
are special, and bos precedes it. The content of messages is never special. What
cannot fit into the context is refused by its size, before it is rendered or
tokenized: a message has at least one token, and a token on average at most
`CHARACTERS_PER_TOKEN` characters.
"""

import dataclasses
import difflib
import functools
import json
import math
import re
import reprlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from posttrain.checkpoints import policies
from posttrain.decode import requests, schedule
from posttrain.serve import token_logprobs
from posttrain.util import disk

CHARACTERS_PER_TOKEN = 32  # ordinary text has about 4
MAX_MESSAGE = 600  # characters of an error's text
MAX_CHOICES = 128
MAX_MESSAGES = 500  # the time of rendering grows with their square
COMPLETION_TOKENS = 16  # OpenAI's default `max_tokens` of completions
COMPLETION_LOGPROBS = 5  # OpenAI's most `logprobs` of completions
STOPS = 4  # the most stop strings
STOP_CHARACTERS = 4096  # of all stop strings together
MAX_LOGPROBS = 2**18  # of a response, alternatives included
# Fields without an effect on the response.
IGNORED = frozenset(
  'user metadata store service_tier safety_identifier prompt_cache_key '
  'prompt_cache_retention parallel_tool_calls request_id priority'.split()
)
# Other unsupported fields, with the values that have no effect.
NEUTRAL = {
  'suffix': ('',),
  'logit_bias': ({},),
  'presence_penalty': (0,),
  'frequency_penalty': (0,),
  'repetition_penalty': (1,),
  'length_penalty': (1,),
  'min_tokens': (0,),
  'use_beam_search': (False,),
  'skip_special_tokens': (True,),
  'spaces_between_special_tokens': (True,),
  'include_stop_str_in_output': (False,),
  'add_generation_prompt': (True,),
  'continue_final_message': (False,),
  'chat_template_kwargs': ({},),
  'tools': ([],),
  'tool_choice': ('none', 'auto'),
  'functions': ([],),
  'function_call': ('none', 'auto'),
  'response_format': ({'type': 'text'},),
  'modalities': (['text'],),
  'bad_words': ([],),
}
_PROMPT = 'be a text, token ids, or a list of either'
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxlong = _SHORT.maxother = 80


class Refused(Exception):
  """A refused request, with its HTTP status and error object."""

  def __init__(
    self,
    status: int,
    message: str,
    param: str | None = None,
    code: str | None = None,
  ):
    """Creates the error.

    Args:
      status: the HTTP status.
      message: the error's text; shortened to `MAX_MESSAGE` characters.
      param: the field's name.
      code: OpenAI's error code.
    """
    super().__init__(' '.join(message.split())[:MAX_MESSAGE])
    self.status, self.code = status, code
    self.param = param and param[:80]

  @property
  def body(self) -> dict[str, Any]:
    """The error object, in OpenAI's form."""
    kinds = {
      401: 'authentication_error',
      404: 'not_found_error',
      429: 'rate_limit_error',
      500: 'server_error',
      503: 'server_error',
    }
    return {
      'error': {
        'message': str(self),
        'param': self.param,
        'code': self.code,
        'type': kinds.get(self.status, 'invalid_request_error'),
      }
    }


def quote(value: Any) -> str:
  """Returns a JSON value as a short part of a message, whatever its size."""
  return _SHORT.repr(value)[:200]


def wrong(name: str, must: str, got: Any, code: str | None = None) -> Refused:
  """Returns the refusal of a field's value."""
  shown = name if name.isprintable() else quote(name)
  return Refused(400, f'{shown} must {must}: got {quote(got)}', name, code)


class Fields:
  """The fields of a body; null means absent."""

  def __init__(self, body: Mapping[str, Any]):
    self._left = {k: v for k, v in body.items() if v is not None}
    self._known: set[str] = set()

  def take(self, name: str) -> Any:
    """Returns a field's value; None if it is absent."""
    self._known.add(name)
    return self._left.pop(name, None)

  def whole(
    self, name: str, default: int | None, low: int, high: int
  ) -> int | None:
    """Returns a whole number in [low, high]."""
    value = self.take(name)
    if value is None:
      return default
    if type(value) is not int or not low <= value <= high:
      raise wrong(name, f'be a whole number in [{low}, {high}]', value)
    return value

  def number(
    self, name: str, default: float, ok: Callable[[float], bool], must: str
  ) -> float:
    """Returns a finite number with `ok`; `must`: the error's requirement."""
    value = self.take(name)
    if value is None:
      return default
    # A whole number may be too large to be a float.
    if type(value) not in (int, float) or not -1e9 <= value <= 1e9:
      raise wrong(name, must, value)
    if not math.isfinite(value) or not ok(value):
      raise wrong(name, must, value)
    return float(value)

  def flag(self, name: str, default: bool = False) -> bool:
    """Returns a bool."""
    value = self.take(name)
    if value is None:
      return default
    if type(value) is not bool:
      raise wrong(name, 'be true or false', value)
    return value

  def finish(
    self,
    ignored: frozenset[str] = IGNORED,
    neutral: Mapping[str, tuple] = NEUTRAL,
  ) -> None:
    """Refuses fields that were not taken.

    Args:
      ignored: fields that have no effect, whatever their values.
      neutral: fields that are not supported, with the values that are allowed.
    """
    for name, value in self._left.items():
      allowed = neutral.get(name, ())
      if name in ignored or value in allowed:
        continue
      known = [*self._known, *ignored, *neutral]
      near = difflib.get_close_matches(name[:80], {*known} - {name}, 1)
      hint = f', or be {json.dumps(allowed[0])}' if allowed else ''
      if near and not allowed:
        hint = f' (did you mean {near[0]!r}?)'
      raise wrong(
        name[:80],
        f'be left out{hint}: this server does not support it',
        value,
        'unsupported_field',
      )


@dataclasses.dataclass(frozen=True)
class Served:
  """The served policy, its name, and the limits of requests."""

  policy: policies.Policy
  name: str  # of the model
  capacity: int  # tokens of a sequence
  max_sequences: int  # open at a time

  @property
  def max_characters(self) -> int:
    """The most characters of a prompt."""
    return self.capacity * CHARACTERS_PER_TOKEN


@dataclasses.dataclass(frozen=True)
class Prompt:
  """A prompt as ids and as text."""

  ids: np.ndarray  # i32[P]
  text: str


@dataclasses.dataclass(frozen=True)
class ApiRequest:
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
  echo: bool
  return_token_ids: bool
  tokens_as_ids: bool
  stream: bool
  include_usage: bool

  @property
  def temperature(self) -> float:
    """The temperature of logprobs."""
    return self.sampling.temperature or 1.0

  @property
  def scores_prompt(self) -> bool:
    """Whether the response has logprobs of the prompts."""
    return self.prompt_logprobs is not None or (
      self.echo and self.logprobs is not None
    )


def read(content: bytes, served: Served, *, chat: bool) -> ApiRequest:
  """Reads and checks a request.

  Args:
    content: the body.
    served: the model, and the limits.
    chat: whether the route is /v1/chat/completions.

  Raises:
    Refused: with 400 or 404.
  """
  try:
    body = disk.parse_json(content, 'the body')
  except ValueError as error:
    raise Refused(400, f'{error}') from error
  if not isinstance(body, dict):
    raise Refused(
      400, f'the body must be a JSON object: got a {type(body).__name__}'
    )
  fields = Fields(body)
  check_model(fields.take('model'), served.name)
  items = (_take_messages if chat else _take_prompts)(fields, served)
  specials = chat or fields.flag('add_special_tokens', True)
  most = token_logprobs.MAX_ALTERNATIVES
  if chat:
    with_logprobs = fields.flag('logprobs')
    logprobs = fields.whole('top_logprobs', 0, 0, most)
    if logprobs and not with_logprobs:
      raise wrong('top_logprobs', 'be 0 where logprobs is false', logprobs)
    logprobs = logprobs if with_logprobs else None
  else:
    logprobs = fields.whole('logprobs', None, 0, COMPLETION_LOGPROBS)
  stream, stream_options = fields.flag('stream'), fields.take('stream_options')
  if (
    stream_options and not stream or not isinstance(stream_options, dict | None)
  ):
    raise wrong(
      'stream_options',
      'be an object, and be left out where stream is false',
      stream_options,
    )
  inner = Fields(stream_options or {})
  request = ApiRequest(
    chat=chat,
    prompts=(),
    max_tokens=(),
    n=fields.whole('n', 1, 1, MAX_CHOICES),
    echo=not chat and fields.flag('echo'),
    logprobs=logprobs,
    prompt_logprobs=fields.whole('prompt_logprobs', None, 0, most),
    stream=stream,
    include_usage=inner.flag('include_usage'),
    seed=fields.whole('seed', None, -(2**63), 2**63 - 1),
    sampling=_sampling(fields),
    stop=_stop(fields, served),
    stop_ids=_stop_ids(fields, served),
    return_token_ids=fields.flag('return_token_ids'),
    tokens_as_ids=fields.flag('return_tokens_as_token_ids'),
  )
  inner.finish(frozenset({'include_obfuscation', 'continuous_usage_stats'}), {})
  # Clients send `logprobs: 1` for the logprobs of a completion's own tokens.
  alternatives = (logprobs or 0) > (0 if chat else 1)
  if stream and (request.scores_prompt or alternatives):
    raise wrong(
      'stream',
      'be false where prompts are scored, or alternatives of tokens are '
      'requested: they are computed once the choice is complete',
      True,
    )
  limit = _token_limit(fields, request)
  fields.finish()
  count = 1 if chat else len(items)
  if count * (request.n + request.scores_prompt) > served.max_sequences:
    raise wrong(
      'n',
      f'request at most {served.max_sequences} sequences in all, over '
      f'{count} prompts, scored prompts included',
      request.n,
    )
  # All other fields are right: now the slow part.
  prompts = (
    (_conversation(items, served),)
    if chat
    else tuple(
      _prompt(
        item, f'prompt[{i}]' if len(items) > 1 else 'prompt', served, specials
      )
      for i, item in enumerate(items)
    )
  )
  max_tokens = _max_tokens(limit, prompts, served, chat)
  request = dataclasses.replace(request, prompts=prompts, max_tokens=max_tokens)
  _check_logprobs(request)
  return request


def _check_logprobs(request: ApiRequest) -> None:
  """Raises Refused for a response with too many logprobs."""
  prompts = sum(len(prompt.ids) for prompt in request.prompts)
  count = 0
  if request.prompt_logprobs is not None:
    copies = 1 if request.chat else request.n
    count += copies * (1 + request.prompt_logprobs) * prompts
  if request.logprobs is not None:
    tokens = sum(request.max_tokens) + (prompts if request.echo else 0)
    count += request.n * (1 + request.logprobs) * tokens
  if count > MAX_LOGPROBS:
    raise wrong(
      'prompt_logprobs' if request.logprobs is None else 'logprobs',
      f'request at most {MAX_LOGPROBS} logprobs in all, alternatives '
      'included; send fewer prompts or choices at a time',
      count,
    )


def check_model(model: Any, name: str) -> None:
  """Raises Refused, with 404, unless the model is the one of this name."""
  if not isinstance(model, str):
    raise wrong('model', f'be the name of a model, {name!r}', model)
  if model != name:
    raise Refused(
      404,
      f'model must be one that is served here: got {quote(model)}, '
      f'expected {name!r}',
      'model',
      'model_not_found',
    )


def _token_limit(fields: Fields, request: ApiRequest) -> tuple[str, int] | None:
  """Returns the name and value of the limit; None if there is none."""
  names = ('max_completion_tokens', 'max_tokens')
  scores = request.echo or request.prompt_logprobs is not None
  values = {
    name: fields.whole(name, None, 0 if scores else 1, 2**31)
    for name in (names if request.chat else names[1:])
  }
  limits = [(name, x) for name, x in values.items() if x is not None]
  if len({x for _, x in limits}) > 1:
    raise wrong('max_tokens', 'agree with max_completion_tokens', values)
  return next(iter(limits), None)


def _max_tokens(
  limit: tuple[str, int] | None,
  prompts: tuple[Prompt, ...],
  served: Served,
  chat: bool,
) -> tuple[int, ...]:
  """Returns the most new tokens per prompt."""
  tokens_left = [served.capacity - len(prompt.ids) for prompt in prompts]
  longest = served.capacity - min(tokens_left)
  name, value = limit or ('messages' if chat else 'prompt', 1)
  if value > min(tokens_left):
    raise Refused(
      400,
      f'{name} must fit into the context of {served.capacity} tokens: got '
      f'{value} after a prompt of {longest}',
      name,
      'context_length_exceeded',
    )
  if limit is None:
    return tuple(x if chat else min(x, COMPLETION_TOKENS) for x in tokens_left)
  return (value,) * len(prompts)


def _sampling(fields: Fields) -> requests.Sampling:
  top_k = fields.whole('top_k', 0, -1, 2**31 - 1)
  return requests.Sampling(
    # Smaller values would overflow; 0 is greedy.
    temperature=fields.number(
      'temperature',
      1.0,
      lambda x: x == 0 or 1e-4 <= x <= 100,
      'be 0 (greedy), or in [0.0001, 100]',
    ),
    top_k=max(top_k, 0),
    top_p=fields.number('top_p', 1.0, lambda x: 0 < x <= 1, 'be in (0, 1]'),
    min_p=fields.number('min_p', 0.0, lambda x: 0 <= x < 1, 'be in [0, 1)'),
  )


def _stop(fields: Fields, served: Served) -> tuple[str, ...]:
  stop = fields.take('stop')
  stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
  if (
    not isinstance(stops, list)
    or len(stops) > STOPS
    or not all(isinstance(x, str) and x for x in stops)
    or sum(map(len, stops)) > STOP_CHARACTERS
  ):
    raise wrong(
      'stop',
      f'be a text, or at most {STOPS} of them, and have at most '
      f'{STOP_CHARACTERS} characters in all',
      stop,
    )
  if stops and served.policy.renderer is None:
    raise wrong('stop', 'be left out: the model has no tokenizer', stop)
  return tuple(stops)


def _stop_ids(fields: Fields, served: Served) -> tuple[int, ...]:
  extra, policy = fields.take('stop_token_ids'), served.policy
  extra = [] if extra is None else extra
  own = () if fields.flag('ignore_eos') else policy.stop_ids
  size = policy.model.vocab_size
  if not isinstance(extra, list) or not all(
    type(i) is int and 0 <= i < size for i in extra
  ):
    raise wrong('stop_token_ids', f'be a list of ids in [0, {size})', extra)
  ids = tuple(dict.fromkeys((*own, *extra)))
  if len(ids) > schedule.STOP_IDS:
    raise wrong(
      'stop_token_ids',
      f"be at most {schedule.STOP_IDS} ids, the model's own {own} included",
      extra,
    )
  return ids


def _take_messages(fields: Fields, served: Served) -> list[Any]:
  """Takes the field `messages`; checks its form and its size."""
  messages, renderer = fields.take('messages'), served.policy.renderer
  if renderer is None:
    raise Refused(
      400,
      'messages must be read by a tokenizer: the model has none; send '
      'token ids to /v1/completions',
      'messages',
    )
  if not isinstance(messages, list) or not messages:
    raise wrong('messages', 'be a list of some messages', messages)
  if len(messages) > min(served.capacity, MAX_MESSAGES):
    raise _too_long('messages', f'{len(messages)} messages', served)
  size = len(json.dumps(messages, ensure_ascii=False))
  # Each message has keys, braces and a role besides its text.
  if size > served.max_characters + 16 * served.capacity:
    raise _too_long('messages', f'{size} characters', served)
  names = _names(renderer.template)
  return [_message(x, f'messages[{i}]', names) for i, x in enumerate(messages)]


@functools.lru_cache(maxsize=4)
def _names(template: str | None) -> frozenset[str]:
  """Returns the fields of a message that a template may read: all its words."""
  # Without a template the renderer refuses tool calls itself.
  words = ['tool_calls'] if template is None else re.findall(r'\w+', template)
  return frozenset({'role', 'content', *words})


def _message(message: Any, place: str, names: frozenset[str]) -> Any:
  """Joins the parts of a content; the renderer checks the rest.

  Args:
    message: a JSON value.
    place: its name in errors.
    names: the fields that the chat template may read.
  """

  def check_read(value: dict[str, Any], place: str, names) -> None:
    for name, x in value.items():
      if name not in names and x not in (None, '', [], {}):
        raise wrong(
          f'{place}.{name[:80]}',
          'be left out: nothing reads it',
          x,
          'unsupported_field',
        )

  if not isinstance(message, dict):
    raise wrong(place, 'be an object', message)
  check_read(message, place, names)
  # The newer name of the role with the instructions.
  if message.get('role') == 'developer':
    message = {**message, 'role': 'system'}
  parts = message.get('content')
  if not isinstance(parts, list):
    return message
  for part in parts:
    text = isinstance(part, dict) and part.get('type') == 'text'
    if not text or not isinstance(part.get('text'), str):
      raise wrong(f'{place}.content', 'be text, or parts of text', part)
    check_read(part, f'{place}.content', ('type', 'text'))
  return {**message, 'content': ''.join(part['text'] for part in parts)}


def _conversation(messages: list[Any], served: Served) -> Prompt:
  """Renders messages with the renderer's template."""
  try:
    rendered = served.policy.renderer.render(
      messages, add_generation_prompt=True
    )
  except ValueError as error:
    raise Refused(400, f'{error}', 'messages') from error
  return Prompt(_checked(rendered.ids, 'messages', served), rendered.text)


def _too_long(name: str, got: str, served: Served) -> Refused:
  return Refused(
    400,
    f'{name} must fit into the context of {served.capacity} tokens: got {got}',
    name.partition('[')[0],
    'context_length_exceeded',
  )


def _take_prompts(fields: Fields, served: Served) -> list[Any]:
  """Takes the field `prompt` in any of its forms; returns a list of prompts."""
  prompt = fields.take('prompt')
  if not isinstance(prompt, str | list) or not prompt:
    raise wrong('prompt', f'{_PROMPT}, and not be empty', prompt)
  single = isinstance(prompt, str) or all(type(x) is int for x in prompt)
  items = [prompt] if single else prompt
  if len(items) > served.max_sequences:
    raise wrong(
      'prompt', f'hold at most {served.max_sequences} of them', len(items)
    )
  return items


def _prompt(item: Any, place: str, served: Served, specials: bool) -> Prompt:
  """Checks a prompt, and tokenizes a text.

  Args:
    item: a text or a list of ids.
    place: its name in errors.
    served: the model, and the limits.
    specials: whether bos precedes a text.
  """
  if isinstance(item, list) and all(type(x) is int for x in item):
    ids = _checked(item, place, served)
    return Prompt(ids, served.policy.text(ids.tolist()))
  if not isinstance(item, str):
    raise wrong(place, _PROMPT, item)
  if served.policy.renderer is None:
    raise Refused(
      400, f'{place} must be token ids: the model has no tokenizer', 'prompt'
    )
  if len(item) > served.max_characters:
    raise _too_long(place, f'{len(item)} characters', served)
  tokenizer = served.policy.renderer.tokenizer
  ids = list(tokenizer.encode_scaffold(item)) if item else []
  bos = tokenizer.bos_id
  if specials and bos is not None and ids[:1] != [bos]:
    ids = [bos, *ids]
  return Prompt(_checked(ids, place, served), item)


def _checked(ids, place: str, served: Served) -> np.ndarray:
  """Returns the ids as an array; raises Refused for unknown ids."""
  size = served.policy.model.vocab_size
  name = place.partition('[')[0]
  if not len(ids):
    raise Refused(400, f'{place} must have a token: got none', name)
  if len(ids) > served.capacity:
    raise _too_long(place, f'{len(ids)} tokens', served)
  bad = next((i for i in ids if not 0 <= i < size), None)
  if bad is not None:
    raise wrong(name, f'be of ids in [0, {size}), the vocabulary', int(bad))
  return np.asarray(ids, np.int32)
