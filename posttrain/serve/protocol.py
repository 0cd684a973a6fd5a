"""The body of a request -> an `ApiRequest`, or a refusal that names the field.

Both routes share one type. Fields without an effect on the response are
ignored, by name; any other unsupported field is refused: no field is dropped
silently.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from posttrain.decode import requests, schedule
from posttrain.serve import fields as fields_lib
from posttrain.serve import texts, token_logprobs

Refused, wrong = fields_lib.Refused, fields_lib.wrong

MAX_CHOICES = 128
COMPLETION_TOKENS = 16  # OpenAI's default `max_tokens` of completions
COMPLETION_LOGPROBS = 5  # OpenAI's most `logprobs` of completions
STOPS = 4  # the most stop strings
STOP_CHARACTERS = 4096  # of all stop strings together
MAX_LOGPROBS = 2**18  # of a response, alternatives included
# Ids and characters of prompts in a response, copies included.
MAX_ECHOED = 2**21
# Fields without an effect on the response.
IGNORED = {
  'user',
  'metadata',
  'store',
  'service_tier',
  'safety_identifier',
  'prompt_cache_key',
  'prompt_cache_retention',
  'parallel_tool_calls',
  'request_id',
  'priority',
}
# Unsupported fields, with the values that have no effect.
NEUTRAL = {
  'best_of': (),
  'suffix': ('',),
  'logit_bias': ({},),
  'presence_penalty': (0, 0.0),
  'frequency_penalty': (0, 0.0),
  'repetition_penalty': (1, 1.0),
  'length_penalty': (1, 1.0),
  'min_tokens': (0,),
  'use_beam_search': (False,),
  'skip_special_tokens': (True,),
  'spaces_between_special_tokens': (True,),
  'include_stop_str_in_output': (False,),
  'add_generation_prompt': (True,),
  'continue_final_message': (False,),
  'chat_template_kwargs': ({},),
  'chat_template': (),
  'tools': ([],),
  'tool_choice': ('none', 'auto'),
  'functions': ([],),
  'function_call': ('none', 'auto'),
  'response_format': ({'type': 'text'},),
  'modalities': (['text'],),
  'reasoning_effort': (),
  'audio': (),
  'prediction': (),
  'verbosity': (),
  'web_search_options': (),
  'guided_json': (),
  'guided_regex': (),
  'guided_choice': (),
  'guided_grammar': (),
  'structured_outputs': (),
  'truncate_prompt_tokens': (),
  'logits_processors': (),
  'bad_words': ([],),
  'allowed_token_ids': (),
  'logprob_token_ids': (),
}


@dataclasses.dataclass(frozen=True)
class ApiRequest:
  """A request, parsed and checked."""

  chat: bool
  prompts: tuple[texts.Prompt, ...]
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
    return _scores_prompt(self.echo, self.logprobs, self.prompt_logprobs)

  @property
  def num_logprobs(self) -> int:
    """The most logprobs of the response, alternatives included."""
    prompts = sum(len(prompt.ids) for prompt in self.prompts)
    count = 0
    if self.prompt_logprobs is not None:
      copies = 1 if self.chat else self.n
      count += copies * (1 + self.prompt_logprobs) * prompts
    if self.logprobs is not None:
      tokens = sum(self.max_tokens) + (prompts if self.echo else 0)
      count += self.n * (1 + self.logprobs) * tokens
    return count

  @property
  def num_echoed(self) -> int:
    """The ids and characters of prompts in the response, copies included."""
    copies = 1 if self.chat and not self.stream else self.n
    ids = sum(len(prompt.ids) for prompt in self.prompts)
    characters = sum(len(prompt.text) for prompt in self.prompts)
    return copies * (ids * self.return_token_ids + characters * self.echo)


def _scores_prompt(
  echo: bool, logprobs: int | None, prompt_logprobs: int | None
) -> bool:
  return prompt_logprobs is not None or (echo and logprobs is not None)


def read(
  content: bytes,
  served: texts.Served,
  *,
  chat: bool,
  cancelled: Callable[[], bool] | None = None,
) -> ApiRequest:
  """Reads and checks a request.

  Args:
    content: the body.
    served: the model, and the limits.
    chat: whether the route is /v1/chat/completions.
    cancelled: returns whether the result is no longer wanted.

  Raises:
    Refused: with 400 or 404.
  """
  fields = fields_lib.Fields(fields_lib.parse(content))
  check_model(fields.take('model'), served.name)
  take = texts.take_messages if chat else texts.take_prompts
  items = take(fields, served)
  specials = chat or fields.flag('add_special_tokens', True)
  options = _options(fields, served, chat)
  limit = _token_limit(fields, chat, options)
  fields.finish(IGNORED, NEUTRAL)
  _check_sequences(1 if chat else len(items), options, served)
  # All other fields are right: now the slow part.
  prompts = (
    texts.conversation(items, served, cancelled)
    if chat
    else texts.prompts(items, served, specials=specials)
  )
  request = ApiRequest(
    chat=chat,
    prompts=prompts,
    max_tokens=_max_tokens(limit, prompts, served, chat),
    **options,
  )
  _check_response(request)
  return request


def _options(
  fields: fields_lib.Fields, served: texts.Served, chat: bool
) -> dict[str, Any]:
  """Returns the fields of an `ApiRequest` that do not depend on prompts."""
  most = token_logprobs.MAX_ALTERNATIVES
  stream, usage = _stream(fields)
  options = {
    'n': fields.whole('n', 1, 1, MAX_CHOICES),
    'echo': not chat and fields.flag('echo'),
    'logprobs': _logprobs(fields, chat),
    'prompt_logprobs': fields.whole('prompt_logprobs', None, 0, most),
    'stream': stream,
    'include_usage': usage,
    'seed': fields.whole('seed', None, -(2**63), 2**63 - 1),
    'sampling': _sampling(fields),
    'stop': _stop(fields, served),
    'stop_ids': _stop_ids(fields, served),
    'return_token_ids': fields.flag('return_token_ids'),
    'tokens_as_ids': fields.flag('return_tokens_as_token_ids'),
  }
  if stream:
    _check_streamed(
      chat, options['echo'], options['logprobs'], options['prompt_logprobs']
    )
  return options


def _check_sequences(
  prompts: int, options: dict[str, Any], served: texts.Served
) -> None:
  """Raises Refused for more sequences than may be open at a time."""
  scored = _scores_prompt(
    options['echo'], options['logprobs'], options['prompt_logprobs']
  )
  if prompts * (options['n'] + scored) > served.max_sequences:
    raise wrong(
      'n',
      f'request at most {served.max_sequences} sequences in all, over '
      f'{prompts} prompts, scored prompts included',
      options['n'],
    )


def _check_response(request: ApiRequest) -> None:
  """Raises Refused for a response that would be too large."""
  if request.num_echoed > MAX_ECHOED:
    raise wrong(
      'echo' if request.echo else 'return_token_ids',
      f'return at most {MAX_ECHOED} ids and characters of prompts in all, one '
      'copy per choice; send fewer prompts or choices at a time',
      request.num_echoed,
    )
  if request.num_logprobs > MAX_LOGPROBS:
    raise wrong(
      'prompt_logprobs' if request.logprobs is None else 'logprobs',
      f'request at most {MAX_LOGPROBS} logprobs in all, alternatives '
      'included; send fewer prompts or choices at a time',
      request.num_logprobs,
    )


def _check_streamed(chat, echo, logprobs, prompt_logprobs) -> None:
  # Clients send `logprobs: 1` for the logprobs of a completion's own tokens.
  most = 0 if chat else 1
  scored = _scores_prompt(echo, logprobs, prompt_logprobs)
  if scored or (logprobs or 0) > most:
    raise wrong(
      'stream',
      'be false where prompts are scored, or alternatives of tokens are '
      'requested: they are computed once the choice is complete',
      True,
    )


def check_model(model: Any, name: str) -> None:
  """Raises Refused, with 404, unless the model is the one of this name."""
  if not isinstance(model, str):
    raise wrong('model', f'be the name of a model, {name!r}', model)
  if model != name:
    raise Refused(
      404,
      f'model must be one that is served here: got {fields_lib.quote(model)}, '
      f'expected {name!r}',
      'model',
      'model_not_found',
    )


def _logprobs(fields: fields_lib.Fields, chat: bool) -> int | None:
  if not chat:
    return fields.whole('logprobs', None, 0, COMPLETION_LOGPROBS)
  logprobs = fields.flag('logprobs')
  top = fields.whole('top_logprobs', 0, 0, token_logprobs.MAX_ALTERNATIVES)
  if top and not logprobs:
    raise wrong('top_logprobs', 'be 0 where logprobs is false', top)
  return top if logprobs else None


def _stream(fields: fields_lib.Fields) -> tuple[bool, bool]:
  stream, options = fields.flag('stream'), fields.object('stream_options')
  if options and not stream:
    raise wrong('stream_options', 'be left out where stream is false', options)
  inner = fields_lib.Fields(options)
  usage = inner.flag('include_usage')
  inner.finish({'include_obfuscation', 'continuous_usage_stats'}, {})
  return stream, usage


def _token_limit(
  fields: fields_lib.Fields, chat: bool, options: dict[str, Any]
) -> tuple[str, int] | None:
  """Returns the name and value of the limit; None if there is none."""
  names = ('max_completion_tokens', 'max_tokens')
  scores = options['echo'] or options['prompt_logprobs'] is not None
  values = {
    name: fields.whole(name, None, 0 if scores else 1, 2**31)
    for name in (names if chat else names[1:])
  }
  limits = [(name, x) for name, x in values.items() if x is not None]
  if len({x for _, x in limits}) > 1:
    raise wrong('max_tokens', 'agree with max_completion_tokens', values)
  return next(iter(limits), None)


def _max_tokens(
  limit: tuple[str, int] | None,
  prompts: tuple[texts.Prompt, ...],
  served: texts.Served,
  chat: bool,
) -> tuple[int, ...]:
  """Returns the most new tokens per prompt."""
  tokens_left = [served.capacity - len(prompt.ids) for prompt in prompts]
  longest = served.capacity - min(tokens_left)
  name = 'messages' if chat else 'prompt'
  if limit is None and min(tokens_left) < 1:
    raise Refused(
      400,
      f'{name} must be shorter than the context of {served.capacity} tokens: '
      f'got {longest} tokens',
      name,
      'context_length_exceeded',
    )
  if limit is None:
    return tuple(x if chat else min(x, COMPLETION_TOKENS) for x in tokens_left)
  name, value = limit
  if value > min(tokens_left):
    raise Refused(
      400,
      f'{name} must fit into the context of {served.capacity} tokens: got '
      f'{value} after a prompt of {longest}',
      name,
      'context_length_exceeded',
    )
  return (value,) * len(prompts)


def _sampling(fields: fields_lib.Fields) -> requests.Sampling:
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


def _stop(fields: fields_lib.Fields, served: texts.Served) -> tuple[str, ...]:
  stop = fields.take('stop')
  stops = [] if stop is None else [stop] if isinstance(stop, str) else stop
  whole = isinstance(stops, list) and len(stops) <= STOPS
  if not whole or not all(isinstance(x, str) and x for x in stops):
    raise wrong('stop', f'be a text, or at most {STOPS} of them', stop)
  if sum(map(len, stops)) > STOP_CHARACTERS:
    raise wrong(
      'stop', f'have at most {STOP_CHARACTERS} characters in all', stop
    )
  if stops and served.policy.renderer is None:
    raise wrong('stop', 'be left out: the model has no tokenizer', stop)
  return tuple(stops)


def _stop_ids(
  fields: fields_lib.Fields, served: texts.Served
) -> tuple[int, ...]:
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
