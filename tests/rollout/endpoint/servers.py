"""An OpenAI-compatible server in this process, with bigram logits."""

import dataclasses
import json
import threading

import httpx
import numpy as np

from posttrain import schema
from posttrain.rollout import endpoints

VOCAB = 512
LOGITS = np.random.default_rng(0).normal(0, 3, (VOCAB, VOCAB))


def truth(ids, temperature=1.0):
  """Returns log softmax(LOGITS[ids[t - 1]] / temperature)[ids[t]]."""
  logprobs = [0.0] * min(len(ids), 1)
  for before, token in zip(ids[:-1], ids[1:], strict=True):
    logits = LOGITS[before] / np.float64(temperature)
    logprobs.append(logits[token] - np.log(np.exp(logits).sum()))
  return np.array(logprobs)


@dataclasses.dataclass
class Server:
  """A transport with configurable responses.

  `forms` are the supported fields for prompt scoring; others are ignored, or
  refused if `strict`. `least` is the lowest accepted `max_tokens`. `spoil`
  changes a response's choice; `replies` maps the end of a prompt to the choice
  that follows it.
  """

  forms: tuple = ('prompt_logprobs',)
  strict: bool = False
  least: int = 0
  tempered: bool = True
  spoil: object = lambda choice: choice
  replies: dict = dataclasses.field(default_factory=dict)
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
    route = {
      '/v1/models': self._models,
      '/v1/completions': self._completions,
      '/v1/chat/completions': self.chat,
      '/tokenize': self.tokenize,
    }.get(request.url.path)
    if route is None:
      return httpx.Response(404, json={'detail': 'Not Found'})
    response = route(body)
    return (
      response
      if isinstance(response, httpx.Response)
      # With NaN as numpy and json write it: servers do that too.
      else httpx.Response(200, content=json.dumps(response))
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
      return {'choices': [self.spoil(self._reply(body))]}
    ids = body['prompt']
    temperature = body['temperature'] if self.tempered else 1
    choice = {'text': '?', 'finish_reason': 'length', 'logprobs': None}
    values = truth(ids, temperature)
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

  def _reply(self, body):
    """Returns the choice of the longest key that the prompt ends with."""
    ids = tuple(body['prompt'])
    ends = [x for x in self.replies if x == ids[len(ids) - len(x) :]]
    return dict(self.replies[max(ends, key=len)])


def _entries(ids, values):
  """Returns vLLM's entries, a likelier token before the actual one."""
  return [None] + [
    {
      str((token + 1) % VOCAB): {'logprob': -0.25, 'rank': 1},
      str(token): {'logprob': value, 'rank': 2},
    }
    for token, value in zip(ids[1:], values[1:].tolist(), strict=True)
  ]


def transport(server):
  """Returns a transport to a server, which may give one answer many times."""

  def answer(request):
    response = server(request)
    return httpx.Response(
      response.status_code, headers=response.headers, content=response.content
    )

  return httpx.MockTransport(answer)


def connect(server, sleeps=None, name='teacher', **options):
  """Returns a client that does not wait; `sleeps` records the seconds."""
  cfg = schema.Endpoint(name=name, base_url='http://there:8000/v1', **options)
  sleeps = [] if sleeps is None else sleeps
  return endpoints.Endpoint(
    cfg,
    'environment sums',
    vocab_size=VOCAB,
    transport=transport(server),
    sleep=sleeps.append,
  )
