"""The body of a request -> an `Ask`, or a refusal that names the field.

Both routes make the same thing of what they are sent. Fields that a client
sends and that change nothing here are ignored, by name; any other one is
refused: a request is never answered as if it had said something else.
"""

import dataclasses
from typing import Any

from posttrain.decode import requests, schedule
from posttrain.serve import fields as fields_lib
from posttrain.serve import laws, texts

Refused, wrong = fields_lib.Refused, fields_lib.wrong

MAX_CHOICES = 128
COMPLETION_TOKENS = 16  # of an answer that does not say, as OpenAI has it
STOPS = 4  # strings that end an answer
# What these say has no bearing on the answer.
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
# What these say would have, unless it is this.
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
class Ask:
  """A request, read and checked."""

  chat: bool
  prompts: tuple[texts.Prompt, ...]
  max_tokens: tuple[int, ...]  # per prompt; 0 = only the prompt is scored
  n: int
  seed: int | None
  sampling: requests.Sampling
  stop: tuple[str, ...]
  stop_ids: tuple[int, ...]
  logprobs: int | None  # alternatives per token; None = no logprobs
  prompt_logprobs: int | None  # the same of the prompt, in vLLM's form
  echo: bool
  return_token_ids: bool
  tokens_as_ids: bool
  stream: bool
  include_usage: bool

  @property
  def temperature(self) -> float:
    """At which logprobs are."""
    return self.sampling.temperature or 1.0

  @property
  def prompt_alternatives(self) -> int | None:
    """As of `laws.read`, of the prompts."""
    asked = [
      x
      for x in (self.prompt_logprobs, self.logprobs if self.echo else None)
      if x is not None
    ]
    if self.prompt_logprobs is None and asked == [0]:
      return None  # nobody looks at ranks
    return max(asked)

  @property
  def scores_prompt(self) -> bool:
    return self.prompt_logprobs is not None or (
      self.echo and self.logprobs is not None
    )


def read(content: bytes, served: texts.Served, *, chat: bool) -> Ask:
  """Reads and checks a request.

  Args:
    content: of the body.
    served: what there is to be asked for.
    chat: it came to /v1/chat/completions.

  Raises:
    Refused: with 400 or 404.
  """
  fields = fields_lib.Fields(fields_lib.parse(content))
  _check_model(fields.take('model'), served.name)
  read_prompts = texts.conversation if chat else texts.prompts
  prompts = read_prompts(fields, served)
  n = fields.whole('n', 1, 1, MAX_CHOICES)
  echo = not chat and fields.flag('echo')
  prompt_logprobs = fields.whole('prompt_logprobs', None, 0, laws.MOST)
  scores = echo or prompt_logprobs is not None
  logprobs = _logprobs(fields, chat)
  stream, usage = _stream(fields)
  if stream:
    _check_streamed(chat, echo, logprobs, prompt_logprobs)
  ask = Ask(
    chat=chat,
    prompts=prompts,
    n=n,
    echo=echo,
    logprobs=logprobs,
    prompt_logprobs=prompt_logprobs,
    stream=stream,
    include_usage=usage,
    max_tokens=_max_tokens(fields, prompts, served, chat, scores),
    seed=fields.whole('seed', None, -(2**63), 2**63 - 1),
    sampling=_sampling(fields),
    stop=_stop(fields, served),
    stop_ids=_stop_ids(fields, served),
    return_token_ids=fields.flag('return_token_ids'),
    tokens_as_ids=fields.flag('return_tokens_as_token_ids'),
  )
  fields.finish(IGNORED, NEUTRAL)
  if len(prompts) * (n + ask.scores_prompt) > served.room:
    raise wrong(
      'n',
      f'ask for at most {served.room} sequences in all, over '
      f'{len(prompts)} prompts, those that are scored included',
      n,
    )
  return ask


def _check_streamed(chat, echo, logprobs, prompt_logprobs) -> None:
  # A completion's `logprobs: 1` is how clients ask for those of what is drawn.
  most = 0 if chat else 1
  told = prompt_logprobs is not None or echo and logprobs is not None
  if told or (logprobs or 0) > most:
    raise wrong(
      'stream',
      'be false where prompts are scored, or alternatives of '
      'tokens are asked for',
      True,
    )


