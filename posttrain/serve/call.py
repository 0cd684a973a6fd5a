"""One API request in progress: an `ApiRequest` -> worker jobs -> a response.

`Call`:

1. Every choice is a job, and every prompt to score; they are accepted together,
   or not at all.
2. The worker's events arrive in an asyncio queue, from the worker's thread.
3. Alternatives to sampled tokens come from a forward over the finished choice.
4. `close` drops the open jobs, however a call ends.

`Detokenizer`, tokens -> text that can be sent at once:

1. New tokens are decoded together with those before them, in a window that
   moves along: tokens decoded one by one may give another text, and all of them
   decoded again for every token would cost their square.
2. Text that may still change is held back: replacement characters at the end,
   and a possible beginning of a stop string.
3. A stop string ends the choice with the token that completed it; the text
   ends before the string. Chunk boundaries make no difference.
4. The last tokens are decoded with all others, once.

The JSON objects of a response have OpenAI's form, else vLLM's. Their
logprobs are in nats, of the distribution before truncation, at the request's
temperature (at 1 if that is 0); those of sampled tokens come from sampling,
those of prompts from a forward over the whole prompt.
"""

import asyncio
import contextlib
import functools
import hashlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

import posttrain
from posttrain.chat import tokenizers, tool_calls
from posttrain.decode import requests
from posttrain.serve import protocol, worker

FINGERPRINT = f'posttrain-{posttrain.__version__}'
_REPLACEMENT = '\ufffd'  # decodes bytes that are no character (yet)
FINISH = {'eos': 'stop', 'max_tokens': 'length', 'overflow': 'length'}


class _Window(NamedTuple):
  """The tokens that are decoded again with new ones."""

  start: int = 0  # index of its first token
  last: int = 0  # index of the first token that was new at the last move
  text: str = ''  # the part of its text that is final


class Detokenizer:
  """The tokens and the text of one choice."""

  def __init__(
    self, decode: Callable[[Sequence[int]], str], stops: Sequence[str] = ()
  ):
    """Starts a text without tokens.

    Args:
      decode: returns the text of ids.
      stops: stop strings.
    """
    self._decode, self._stops = decode, stops
    self._window = _Window()
    self._held = ''  # final, but a stop string may begin in it
    self.text = ''  # the final text
    self.ids: list[int] = []
    self.logprobs: list[float] = []  # one per id
    self.finish: str | None = None  # the finish_reason, when it has ended
    self.stop: str | None = None  # the stop string that ended it
    self.sent = 0  # characters of a streamed message
    self.sent_ids = 0  # tokens of a stream
    self.cached = 0  # tokens of its prompt that were not computed again
    self.calls: list[dict[str, Any]] = []  # its calls, once it has ended

  def append(
    self, ids: Sequence[int], logprobs: Sequence[float], reason: str | None
  ) -> str:
    """Appends tokens; returns the text that became final.

    Args:
      ids: the new tokens.
      logprobs: one per new token.
      reason: the stop reason if these are the last tokens, as in
        `requests.Completion`; None = more follow.
    """
    assert self.finish is None, 'no token follows the end'
    window = self._window
    self.ids += ids
    self.logprobs += logprobs
    self.finish = reason and FINISH[reason]
    if self.finish is None:
      text, self._window = self._more(window, len(self.ids))
    else:
      text = self._decode(self.ids)[len(self.text) + len(self._held) :]
    text = self._held + text
    if (match := self._match(text)) is not None:
      # The fewest tokens whose text has a match.
      for count in range(len(self.ids) - len(ids) + 1, len(self.ids)):
        shorter = self._held + self._more(window, count)[0]
        if (earlier := self._match(shorter)) is not None:
          del self.ids[count:], self.logprobs[count:]
          text, match = shorter, earlier
          break
      self.finish = 'stop'
      end, self.stop = match
    else:
      held = (
        size
        for stop in self._stops
        for size in range(1, len(stop))
        if text.endswith(stop[:size])
      )
      end = len(text) - (0 if self.finish else max(held, default=0))
    self._held = text[end:]
    self.text += text[:end]
    return text[:end]

  def _more(self, window: _Window, count: int) -> tuple[str, _Window]:
    """Returns the text that became final with `count` tokens, and the window.

    Args:
      window: the window before.
      count: tokens of the choice to read.
    """
    decoded = self._decode(self.ids[window.start : count])
    final = decoded.rstrip(_REPLACEMENT)
    # A decoder may revise earlier text; wait until it repeats it.
    if not final.startswith(window.text):
      return '', window
    new = final[len(window.text) :]
    if not new or len(final) < len(decoded):
      return new, window._replace(text=final)
    # The new tokens have text of their own: they are context enough.
    context = self._decode(self.ids[window.last : count])
    return new, _Window(window.last, count, context)

  def _match(self, text: str) -> tuple[int, str] | None:
    """Returns (start, string) of the stop string that starts first, if any."""
    places = ((text.find(stop), stop) for stop in self._stops)
    return min((x for x in places if x[0] >= 0), default=None)


