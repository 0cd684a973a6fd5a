"""A frozen model behind an OpenAI-compatible server.

1. `check`: the server has the model, and its tokens are the policy's
   (`endpoint_check`).
2. `score`: logprobs of given tokens, as `scoring.Scorer` gives them.
3. `sample`: completions of token ids; `endpoint_engine` plays episodes by it.
4. `chat`: replies to conversations, as judges need them.

Token in, token out: ids are sent and ids come back, and an answer that leaves
open which token a number belongs to is an error (`endpoint_answers`). A server
that goes away is waited for (`endpoint_http`).

Axes: n tokens of a sequence.
"""

import concurrent.futures
import threading
from collections.abc import Callable, Sequence
from typing import Any

import httpx
import numpy as np

from posttrain import schema, types
from posttrain.chat import renderer as chat_lib
from posttrain.decode import requests
from posttrain.rollout.endpoint import answers, http
from posttrain.rollout.endpoint import check as endpoint_check

EndpointError = http.EndpointError

_PROBE_TOKENS = 16  # of the prompt that shows whether temperatures count
_ASK_FOR_IDS = {'return_token_ids': True, 'return_tokens_as_token_ids': True}
# Ways to ask for the logprobs of a prompt, tried in this order. Ours samples
# nothing where it need not; vLLM must.
_FORMS = (
  (answers.prompt_logprobs, {'prompt_logprobs': 0, 'max_tokens': 0}),
  (answers.prompt_logprobs, {'prompt_logprobs': 0, 'max_tokens': 1}),
  (answers.echo, {'echo': True, 'logprobs': 1, 'max_tokens': 1}),
  (answers.echo, {'echo': True, 'logprobs': 1, 'max_tokens': 0}),
)
_UNFIT = (400, 422)  # how servers refuse a field of a request