def _check_model(asked: Any, name: str) -> None:
  if not isinstance(asked, str):
    raise wrong('model', f'be the name of a model, {name!r}', asked)
  if asked != name:
    raise Refused(
      404,
      f'model must be one that is served here: got {asked!r:.80}, '
      f'expected {name!r}',
      'model',
      'model_not_found',
    )


def _logprobs(fields: fields_lib.Fields, chat: bool) -> int | None:
  if not chat:
    return fields.whole('logprobs', None, 0, laws.MOST)
  asked = fields.flag('logprobs')
  top = fields.whole('top_logprobs', 0, 0, laws.MOST)
  if top and not asked:
    raise wrong('top_logprobs', 'be 0 where logprobs is false', top)
  return top if asked else None


def _stream(fields: fields_lib.Fields) -> tuple[bool, bool]:
  stream, options = fields.flag('stream'), fields.object('stream_options')
  if options and not stream:
    raise wrong('stream_options', 'be left out where stream is false', options)
  inner = fields_lib.Fields(options)
  usage = inner.flag('include_usage')
  inner.finish({'include_obfuscation', 'continuous_usage_stats'}, {})
  return stream, usage


def _max_tokens(fields, prompts, served, chat, scores) -> tuple[int, ...]:
  names = ('max_completion_tokens', 'max_tokens')
  asked = {
    name: fields.whole(name, None, 0 if scores else 1, 2**31)
    for name in (names if chat else names[1:])
  }
  said = [name for name, value in asked.items() if value is not None]
  rooms = [served.capacity - len(prompt.ids) for prompt in prompts]
  if not said:
    if min(rooms) < 1:
      raise Refused(
        400,
        f'{"messages" if chat else "prompt"} must leave room for a '
        f'token in a context of {served.capacity}: got one of '
        f'{served.capacity - min(rooms)}',
        'messages' if chat else 'prompt',
        'context_length_exceeded',
      )
    return tuple(x if chat else min(x, COMPLETION_TOKENS) for x in rooms)
  if len({asked[name] for name in said}) > 1:
    raise wrong('max_tokens', 'agree with max_completion_tokens', asked)
  value = asked[said[0]]
  if value > min(rooms):
    raise Refused(
      400,
      f'{said[0]} must fit into the context of {served.capacity} '
      f'tokens: got {value} behind a prompt of '
      f'{served.capacity - min(rooms)}',
      said[0],
      'context_length_exceeded',
    )
  return (value,) * len(prompts)


def _sampling(fields: fields_lib.Fields) -> requests.Sampling:
  top_k = fields.whole('top_k', 0, -1, 2**31 - 1)
  return requests.Sampling(
    # Lower ones would overflow; they are greedy.
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
  stops = [stop] if isinstance(stop, str) else stop or []
  whole = isinstance(stops, list) and len(stops) <= STOPS
  if not whole or not all(isinstance(x, str) and x for x in stops):
    raise wrong('stop', f'be a text, or at most {STOPS} of them', stop)
  if stops and served.policy.renderer is None:
    raise wrong('stop', 'be left out: the model has no tokenizer', stop)
  return tuple(stops)


def _stop_ids(
  fields: fields_lib.Fields, served: texts.Served
) -> tuple[int, ...]:
  asked, policy = fields.take('stop_token_ids') or [], served.policy
  ours = () if fields.flag('ignore_eos') else policy.stop_ids
  size = policy.model.vocab_size
  if not isinstance(asked, list) or not all(
    type(i) is int and 0 <= i < size for i in asked
  ):
    raise wrong('stop_token_ids', f'be a list of ids in [0, {size})', asked)
  ids = tuple(dict.fromkeys((*ours, *asked)))
  if len(ids) > schedule.STOP_IDS:
    raise wrong(
      'stop_token_ids',
      f"be at most {schedule.STOP_IDS} ids, the model's own {ours} included",
      asked,
    )
  return ids
