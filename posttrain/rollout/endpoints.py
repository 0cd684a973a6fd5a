"""A frozen model on an OpenAI-compatible server.

1. `check`: the server has the model, and its tokens are the policy's: logprobs
   of the wrong tokens look like any others.
2. `score`: logprobs of given tokens, as `scoring.Scorer` computes them.
3. `sample`: completions of token ids; `Engine` runs episodes with it.
4. `chat`: replies to conversations, for judges.

Token in, token out: requests and responses have ids, and a response with a
number whose token is ambiguous is an error (`responses`). Requests to a server
that is away are repeated (`http`). Whatever a server answers, an error is an
EndpointError, except that of `check`.

Axes: n tokens of a sequence.
"""

import concurrent.futures
import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np

from posttrain import schema, types
from posttrain.chat import rendering
from posttrain.decode import requests
from posttrain.rollout import http, responses, side_by_side
from posttrain.util import errors

EndpointError = http.EndpointError

_PROBE_TOKENS = 16  # of the prompt that tests the temperature
_WITH_IDS = {'return_token_ids': True, 'return_tokens_as_token_ids': True}
# Fields that request the logprobs of a prompt, tried in this order. Our server
# accepts 0 sampled tokens; vLLM needs 1.
_FORMS = (
  (responses.prompt_logprobs, {'prompt_logprobs': 0, 'max_tokens': 0}),
  (responses.prompt_logprobs, {'prompt_logprobs': 0, 'max_tokens': 1}),
  (responses.echo, {'echo': True, 'logprobs': 1, 'max_tokens': 1}),
  (responses.echo, {'echo': True, 'logprobs': 1, 'max_tokens': 0}),
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
    transport: httpx.AsyncBaseTransport | None = None,
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
      ValueError: the environment variable has no valid API key.
    """
    self._cfg, self._caller, self._vocab_size = cfg, caller, vocab_size
    self._client = http.Client(cfg, transport=transport, sleep=sleep)
    # The entry of `_FORMS` that the server supports, once it is known; the
    # temperatures that it was checked to score at.
    self._form: Any = None
    self._temperatures, self._probing = {1.0}, threading.Lock()

  def __str__(self) -> str:
    return str(self._cfg)

  def close(self) -> None:
    """Closes the connections; calls that wait get an error."""
    self._client.close()

  def check(
    self, renderer: rendering.Renderer, caller: str | None = None
  ) -> None:
    """Checks that the server has the model and the policy's tokens.

    `posttrain.serve` publishes the fingerprint of its tokenizer and template;
    other servers tokenize a probe. Logs a warning if neither is possible.

    Args:
      renderer: the policy's renderer.
      caller: the caller's name in logs and errors.

    Raises:
      ValueError: no model of that name, or other tokens.
      EndpointError: the server does not answer, or not in this form.
    """
    cfg, caller = self._cfg, caller or self._caller
    answer = self._client.request(f'{cfg.address}/models', None, caller)
    entries = answer.get('data')
    if not isinstance(entries, list) or not all(
      isinstance(entry, dict) and isinstance(entry.get('id'), str)
      for entry in entries
    ):
      raise EndpointError(
        f'{cfg} must list models with an id each, in data of /models: got '
        f'{errors.quote(entries)}',
        200,
      )
    models = {entry['id']: entry for entry in entries}
    if cfg.name not in models:
      raise ValueError(
        f'name must be that of a model that {cfg.address} serves: got '
        f'{cfg.name!r}, expected one of {errors.quote(list(models))}'
      )
    fingerprint = models[cfg.name].get('tokenizer')
    if fingerprint is None:
      obstacle = self._check_tokens(renderer, caller)
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
        f'got fingerprint {errors.text(fingerprint, 12)}, expected '
        f'{renderer.fingerprint[:12]}; serve the model with the tokenizer of '
        'this run, or use a model that shares it'
      )

  def _check_tokens(
    self, renderer: rendering.Renderer, caller: str
  ) -> str | None:
    """Compares the ids of a probe; returns the obstacle if it cannot."""
    url = self._cfg.address.removesuffix('/v1') + '/tokenize'
    tokenizer = renderer.tokenizer
    for text in (_PROBE, *map(tokenizer.text, renderer.stop_ids)):
      if not text:
        continue  # a stop token without text
      body = {'prompt': text, 'add_special_tokens': False}
      body['model'] = self._cfg.name
      try:
        response = self._client.request(url, body, caller)
      except EndpointError as error:
        if error.status is None:
          raise
        return str(error)
      actual = response.get('tokens')
      expected = list(tokenizer.encode_scaffold(text))
      if not actual or not isinstance(actual, list):
        return f'got {errors.quote(response)} for the tokens of a text'
      if actual != expected:
        raise ValueError(
          f'tokenizer of {self._cfg} must be that of the policy: got '
          f'{errors.quote(actual[:8])} of {len(actual)} ids for {text!r}, '
          f'expected {expected[:8]} of {len(expected)}; use a model that '
          'shares the tokenizer'
        )
    return None

  def score(
    self,
    ids: Sequence[np.ndarray],
    temperatures: Sequence[np.ndarray],
    caller: str | None = None,
  ) -> list[np.ndarray]:
    """Returns the logprob of every token given the tokens before it.

    log softmax(logits[t - 1] / temperatures[t])[ids[t]], by one request per
    distinct temperature of a sequence.

    Args:
      ids: one i32[n] per sequence.
      temperatures: one f32[n] per sequence, > 0.
      caller: the caller's name in logs and errors.

    Returns:
      One f32[n] per sequence, in nats; entry 0 is 0.

    Raises:
      EndpointError: the server does not answer, does not score prompts, or
        ignores the temperature, or its response does not match the ids.
    """
    caller = caller or self._caller
    assert [len(i) for i in ids] == [len(t) for t in temperatures]
    jobs = [
      (index, float(temperature))
      for index, values in enumerate(temperatures)
      for temperature in np.unique(values[1:])
    ]
    assert all(temperature > 0 for _, temperature in jobs)
    for index, temperature in jobs:
      if temperature not in self._temperatures:
        self._check_temperature(ids[index], temperature, caller)
    scores = [np.zeros(len(sequence), np.float32) for sequence in ids]
    results = self._client.each(
      self._score, [(ids[index], t, caller) for index, t in jobs]
    )
    for (index, temperature), logprobs in zip(jobs, results, strict=True):
      place = np.asarray(temperatures[index]) == np.float32(temperature)
      place[0] = False
      scores[index][place] = logprobs[place]
    return scores

  def sample(
    self,
    request: requests.Request,
    prompt: np.ndarray,
    max_tokens: int,
    caller: str | None = None,
    seed: int = 0,
  ) -> concurrent.futures.Future:
    """Samples a completion of a prompt.

    Args:
      request: stop ids and sampling options.
      prompt: i32[n], instead of the request's own.
      max_tokens: instead of the request's own.
      caller: the caller's name in logs and errors.
      seed: the seed of the draws, below 2**31.

    Returns:
      The future of a `requests.Completion` with version -1. Its logprobs are
      the server's: some servers return those of temperature 1 at any other.
    """
    return self._client.submit(
      self._sample,
      request,
      np.asarray(prompt),
      max_tokens,
      caller or self._caller,
      seed,
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
    caller, options = (
      caller or self._caller,
      {'max_tokens': max_tokens, 'temperature': temperature},
    )
    return self._client.each(
      self._chat,
      [
        ([dict(message) for message in messages], options, caller)
        for messages in conversations
      ],
    )

  def _post(
    self, path: str, body: dict[str, Any], caller: str, tokens: int
  ) -> dict[str, Any]:
    url = f'{self._cfg.address}/{path}'
    body = {'model': self._cfg.name, **body}
    return self._client.request(url, body, caller, tokens)

  def _chat(self, messages, options, caller) -> str:
    body = {'messages': messages, **options}
    tokens = options['max_tokens']
    return responses.text(
      self._post('chat/completions', body, caller, tokens), str(self)
    )

  def _sample(
    self, request, prompt, max_tokens, caller, seed
  ) -> requests.Completion:
    sampling = request.sampling
    response = self._post(
      'completions',
      {
        'prompt': prompt.tolist(),
        'max_tokens': max_tokens,
        'seed': seed,
        'logprobs': 0,  # of the sampled tokens, and no alternatives
        'stop_token_ids': list(request.stop_ids),
        # All explicit: the server would fill missing fields with the defaults
        # of the model's files.
        'ignore_eos': True,
        'temperature': sampling.temperature,
        'top_k': sampling.top_k,
        'top_p': sampling.top_p,
        'min_p': sampling.min_p,
        'repetition_penalty': 1.0,
        **_WITH_IDS,
      },
      caller,
      len(prompt) + max_tokens,
    )
    return responses.completion(
      response, request, prompt, max_tokens, str(self), self._vocab_size
    )

  def _score(self, ids, temperature, caller) -> np.ndarray:
    """Returns f32[n] of a sequence at one temperature."""
    known, refusal = self._form, ''  # another thread may set it meanwhile
    for form in _FORMS if known is None else (known,):
      read, fields = form
      try:
        response = self._post(
          'completions',
          {
            'prompt': np.asarray(ids).tolist(),
            'temperature': temperature,
            **fields,
            **_WITH_IDS,
          },
          caller,
          len(ids) + 1,
        )
      except EndpointError as error:
        if known is not None or error.status not in _UNFIT:
          raise
        refusal = f'; {error}'
        continue
      logprobs = read(response, np.asarray(ids), str(self))
      if logprobs is not None:
        self._form = form
        return logprobs
    raise EndpointError(
      f'{self} must score the tokens of a prompt: got none for '
      f'prompt_logprobs, nor for echo with logprobs{refusal}; use a server '
      'that scores prompts, such as posttrain.serve or vLLM',
      status=200,
    )

  def _check_temperature(self, ids, temperature, caller) -> None:
    """Raises EndpointError if the server ignores the temperature."""
    with self._probing:
      if temperature in self._temperatures:
        return  # checked by another thread
      ids = np.resize(ids, _PROBE_TOKENS)
      plain, tempered = np.float64(
        self._client.each(
          self._score, [(ids, 1.0, caller), (ids, temperature, caller)]
        )
      )
      spread = plain[1:].std()
      if spread < 1e-4:
        return  # equal logprobs at any temperature: undecidable
      # d logprob / d(1 / T) = logit - mean logit: its size is about that of
      # the spread. A tenth of that is far above rounding.
      expected = abs(1 - 1 / temperature) * spread
      if np.abs(tempered - plain)[1:].mean() < 0.1 * expected:
        raise EndpointError(
          f'{self} must score prompts at the temperature of the request: got '
          f'the same logprobs at {temperature:.4g} as at 1; set the '
          "sampler's temperature to 1, or use a server that scores at the "
          'temperature, such as posttrain.serve',
          status=200,
        )
      self._temperatures.add(temperature)


@dataclasses.dataclass
class _Sequence:
  request: requests.Request
  ids: np.ndarray  # i32[n], all so far


class Engine:
  """The `episodes.Engine` of one environment; not thread-safe."""

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
    self._sequences: dict[int, _Sequence] = {}
    # By request id, in the order of submission.
    self._running: dict[int, concurrent.futures.Future] = {}

  def submit(self, request: requests.Request) -> None:
    """Requests a completion."""
    assert request.id not in self._sequences, 'request ids are unique'
    ids = np.asarray(request.ids, np.int32)
    self._sequences[request.id] = _Sequence(request, ids)
    self._start(request.id, request.max_tokens)

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Appends tokens to a held sequence and requests its next completion."""
    assert id not in self._running, 'only a stopped sequence is extended'
    sequence = self._sequences[id]
    sequence.ids = np.concatenate([sequence.ids, ids]).astype(np.int32)
    self._start(id, max_tokens)

  def poll(self) -> list[requests.Completion]:
    """Waits until a request stops; returns all stopped ones, oldest first.

    Raises:
      EndpointError: the server does not answer.
      ValueError: its response is invalid. After either no request is in flight.
    """
    if not self._running:
      return []
    try:
      side_by_side.wait(self._running.values())
      done = [id for id, future in self._running.items() if future.done()]
      return [self._stop(id, self._running.pop(id).result()) for id in done]
    except concurrent.futures.CancelledError as error:
      self.drop()
      text = f'{self._endpoint} must be open for {self._caller}: got closed'
      raise EndpointError(text) from error
    except BaseException:
      self.drop()
      raise

  @property
  def futures(self) -> list[concurrent.futures.Future]:
    """The completions in flight, for one of which `poll` waits."""
    return list(self._running.values())

  def release(self, id: int) -> None:
    """Removes a held sequence."""
    del self._sequences[id]

  def _start(self, id: int, max_tokens: int) -> None:
    sequence = self._sequences[id]
    entropy = [self._seed, id, len(sequence.ids)]
    (word,) = np.random.SeedSequence(entropy).generate_state(1)
    self._running[id] = self._endpoint.sample(
      sequence.request, sequence.ids, max_tokens, self._caller, int(word) >> 1
    )

  def _stop(
    self, id: int, completion: requests.Completion
  ) -> requests.Completion:
    sequence = self._sequences[id]
    sequence.ids = np.concatenate([sequence.ids, completion.ids])
    if not sequence.request.hold:
      self.release(id)
    return completion

  def drop(self) -> None:
    """Removes all requests: their episodes have failed."""
    for future in self._running.values():
      future.cancel()
    self._running.clear()
    self._sequences.clear()