async def reward(ids: np.ndarray, engine: worker.Worker) -> float:
  """Scores a sequence, i32[T], by a reward model, at its last token.

  Raises:
    Full: too many jobs are open.
    Refused: scoring failed.
  """
  loop, events = asyncio.get_running_loop(), asyncio.Queue()

  def notify(_, event):  # in the worker's thread
    loop.call_soon_threadsafe(events.put_nowait, event)

  job = worker.ScoreJob(notify, 0, engine.policy, ids, 1.0)
  engine.accept([job])
  try:
    event = await events.get()
  finally:
    engine.drop([job])
  if isinstance(event, worker.Failed):
    raise protocol.Refused(event.status, event.message)
  return event


class Call:
  """One request and its response; belongs to one event loop."""

  def __init__(self, request: protocol.ApiRequest, engine: worker.Worker):
    """Submits the jobs.

    Args:
      request: the parsed request.
      engine: samples and scores.

    Raises:
      Full: too many jobs are open.
    """
    self._request, self._worker = request, engine
    kind = 'chatcmpl' if request.chat else 'cmpl'
    self._id = f'{kind}-{secrets.token_hex(12)}'
    self._created = int(time.time())
    self._text_of = functools.cache(self._token_text)
    self._loop, self._events = asyncio.get_running_loop(), asyncio.Queue()
    self._choices = [
      Detokenizer(engine.policy.text, request.stop)
      for _ in range(len(request.prompts) * request.n)
    ]
    # Prompt i has the key -1 - i, if it is scored. Choice i, after its prompt,
    # has the key i, if alternatives are requested.
    self._scores: dict[int, worker.TokenLogprobs] = {}
    jobs: list[worker.Job] = []
    for i, prompt in enumerate(request.prompts):
      if request.scores_prompt:
        jobs.append(self._score_job(-1 - i, prompt.ids))
      for choice in range(request.n):
        index = i * request.n + choice
        if not request.max_tokens[i]:
          self._choices[index].append([], [], 'max_tokens')
          continue
        # The same seed, prompt and index of the choice give the same draws,
        # whatever the other fields of the request are.
        key = secrets.randbits(63)
        if request.seed is not None:
          data = f'{request.seed} {choice} '.encode()
          data += prompt.ids.astype('<i4').tobytes()
          key = int(hashlib.sha256(data).hexdigest()[:16], 16) >> 1
        engine_request = requests.Request(
          -1,
          prompt.ids,
          request.max_tokens[i],
          request.stop_ids,
          request.sampling,
          key=key,
        )
        streamed = request.stream or bool(request.stop)
        jobs.append(
          worker.SampleJob(
            self._notify, index, engine.policy, engine_request, streamed
          )
        )
    engine.accept(jobs)
    self._open = set(jobs)

  def close(self) -> None:
    """Drops the open jobs."""
    self._worker.drop(self._open)
    self._open = set()

  async def finished(self) -> dict[str, Any]:
    """Waits for all jobs; returns the response.

    Raises:
      Refused: the engine failed.
    """
    request = self._request
    async for _ in self._steps():
      pass
    if request.logprobs:
      scored = [
        self._score_job(
          i, np.append(request.prompts[i // request.n].ids, choice.ids)
        )
        for i, choice in enumerate(self._choices)
        if choice.ids
      ]
      self._worker.accept(scored, more=True)
      self._open.update(scored)
      async for _ in self._steps():
        pass
    body = self._envelope('chat.completion')
    body['choices'] = []
    for index in range(len(self._choices)):
      prompt = request.prompts[index // request.n]
      scores = self._scores.get(-1 - index // request.n)
      choice = self._choice(index, prompt, scores)
      body['choices'].append(choice)
      fields = body if request.chat else choice  # a chat has one prompt
      if request.return_token_ids:
        fields['prompt_token_ids'] = prompt.ids.tolist()
      if request.prompt_logprobs is not None:
        fields['prompt_logprobs'] = self._prompt_logprobs(prompt, scores)
    body['usage'] = self._usage()
    return body

  async def chunks(self) -> AsyncIterator[dict[str, Any]]:
    """Yields the chunks of a streamed response.

    Raises:
      Refused: the engine failed.
    """
    request = self._request
    for index in range(len(self._choices)):
      prompt = request.prompts[index // request.n]
      field = {'text': prompt.text if request.echo else ''}
      if request.chat:
        field = {'delta': {'role': 'assistant', 'content': ''}}
      chunk = self._chunk(index, field)
      if request.return_token_ids:
        parent = chunk if request.chat else chunk['choices'][0]
        parent['prompt_token_ids'] = prompt.ids.tolist()
      if request.chat or request.echo or request.return_token_ids:
        yield chunk
    async for index, text in self._steps():
      choice = self._choices[index]
      tokens = request.logprobs is not None or request.return_token_ids
      if text or choice.finish or tokens and choice.ids[choice.sent_ids :]:
        yield self._more(index, text)
      if choice.finish and request.chat:  # alone, as in OpenAI's streams
        end = {'delta': {}, 'finish_reason': choice.finish}
        yield self._chunk(index, end)
    if request.include_usage:
      yield {**self._chunk(0, {}), 'choices': [], 'usage': self._usage()}

  def _notify(self, job: worker.Job, event: worker.Event) -> None:
    """Queues an event; called in the worker's thread."""
    with contextlib.suppress(RuntimeError):  # the event loop is closed
      self._loop.call_soon_threadsafe(self._events.put_nowait, (job, event))

  def _score_job(self, index: int, ids: np.ndarray) -> worker.ScoreJob:
    policy, temperature = self._worker.policy, self._request.temperature
    return worker.ScoreJob(
      self._notify, index, policy, ids.astype(np.int32), temperature
    )

  async def _steps(self) -> AsyncIterator[tuple[int, str]]:
    """Yields (index of the choice, new text) until all jobs are finished."""
    for index, choice in enumerate(self._choices):
      if choice.finish:  # max_tokens is 0
        yield index, ''
    while self._open:
      job, event = await self._events.get()
      if job not in self._open:
        continue
      if isinstance(event, worker.Failed):
        self._open.discard(job)
        raise protocol.Refused(event.status, event.message)
      if isinstance(event, worker.TokenLogprobs):
        self._open.discard(job)
        self._scores[job.index] = event
        continue
      choice = self._choices[job.index]
      choice.cached = event.cached
      text = choice.append(event.ids, event.logprobs, event.stop_reason)
      if choice.finish:
        self._open.discard(job)
        self._worker.drop([job])  # a stop string may end it early
      yield job.index, text

  def _content(self, choice: Detokenizer) -> str:
    """Returns the text before a call, as far as it is known.

    At the end of a turn whose calls can all be read, they become its `calls`.
    """
    tools = self._request.prompts[0].tools
    if tools is None:
      return choice.text
    text = tools.turn + choice.text
    if choice.finish == 'stop':
      calls = tool_calls.parse(text, tools.format, tools.names)
      if calls and not any(x.error or x.name not in tools.names for x in calls):
        choice.finish = 'tool_calls'
        choice.calls = [
          {
            'id': f'call_{secrets.token_hex(12)}',
            'type': 'function',
            'function': {
              'name': call.name,
              'arguments': json.dumps(call.arguments, ensure_ascii=False),
            },
          }
          for call in (calls if tools.parallel else calls[:1])
        ]
    if choice.finish in ('stop', 'length'):
      return choice.text
    end = tool_calls.start(text, tools.format, tools.names)
    return choice.text[: max(end - len(tools.turn), 0)]

  def _usage(self) -> dict[str, Any]:
    """Returns token counts; a prompt counts once, whatever n is."""
    cached = sum(x.cached for x in self._choices[:: self._request.n])
    prompt = sum(len(prompt.ids) for prompt in self._request.prompts)
    sampled = sum(len(choice.ids) for choice in self._choices)
    return {
      'prompt_tokens': prompt,
      'completion_tokens': sampled,
      'total_tokens': prompt + sampled,
      'prompt_tokens_details': {'cached_tokens': cached},
    }

  def _more(self, index: int, text: str) -> dict[str, Any]:
    """Returns the chunk of new text, and of the tokens that are not sent."""
    choice = self._choices[index]
    start, choice.sent_ids = choice.sent_ids, len(choice.ids)
    fields: dict[str, Any] = {'text': text, 'finish_reason': choice.finish}
    if self._request.chat:
      content = self._content(choice)
      text = content[choice.sent :]
      choice.sent += len(text)
      delta: dict[str, Any] = {'content': text} if text else {}
      if choice.calls:
        delta['tool_calls'] = [
          {'index': i, **call} for i, call in enumerate(choice.calls)
        ]
      fields = {'delta': delta}
    ids, logprobs = choice.ids[start:], choice.logprobs[start:]
    fields['logprobs'] = self._logprobs(ids, logprobs, None)
    if self._request.return_token_ids:
      fields['token_ids'] = ids
    return self._chunk(index, fields)

  def _envelope(self, kind: str) -> dict[str, Any]:
    """Returns the fields of all responses; `kind`: the name of a chat's."""
    return {
      'id': self._id,
      'object': kind if self._request.chat else 'text_completion',
      'created': self._created,
      'model': self._worker.name,
      'system_fingerprint': FINGERPRINT,
    }

  def _chunk(self, index, fields):
    body = {'index': index, 'logprobs': None, 'finish_reason': None, **fields}
    chunk = {**self._envelope('chat.completion.chunk'), 'choices': [body]}
    return {**chunk, 'usage': None} if self._request.include_usage else chunk

  def _choice(
    self, index: int, prompt: protocol.Prompt, prompt_scores: Any
  ) -> dict[str, Any]:
    request, choice = self._request, self._choices[index]
    content = self._content(choice)
    stops = choice.ids[-1:] if choice.finish != 'length' else []
    body = {
      'index': index,
      'finish_reason': choice.finish,
      # As in vLLM: the string, or the token, that ended the choice.
      'stop_reason': choice.stop or next(iter(stops), None),
    }
    if request.return_token_ids:
      body['token_ids'] = choice.ids
    # [(id, logprob), ...] per sampled token, if they are requested.
    ids, logprobs, tops = choice.ids, choice.logprobs, None
    if request.logprobs:
      start, end = len(prompt.ids), len(prompt.ids) + len(ids)
      tops = ids and _tops(self._scores[index], request.logprobs, start, end)
    if request.chat:
      message = {'role': 'assistant', 'content': content, 'refusal': None}
      if choice.calls:
        message |= {'content': content or None, 'tool_calls': choice.calls}
      body['message'] = message
    else:
      body['text'] = prompt.text * request.echo + choice.text
    if request.echo and request.logprobs is not None:
      ids = prompt.ids.tolist() + ids
      logprobs = [None, *prompt_scores.logprobs[1:].tolist(), *logprobs]
      if tops is not None:
        before = _tops(prompt_scores, request.logprobs, 0, len(prompt.ids))
        tops = [None, *before[1:], *tops]
    body['logprobs'] = self._logprobs(ids, logprobs, tops)
    return body

  def _token_name(self, token: int) -> str:
    if self._request.tokens_as_ids:
      return f'token_id:{token}'
    return self._text_of(token)

  def _token_text(self, token: int) -> str:
    """Returns the text of a single token; the name of a special token."""
    policy = self._worker.policy
    text, renderer = policy.text([token]), policy.renderer
    if not text and renderer:
      text = renderer.tokenizer.text(token) or ''
    return text

  def _logprobs(self, ids, logprobs, tops) -> dict[str, Any] | None:
    """Returns the `logprobs` of a choice, if they are requested.

    Args:
      ids: tokens.
      logprobs: one per token.
      tops: alternatives [(id, logprob), ...] per token; None = none.
    """
    if self._request.logprobs is None:
      return None
    if self._request.chat:
      return self._chat_logprobs(ids, logprobs, tops or [[]] * len(ids))
    # Offsets are into the text.
    names = [self._token_name(token) for token in ids]
    offset, offsets = 0, []
    for token in ids:
      offsets.append(offset)
      offset += len(self._text_of(token))
    top_logprobs = None
    if tops is not None:
      top_logprobs = [
        entry and {self._token_name(i): x for i, x in [*entry, (token, own)]}
        for token, own, entry in zip(ids, logprobs, tops, strict=True)
      ]
    return {
      'tokens': names,
      'token_logprobs': logprobs,
      'top_logprobs': top_logprobs,
      'text_offset': offsets,
    }

  def _chat_logprobs(self, ids, logprobs, tops) -> dict[str, Any]:
    """Returns the `logprobs` of chat completions."""
    renderer = self._worker.policy.renderer
    assert renderer is not None, 'a chat has a tokenizer'

    def entry(token: int, logprob: float) -> dict[str, Any]:
      data = list(tokenizers.token_bytes(renderer.tokenizer, token))
      name = self._token_name(token)
      return {'token': name, 'logprob': logprob, 'bytes': data}

    return {
      'refusal': None,
      'content': [
        {**entry(token, own), 'top_logprobs': [entry(*x) for x in top]}
        for token, own, top in zip(ids, logprobs, tops, strict=True)
      ],
    }

  def _prompt_logprobs(self, prompt: protocol.Prompt, prompt_scores):
    """Returns vLLM's form: each token's entry, and those of the likeliest."""
    ids = prompt.ids.tolist()
    tops = _tops(prompt_scores, self._request.prompt_logprobs, 0, len(ids))
    logprobs, ranks = prompt_scores.logprobs, prompt_scores.ranks
    rows: list[Any] = [None]
    for place in range(1, len(ids)):
      own = (ids[place], float(logprobs[place]), int(ranks[place]))
      top = [(*x, rank) for rank, x in enumerate(tops[place], 1)]
      rows.append(
        {
          str(token): {
            'logprob': logprob,
            'rank': rank,
            'decoded_token': self._text_of(token),
          }
          for token, logprob, rank in [*top, own]
        }
      )
    return rows


def _tops(scored: worker.TokenLogprobs, count: int, start: int, end: int):
  """Returns [(id, logprob), ...] of the likeliest tokens, per place."""
  pairs = zip(
    scored.top_ids[start:end, :count].tolist(),
    scored.top_logprobs[start:end, :count].tolist(),
    strict=True,
  )
  return [list(zip(*pair, strict=True)) for pair in pairs]
