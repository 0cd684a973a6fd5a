"""A frozen model on an OpenAI-compatible server.

1. `Endpoint.check`: the server has the model, and its tokens are the policy's:
   logprobs of the wrong tokens look like any others.
2. `Endpoint.score`: logprobs of given tokens, as of a `scoring.Scorer`.
3. `Endpoint.sample`: completions of token ids; `Engine` runs episodes with it.
4. `Endpoint.chat`: replies to conversations, for judges.

Token in, token out: requests and responses have ids, and a response with a
number whose token is ambiguous is an error (`responses`). Whatever a server
answers, an error is an EndpointError, except that of `check`.

At most `concurrency` requests run at a time, each in a daemon thread, with a
time limit and a limit of the response's size. Redirects are not followed: the
key is for the named server alone. Status 429 and 5xx, an aborted response, and
no whole response are retried after a wait, `tries` times in all; every wait is
logged with the caller's name. Every other refusal is an error at once.

Axes: n tokens of a sequence.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.decode import requests
from posttrain.rollout import calls, responses, side_by_side
from posttrain.util import errors, watchdog

EndpointError = calls.EndpointError

LARGEST = 2**28  # bytes of an answer
_SHORTEST, _LONGEST = 1.0, 30.0  # seconds between tries
_LONGEST_RETRY_AFTER = 600.0  # seconds that a server may request
_NOT_IMPLEMENTED = 501  # permanent, unlike the other 5xx
_HINTS = {
  401: "; name the variable with the server's key in api_key_env",
  403: "; name the variable with the server's key in api_key_env",
  404: '; check name, and that base_url ends in /v1 (where the API begins)',
}
_PROBE_TOKENS = 16  # of the prompt that tests the temperature
_WITH_IDS = {'return_token_ids': True, 'return_tokens_as_token_ids': True}
# Fields that request the logprobs of a prompt, tried in this order. Our server
# accepts 0 sampled tokens; vLLM needs 1.
_FORMS = (
  (responses.prompt_logprobs, {'prompt_logprobs': 0, 'max_tokens': 0}),
  (responses.prompt_logprobs, {'prompt_logprobs': 0, 'max_tokens': 1}),
  (responses.echo, {'echo': True, 'logprobs': 1, 'max_tokens': 1}),
)
_UNFIT = (400, 422)  # statuses of servers that refuse a field
# Different tokenizers disagree about one of these: case, digits, space,
# accents, other scripts, characters beyond the basic plane, code.
_PROBE = (
  "The 1st of 20260 tokens\u2019 tests: na\u00efve  caf\u00e9s,\tdon't\n\n"
  'def f(x_i): return {"a": x_i ** 2 != 3.14}  # \u4f60\u597d '
  '\u041f\u0440\u0438\u0432\u0435\u0442 \u0645\u0631\u062d\u0628\u0627 '
  '\U0001f642\u221e'
)


class Endpoint:
  """A thread-safe client of one model on a server."""

  def __init__(
    self,
    cfg: schema.Endpoint,
    caller: str,
    *,
    vocab_size: int = 2**31 - 1,
    transport: httpx.BaseTransport | None = None,
    sleep: Callable[[float], object] | None = None,
  ):
    """Makes a client; sends nothing yet.

    Args:
      cfg: the server and the model.
      caller: the caller's name in logs and errors, as in 'environment sums'; a
        method's own `caller` replaces it.
      vocab_size: rows of the policy's embedding; sampled ids are below it.
      transport: carries the requests; None = the network.
      sleep: waits for some seconds; None = a wait that `close` ends.

    Raises:
      ValueError: the address is invalid, or the environment variable has no
        valid API key.
    """
    self._cfg, self._caller, self._vocab_size = cfg, caller, vocab_size
    self._closed = threading.Event()
    self._sleep = sleep or self._closed.wait
    # Neither errors of the library may show: the key, the address's password.
    headers, key = {}, os.environ.get(cfg.api_key_env, '')
    if cfg.api_key_env:
      if not (key and key.isascii() and key.isprintable() and ' ' not in key):
        raise ValueError(
          'api_key_env must name an environment variable with a key, without '
          f'spaces: got {cfg.api_key_env!r}, which is '
          f'{"no key" if key else "not set"}'
        )
      headers['Authorization'] = f'Bearer {key}'
    try:
      url = httpx.URL(cfg.base_url)
    except httpx.InvalidURL:
      raise ValueError(f'base_url must be valid: got {cfg.address}') from None
    self._http = httpx.Client(
      headers=headers,
      auth=(url.username, url.password) if url.userinfo else None,
      transport=transport,
      timeout=cfg.timeout,
      limits=httpx.Limits(max_connections=cfg.concurrency),
    )
    self._slots = threading.Semaphore(cfg.concurrency)
    # The entry of `_FORMS` that the server supports, once it is known; the
    # temperatures that it was checked to score at.
    self._form: Any = None
    self._temperatures, self._probing = {1.0}, threading.Lock()

  def __str__(self) -> str:
    return str(self._cfg)

  def close(self) -> None:
    """Closes idle connections; calls that wait get an error."""
    self._closed.set()
    self._http.close()

  def check(self, renderer: rendering.Renderer) -> None:
    """Checks that the server has the model and the policy's tokens.

    `posttrain.serve` publishes the fingerprint of its tokenizer and template;
    other servers tokenize a probe. Logs a warning if neither is possible.

    Args:
      renderer: the policy's renderer.

    Raises:
      ValueError: no model of that name, or other tokens.
      EndpointError: the server does not answer, or not in this form.
    """
    cfg = self._cfg
    models = self._read(responses.models, f'{cfg.address}/models')
    if not cfg.name and len(models) == 1:
      self._cfg = cfg = dataclasses.replace(cfg, name=next(iter(models)))
    if cfg.name not in models:
      raise ValueError(
        f'name must be that of a model that {cfg.address} serves: got '
        f'{cfg.name!r}, expected one of {errors.quote(list(models))}'
      )
    got, expected = models[cfg.name].get('tokenizer'), renderer.fingerprint
    if got is None:
      got, expected = self._probe(renderer)
    if got != expected:
      raise ValueError(
        f'tokenizer and chat template of {cfg} must be those of the policy: '
        f'got {errors.quote(got, 80)}, expected {errors.quote(expected, 80)}'
      )

  def _probe(
    self, renderer: rendering.Renderer
  ) -> tuple[list[list[int]], list[list[int]]]:
    """Returns the server's and the policy's ids of a few texts."""
    url = self._cfg.address.removesuffix('/v1') + '/tokenize'
    texts = (_PROBE, *map(renderer.tokenizer.text, renderer.stop_ids))
    texts = [text for text in texts if text]  # a stop token may have none
    body = {'model': self._cfg.name, 'add_special_tokens': False}
    try:
      ids = [
        self._read(responses.tokens, url, {**body, 'prompt': text})
        for text in texts
      ]
    except EndpointError as error:
      if error.status is None:
        raise
      logging.getLogger('absl').warning(
        f'NOT CHECKED that the tokens of {self} are those of the policy: if '
        f'they differ, all its logprobs are wrong; {error}'
      )
      return [], []
    return ids, [list(renderer.tokenizer.encode_scaffold(x)) for x in texts]

  def score(
    self,
    sequences: Sequence[tuple[np.ndarray, float]],
    caller: str | None = None,
  ) -> list[np.ndarray]:
    """Returns the logprob of every token given the tokens before it.

    log softmax(logits[t - 1] / temperature)[ids[t]].

    Args:
      sequences: (ids, temperature) of each; i32[n], > 0.
      caller: the caller's name in logs and errors.

    Returns:
      One f32[n] per sequence, in nats; entry 0 is 0.

    Raises:
      EndpointError: the server does not answer, does not score prompts, or
        ignores the temperature, or its response does not match the ids.
    """
    jobs = [(ids, float(temperature), caller) for ids, temperature in sequences]
    for job in jobs:
      self._check_temperature(*job)
    return self._each(self._score, jobs)

  def sample(
    self, request: requests.Request, caller: str | None = None, seed: int = 0
  ) -> concurrent.futures.Future:
    """Samples a completion of a request's ids.

    Args:
      request: the ids, stop ids and sampling options.
      caller: the caller's name in logs and errors.
      seed: the seed of the draws, below 2**31.

    Returns:
      The future of a `requests.Completion` with version -1. Its logprobs are
      the server's: some servers return those of temperature 1 at any other.
    """
    sampling = request.sampling
    body = {
      'model': self._cfg.name,
      'prompt': request.ids.tolist(),
      'max_tokens': request.max_tokens,
      'seed': seed,
      'logprobs': 0,  # of the sampled tokens, and no alternatives
      'stop_token_ids': list(request.stop_ids),
      # All explicit: the server would fill missing fields with the defaults of
      # the model's files.
      'ignore_eos': True,
      'temperature': sampling.temperature,
      'top_k': sampling.top_k,
      'top_p': sampling.top_p,
      'min_p': sampling.min_p,
      'repetition_penalty': 1.0,
      **_WITH_IDS,
    }
    return side_by_side.thread(
      self._read,
      lambda x: responses.completion(x, request, self._vocab_size),
      f'{self._cfg.address}/completions',
      body,
      caller,
      slots=self._slots,
    )

  def chat(
    self,
    conversations: Sequence[types.Messages],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    caller: str | None = None,
  ) -> list[str]:
    """Returns the model's reply to each conversation.

    Args:
      conversations: messages that precede the reply.
      max_tokens: the most tokens of a reply.
      temperature: 0 = greedy.
      caller: the caller's name in logs and errors.

    Raises:
      EndpointError: the server does not answer, refuses, or answers no text.
    """
    url = f'{self._cfg.address}/chat/completions'
    options = {'max_tokens': max_tokens, 'temperature': temperature}
    options['model'] = self._cfg.name
    bodies = [
      {'messages': [dict(message) for message in messages], **options}
      for messages in conversations
    ]
    return self._each(
      self._read, [(responses.text, url, body, caller) for body in bodies]
    )

  def _score(
    self, ids: np.ndarray, temperature: float, caller: str | None
  ) -> np.ndarray:
    """Returns f32[n] of a sequence."""
    if len(ids) < 2:
      return np.zeros(len(ids), np.float32)
    known, refusal = self._form, ''  # another thread may set it meanwhile
    for form in _FORMS if known is None else (known,):
      read, fields = form
      body = {
        'model': self._cfg.name,
        'prompt': ids.tolist(),
        'temperature': temperature,
        **fields,
        **_WITH_IDS,
      }
      try:
        logprobs = self._read(
          functools.partial(read, ids=ids),
          f'{self._cfg.address}/completions',
          body,
          caller,
        )
      except EndpointError as error:
        if known is not None or error.status not in _UNFIT:
          raise
        refusal = f'; {error}'
        continue
      if logprobs is not None:
        self._form = form
        return logprobs
    raise EndpointError(
      f'{self} must score prompts by prompt_logprobs or echo: got none{refusal}'
      '; use posttrain.serve or vLLM',
      200,
    )

  def _check_temperature(
    self, ids: np.ndarray, temperature: float, caller: str | None
  ) -> None:
    """Raises EndpointError if the server ignores the temperature."""
    with self._probing:
      if temperature in self._temperatures or len(ids) < 2:
        return
      ids = np.resize(ids, _PROBE_TOKENS)
      plain = np.float64(self._score(ids, 1.0, caller)[1:])
      tempered = self._score(ids, temperature, caller)[1:]
      spread = plain.std()
      if spread < 1e-4:
        return  # equal logprobs at any temperature: undecidable
      # d logprob / d(1 / T) = logit - mean logit: its size is about that of
      # the spread. A tenth of that is far above rounding.
      expected = abs(1 - 1 / temperature) * spread
      if np.abs(tempered - plain).mean() < 0.1 * expected:
        raise EndpointError(
          f'{self} must score at the temperature {temperature:.4g}: got the '
          "logprobs of 1; set the sampler's to 1, or use posttrain.serve",
          200,
        )
      self._temperatures.add(temperature)

  def _each(
    self, fn: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]
  ) -> list[Any]:
    """Calls a function with the arguments of each job; returns the results.

    Raises the first error in the order of jobs, and drops the calls that have
    not begun.
    """
    slots = self._slots
    futures = [side_by_side.thread(fn, *job, slots=slots) for job in jobs]
    try:
      return [future.result() for future in futures]
    finally:
      for future in futures:
        future.cancel()

  def _read(
    self,
    read: Callable[[dict[str, Any]], Any],
    url: str,
    body: dict[str, Any] | None = None,
    caller: str | None = None,
  ) -> Any:
    """Returns what a function reads in the server's response.

    Args:
      read: a reader, see `responses`.
      url: the request's URL.
      body: sent as JSON, by POST; None = a GET.
      caller: the caller's name in logs and errors.

    Raises:
      EndpointError: the last try failed, the server refuses, or its response
        is too large or cannot be read.
    """
    cfg, caller = self._cfg, caller or self._caller
    for attempt in range(1, cfg.tries + 1):
      if self._closed.is_set():
        raise EndpointError(f'{cfg} must be open for {caller}: got closed')
      # 1. One try: its problem, if another may succeed.
      pause = 0.0
      try:
        with watchdog.waiting(lambda: f'{cfg} for {caller}'):
          response, data = self._exchange(url, body)
        status = response.status_code
        if status == 200:
          return read(json.loads(data))
        problem = f'status {status}: {message(data) or response.reason_phrase}'
        if status != 429 and (status < 500 or status == _NOT_IMPLEMENTED):
          raise EndpointError(
            f'{cfg} must accept the request of {caller} to {url}: got '
            f'{problem}{_HINTS.get(status, "")}',
            status,
          )
        with contextlib.suppress(ValueError):  # absent, or a date
          pause = float(response.headers.get('Retry-After', ''))
      except (httpx.HTTPError, OSError, responses.Aborted) as error:
        problem = errors.text(error) or type(error).__name__
      except ValueError as error:  # also no JSON
        text = f'{cfg} must {errors.text(error, 400)}'
        raise EndpointError(text, 200) from None
      except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise EndpointError(
          f'{cfg} must answer in the form of the OpenAI API: got '
          f'{errors.text(data[:4096].decode(errors="replace"))} '
          f'({errors.describe(error)}); check base_url',
          200,
        ) from None
      if attempt == cfg.tries:
        break
      # 2. The wait: at least Retry-After, since a server may always send 1
      # second; half of it is random, so that refused requests do not return
      # all at once.
      longest = min(_LONGEST, 2 * _SHORTEST * 2.0 ** min(attempt - 1, 16))
      pause = min(max(pause, 0.0), _LONGEST_RETRY_AFTER)
      pause = max(longest * random.uniform(0.5, 1), pause)
      logging.getLogger('absl').warning(
        f'{caller} waits for {cfg}: {problem}; try {attempt} of {cfg.tries}, '
        f'next in {pause:.3g} s'
      )
      with watchdog.waiting(lambda: f'{cfg} for {caller}, which was away'):
        self._sleep(pause)
    raise EndpointError(
      f'{cfg} must answer {caller}: got {problem} at the last of {cfg.tries} '
      'tries; start the server, check base_url, or raise timeout or tries'
    )

  def _exchange(
    self, url: str, body: dict[str, Any] | None
  ) -> tuple[httpx.Response, bytes]:
    """Returns the response and its body, decoded."""
    method, data = 'GET' if body is None else 'POST', bytearray()
    end = time.monotonic() + self._cfg.timeout
    with self._http.stream(method, url, json=body) as response:
      for piece in response.iter_bytes():
        data += piece
        if len(data) > LARGEST:
          raise EndpointError(
            f'{self} must answer with at most {LARGEST} bytes: got more',
            response.status_code,
          )
        if time.monotonic() > end:
          raise httpx.ReadTimeout(f'no answer within {self._cfg.timeout:g} s')
    return response, bytes(data)


def message(data: bytes) -> str:
  """Returns the error message of a refusal; servers use several forms."""
  text: Any = data[:4096].decode(errors='replace')
  with contextlib.suppress(ValueError):
    text = json.loads(data)
  for key in ('error', 'message', 'detail'):
    if isinstance(text, dict) and text.get(key):
      text = text[key]
  return '' if str(text).startswith('<') else errors.text(text)  # no HTML


class Engine:
  """The `episodes.Engine` of one environment; not thread-safe.

  The server keeps no state between turns: the tokens of a held sequence are
  kept here, and each turn sends the whole sequence. (A server may cache
  prefixes.)
  """

  def __init__(
    self, endpoint: Endpoint, caller: str | None = None, seed: int = 0
  ):
    """Makes an engine without requests.

    Args:
      endpoint: the client of the model.
      caller: the caller's name in logs and errors, as in 'environment sums'.
      seed: the seed of all draws, with a request's id and the length of its
        prompt.
    """
    self._endpoint, self._caller, self._seed = endpoint, caller, seed
    self._requests: dict[int, requests.Request] = {}  # with all ids so far
    # By request id, in the order of submission.
    self._running: dict[int, concurrent.futures.Future] = {}

  def submit(self, request: requests.Request) -> None:
    """Requests a completion."""
    assert request.id not in self._requests, 'request ids are unique'
    self._start(request)

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Appends tokens to a held sequence and requests its next completion."""
    assert id not in self._running, 'only a stopped sequence is extended'
    request = self._requests[id]
    ids = np.concatenate([request.ids, np.asarray(ids, np.int32)])
    self._start(dataclasses.replace(request, ids=ids, max_tokens=max_tokens))

  def poll(self) -> list[requests.Completion]:
    """Waits until a request stops; returns all stopped ones, oldest first.

    Raises:
      EndpointError: the server does not answer, or invalidly; then no request
        is in flight.
    """
    if not self._running:
      return []
    try:
      side_by_side.wait(self._running.values())
      completions = [
        self._running.pop(id).result()
        for id, future in list(self._running.items())
        if future.done()
      ]
    except BaseException:
      self.drop()
      raise
    for completion in completions:
      request = self._requests.pop(completion.id)
      if request.hold:
        ids = np.concatenate([request.ids, completion.ids])
        held = dataclasses.replace(request, ids=ids)
        self._requests[completion.id] = held
    return completions

  @property
  def futures(self) -> list[concurrent.futures.Future]:
    """The completions in flight, for one of which `poll` waits."""
    return list(self._running.values())

  def release(self, id: int) -> None:
    """Removes a held sequence."""
    del self._requests[id]

  def _start(self, request: requests.Request) -> None:
    self._requests[request.id] = request
    entropy = [self._seed, request.id, len(request.ids)]
    (word,) = np.random.SeedSequence(entropy).generate_state(1)
    self._running[request.id] = self._endpoint.sample(
      request, self._caller, int(word) >> 1
    )

  def drop(self) -> None:
    """Removes all requests: their episodes have failed."""
    for future in self._running.values():
      future.cancel()
    self._running.clear()
    self._requests.clear()