class Endpoint:
  """The client; threads may share it, and environments do."""

  def __init__(
    self,
    cfg: schema.Endpoint,
    who: str,
    *,
    transport: httpx.BaseTransport | None = None,
    sleep: Callable[[float], object] | None = None,
  ):
    """Asks for nothing yet.

    Args:
      cfg: which server and model.
      who: is named where the server is waited for, as in 'environment sums';
        every method takes another one for its call.
      transport: carries the requests; None = the network.
      sleep: waits so many seconds; None = in a way that `close` ends.

    Raises:
      ValueError: there is no API key where the config says.
    """
    self._cfg, self._who = cfg, who
    self._base = cfg.base_url.rstrip('/')
    self._client = http.Client(cfg, transport=transport, sleep=sleep)
    # The one of `_FORMS` that the server has scored in, if it has; the
    # temperatures that it was seen to score at.
    self._form: Any = None
    self._temperatures, self._probing = {1.0}, threading.Lock()

  def __str__(self) -> str:
    return str(self._cfg)

  def close(self) -> None:
    """Hangs up; who still waits gets an error."""
    self._client.close()

  def check(self, renderer: chat_lib.Renderer, who: str | None = None) -> None:
    """Makes sure that the server has the model, and reads ids as we do.

    Our own server says what its tokenizer and template are; others tokenize a
    probe. Where neither is to be had, a warning says so.

    Args:
      renderer: the policy's.
      who: waits for it.

    Raises:
      ValueError: no model of that name, or other tokens.
    """
    endpoint_check.check(self._client, self._cfg, renderer, who or self._who)

  def score(
    self,
    ids: Sequence[np.ndarray],
    temperatures: Sequence[np.ndarray],
    who: str | None = None,
  ) -> list[np.ndarray]:
    """Log probability of every token given those before it.

    log softmax(logits[t - 1] / temperatures[t])[ids[t]], by one request per
    temperature that a sequence's tokens have.

    Args:
      ids: one i32[n] per sequence.
      temperatures: one f32[n] per sequence, > 0.
      who: waits for it.

    Returns:
      One f32[n] per sequence, in nats; entry 0 is 0.

    Raises:
      ValueError: the server does not score prompts, or not at temperatures,
        or answers with something else; names the place.
      EndpointError: it does not answer.
    """
    who = who or self._who
    assert [len(i) for i in ids] == [len(t) for t in temperatures]
    jobs = [
      (index, float(temperature))
      for index, values in enumerate(temperatures)
      for temperature in np.unique(values[1:])
    ]
    assert all(temperature > 0 for _, temperature in jobs)
    for index, temperature in jobs:
      if temperature not in self._temperatures:
        self._check_temperature(ids[index], temperature, who)
    scored = [np.zeros(len(sequence), np.float32) for sequence in ids]
    answered = self._client.each(
      self._score, [(ids[index], t, who) for index, t in jobs]
    )
    for (index, temperature), logprobs in zip(jobs, answered, strict=True):
      place = np.asarray(temperatures[index]) == np.float32(temperature)
      place[0] = False
      scored[index][place] = logprobs[place]
    return scored

  def sample(
    self,
    request: requests.Request,
    prompt: np.ndarray,
    max_tokens: int,
    who: str | None = None,
    seed: int = 0,
  ) -> concurrent.futures.Future:
    """Samples what follows a prompt; `result()` waits for it.

    Args:
      request: stop tokens and law.
      prompt: i32[n], instead of the request's own.
      max_tokens: instead of the request's own.
      who: waits for it.
      seed: of the draws, below 2**31.

    Returns:
      The future of a `requests.Completion`, version -1. Its logprobs are as
      the server says them: some have those of temperature 1 at any other.
    """
    return self._client.submit(
      self._sample,
      request,
      np.asarray(prompt),
      max_tokens,
      who or self._who,
      seed,
    )

  def chat(
    self,
    conversations: Sequence[types.Messages],
    *,
    max_tokens: int = 64,
    temperature: float = 0.0,
    who: str | None = None,
  ) -> list[str]:
    """Returns the model's reply to each conversation.

    Args:
      conversations: each ends where the model is to speak.
      max_tokens: of a reply.
      temperature: 0 = greedy.
      who: waits for it.

    Raises:
      EndpointError: the server does not answer, or refuses.
    """
    who, options = (
      who or self._who,
      {'max_tokens': max_tokens, 'temperature': temperature},
    )
    return self._client.each(
      self._chat,
      [
        ([dict(message) for message in messages], options, who)
        for messages in conversations
      ],
    )

  def _post(self, path: str, body: dict[str, Any], who: str) -> dict[str, Any]:
    body = {'model': self._cfg.name, **body}
    return self._client.post(f'{self._base}/{path}', body, who)

  def _chat(self, messages, options, who) -> str:
    body = {'messages': messages, **options}
    return answers.text(self._post('chat/completions', body, who), str(self))

  def _sample(
    self, request, prompt, max_tokens, who, seed
  ) -> requests.Completion:
    law = request.sampling
    answer = self._post(
      'completions',
      {
        'prompt': prompt.tolist(),
        'max_tokens': max_tokens,
        'seed': seed,
        'logprobs': 0,  # of the sampled tokens, and no alternatives
        'stop_token_ids': list(request.stop_ids),
        # The law as it is written here, and not as the files of the model
        # would have it where a request is silent.
        'ignore_eos': True,
        'temperature': law.temperature,
        'top_k': law.top_k,
        'top_p': law.top_p,
        'min_p': law.min_p,
        'repetition_penalty': 1.0,
        **_ASK_FOR_IDS,
      },
      who,
    )
    return answers.completion(answer, request, prompt, max_tokens, str(self))

  def _score(self, ids, temperature, who) -> np.ndarray:
    """f32[n] of a sequence at one temperature, in the form that works."""
    known, refused = self._form, ''  # others may find it out meanwhile
    for form in _FORMS if known is None else (known,):
      read, fields = form
      try:
        answer = self._post(
          'completions',
          {
            'prompt': np.asarray(ids).tolist(),
            'temperature': temperature,
            **fields,
            **_ASK_FOR_IDS,
          },
          who,
        )
      except EndpointError as error:
        if known is not None or error.status not in _UNFIT:
          raise
        refused = f'; {error}'
        continue
      logprobs = read(answer, np.asarray(ids), str(self))
      if logprobs is not None:
        self._form = form
        return logprobs
    raise ValueError(
      f'{self} must score the tokens of a prompt: got none for '
      f'prompt_logprobs, nor for echo with logprobs{refused}; use a server '
      'that scores prompts, such as posttrain.serve or vLLM'
    )

  def _check_temperature(self, ids, temperature, who) -> None:
    """Refuses a server that scores at temperature 1 whatever it is told."""
    with self._probing:
      if temperature in self._temperatures:
        return  # another thread was here
      ids = np.resize(ids, _PROBE_TOKENS)
      plain, heated = np.float64(
        self._client.each(
          self._score, [(ids, 1.0, who), (ids, temperature, who)]
        )
      )
      spread = plain[1:].std()
      if spread < 1e-4:
        return  # every token has the same, at any temperature: no telling
      # d logprob / d(1 / T) = logit - mean logit: its size is about that of
      # the spread. A tenth of that is far above what rounding does.
      expected = abs(1 - 1 / temperature) * spread
      if np.abs(heated - plain)[1:].mean() < 0.1 * expected:
        raise ValueError(
          f'{self} must score prompts at the temperature of the request: got '
          f'the same logprobs at {temperature:.4g} as at 1; set the '
          "sampler's temperature to 1, or use a server that scores at the "
          'temperature, such as posttrain.serve'
        )
      self._temperatures.add(temperature)
