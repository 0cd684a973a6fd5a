"""An OpenAI-compatible server in this process: a law of token pairs."""

import dataclasses
import json
import threading

import httpx
import numpy as np

from posttrain import schema
from posttrain.rollout.endpoint import client

VOCAB = 512
LOGITS = np.random.default_rng(0).normal(0, 3, (VOCAB, VOCAB))


def truth(ids, temperatures):
  """log softmax(LOGITS[ids[t - 1]] / temperatures[t])[ids[t]]; 0 at t = 0."""
  logprobs = [0.0]
  for before, token, temperature in zip(
    ids[:-1], ids[1:], temperatures[1:], strict=True
  ):
    logits = LOGITS[before] / np.float64(temperature)
    logprobs.append(logits[token] - np.log(np.exp(logits).sum()))
  return np.array(logprobs)


@dataclasses.dataclass
class Server:
  """Answers as it is told to.

  `forms` are those it scores prompts in; what it does not know it ignores, or
  refuses if `strict`. `least` is the lowest `max_tokens` that it takes.
  `spoil` changes an answer's choice; `says` maps the end of a prompt to the
  choice that follows it.
  """

  forms: tuple = ('prompt_logprobs',)
  strict: bool = False
  least: int = 0
  tempered: bool = True
  spoil: object = lambda choice: choice
  says: dict = dataclasses.field(default_factory=dict)
  models: tuple = ({'id': 'teacher'},)
  tokenize: object = None
  chat: object = None
  # Raised, or returned, by the first requests.
  troubles: list = dataclasses.field(default_factory=list)
  bodies: list = dataclasses.field(default_factory=list)
  requests: list = dataclasses.field(default_factory=list)
  lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

  def __call__(self, request):
    body = json.loads(request.content or 'null')
    with self.lock:
      self.requests.append(request)
      self.bodies.append(body)
      trouble = self.troubles.pop(0) if self.troubles else None
    if isinstance(trouble, Exception):
      raise trouble
    if trouble is not None:
      return trouble
    answer = {
      '/v1/models': self._models,
      '/v1/completions': self._completions,
      '/v1/chat/completions': self.chat,
      '/tokenize': self.tokenize,
    }.get(request.url.path)
    if answer is None:
      return httpx.Response(404, json={'detail': 'Not Found'})
    answer = answer(body)
    return (
      answer
      if isinstance(answer, httpx.Response)
      # numpy's and json's NaN as they are: servers do write it.
      else httpx.Response(200, content=json.dumps(answer))
    )

  def _models(self, body):
    return {'object': 'list', 'data': list(self.models)}

  def _completions(self, body):
    for form in ('prompt_logprobs', 'echo'):
      if form in body and form not in self.forms and self.strict:
        error = {'error': {'message': f'unknown field {form}'}}
        return httpx.Response(400, json=error)
    if body['max_tokens'] < self.least:
      return httpx.Response(400, json={'message': 'max_tokens is too low'})
    if 'seed' in body:
      return {'choices': [self.spoil(self._say(body))]}
    ids = body['prompt']
    temperature = body['temperature'] if self.tempered else 1
    choice = {'text': '?', 'finish_reason': 'length', 'logprobs': None}
    values = truth(ids, np.full(len(ids), temperature))
    sampled = [7] * body['max_tokens']
    if 'prompt_logprobs' in body and 'prompt_logprobs' in self.forms:
      choice |= {'prompt_logprobs': _entries(ids, values)}
    if 'echo' in body and 'echo' in self.forms:
      choice |= {
        'logprobs': {
          'tokens': [f'token_id:{i}' for i in (*ids, *sampled)],
          'token_logprobs': [None, *values[1:], *([-0.5] * len(sampled))],
        }
      }
    usage = {'prompt_tokens': len(ids)}
    return {'choices': [self.spoil(choice)], 'usage': usage}

  def _say(self, body):
    """The completion of the longest key that the prompt ends with."""
    ends = [
      end
      for end in self.says
      if body['prompt'][len(body['prompt']) - len(end) :] == list(end)
    ]
    return dict(self.says[max(ends, key=len)])


def _entries(ids, values):
  """As vLLM writes them, with a likelier token in front of the actual one."""
  return [None] + [
    {
      str((token + 1) % VOCAB): {'logprob': -0.25, 'rank': 1},
      str(token): {'logprob': value, 'rank': 2},
    }
    for token, value in zip(ids[1:], values[1:].tolist(), strict=True)
  ]


def connect(server, sleeps=None, **options):
  """An endpoint of it that waits in no time; `sleeps` takes the seconds."""
  cfg = schema.Endpoint(
    name='teacher', base_url='http://there:8000/v1', **options
  )
  sleeps = [] if sleeps is None else sleeps
  return client.Endpoint(
    cfg,
    'environment sums',
    transport=httpx.MockTransport(server),
    sleep=sleeps.append,
  )
