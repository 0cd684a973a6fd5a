"""The policy's engine in other processes: samplers, see `serve.sampler`.

`EngineClient` has the methods of `decode.engines.Engine`. A sampler's engine
has the options of the one that would decode here, and gets the same calls in
the same order, so that one sampler draws the same tokens with the same bits.

1. `submit`, `extend` and `release` are kept until `poll` or `step`, which send
   them with themselves: to all samplers with a request that decodes, at once,
   and wait for all. What is sent next never depends on which came first.
2. Requests are dealt in turns, neighbours with the same prompt to the same
   sampler, which prefills it once.
3. Weights are sent before the first call under them, by the routes of vLLM:
   pause (init once), start, update, finish with a version, resume. Only arrays
   whose checksums have changed are sent: under LoRA those of the adapter.
4. A sampler that is away, or has started again, is waited for. It gets a new
   session, the weights, and all calls since no request was open; so it draws
   the same tokens again, and goes on from there.

Scores are computed here, by an engine that does not decode.
"""

import dataclasses
import functools
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Mapping
from typing import Any

import httpx
import jax
import numpy as np
import safetensors
import safetensors.numpy

from posttrain import schema, tree, types
from posttrain.chat import rendering
from posttrain.decode import engines, requests
from posttrain.models import hf, lora
from posttrain.rollout import calls, endpoints, side_by_side
from posttrain.util import errors, watchdog

TRIES = 12  # at a call; about four minutes of waits
_SHORTEST, _LONGEST = 1.0, 30.0  # seconds between tries
# Seconds for a call: a poll decodes until a request stops, and may compile.
_TIMEOUT = httpx.Timeout(1800.0, connect=10.0)
_CHUNK = 2**28  # bytes of weights in a request
# No session, or a transfer that has failed; a server that failed, or its proxy.
_PASSING = (422, 500, 502, 503, 504)
# Fields of completions; one may be None.
_ARRAYS = {'ids': np.int32, 'logprobs': np.float32, 'routes': np.int16}
_ADVICE = {
  401: 'name the variable with its key in --samplers_key_env',
  409: 'another run uses this sampler: give each run its own',
}
_DTYPES = {
  'F32': 'float32',
  'BF16': 'bfloat16',
  'F16': 'float16',
  'I8': 'int8',
  'U8': 'uint8',
}


def plain(value: Any) -> Any:
  """Returns an array, request or completion as JSON, with all bits."""
  return value.tolist() if isinstance(value, np.ndarray) else vars(value)


def read_request(fields: Mapping[str, Any]) -> requests.Request:
  """Returns a request from its JSON."""
  return requests.Request(
    **{
      **fields,
      'ids': np.array(fields['ids'], np.int32),
      'stop_ids': tuple(fields['stop_ids']),
      'sampling': requests.Sampling(**fields['sampling']),
    }
  )


def read_arrays(data: bytes) -> dict[str, np.ndarray]:
  """Returns the arrays of a safetensors file by name."""
  return {
    name: np.frombuffer(
      x['data'], jax.numpy.dtype(_DTYPES[x['dtype']])
    ).reshape(x['shape'])
    for name, x in safetensors.deserialize(data)
  }


@dataclasses.dataclass(frozen=True, eq=False)
class _Weights:
  """Weights to sample with."""

  params: Any
  sums: dict[str, int]  # their checksums
  version: int


class _Sampler:
  """One sampler: its session, and the calls that a new one must repeat."""

  START = 'python -m posttrain.serve --sampler'

  def __init__(
    self,
    url: str,
    run: types.Samplers,
    init_info: Mapping[str, Any],
    renderer: rendering.Renderer,
    closed: threading.Event,
  ):
    self.url, self._run, self._init_info = url, run, init_info
    self._renderer, self._closed = renderer, closed
    key = os.environ.get(run.api_key_env, '')
    self._http = httpx.Client(
      base_url=url,
      headers={'Authorization': f'Bearer {key}'} if key else {},
      timeout=_TIMEOUT,
      limits=httpx.Limits(max_keepalive_connections=0),  # none stays open
    )
    self.weights: _Weights | None = None  # to sample with
    self.commands: list[list[Any]] = []  # not sent yet
    self.decoding: set[int] = set()  # ids of requests
    self._session: str | None = None
    self._loaded: _Weights | None = None  # the session's
    self._calls: list[dict[str, Any]] = []  # since no request was open
    self._num_made = 0  # of them, in this session

  def forget(self) -> None:
    """Drops the session, with all requests."""
    self._session = None
    self.reset()

  def reset(self) -> None:
    """Forgets the calls so far; no request is open."""
    self._calls, self._num_made = [], 0
    self.commands, self.decoding = [], set()

  def call(self, name: str) -> list[requests.Completion]:
    """Makes a call, after the commands; returns the completions.

    Raises:
      EndpointError: the sampler stayed away, or refuses.
    """
    self._calls.append({'commands': self.commands, 'call': name})
    self.commands, completions = [], []
    for attempt in range(1, TRIES + 1):
      try:
        if self._session is None:
          self._open()
        if self._loaded is not self.weights:
          self._send_weights()
        while self._num_made < len(self._calls):
          completions = self._make(self._calls[self._num_made])
          self._num_made += 1
        if attempt > 1:
          logging.getLogger('absl').warning(f'the sampler {self.url} is back')
        break
      except calls.EndpointError as error:
        if error.status:
          raise
        self._session = None
        if attempt == TRIES or self._closed.is_set():
          raise calls.EndpointError(
            f'--samplers must name servers that answer: got {error} from '
            f'{self.url} at try {attempt} of {TRIES}; start it by '
            f'{self.START}, and run the same command to continue'
          ) from error
        pause = min(_LONGEST, _SHORTEST * 2.0 ** (attempt - 1))
        logging.getLogger('absl').warning(
          f'waits for the sampler {self.url}: {error}; try {attempt} of '
          f'{TRIES}, next in {pause:.3g} s'
        )
        with watchdog.waiting(lambda: f'sampler {self.url}, which was away'):
          self._closed.wait(pause)
    self.decoding.difference_update(x.id for x in completions)
    return completions

  def _open(self) -> None:
    """Begins a session, which has no weights and no requests."""
    body = {'init_info': self._init_info}
    self._session = self._post('init_weight_transfer_engine', body)['session']
    self._loaded, self._num_made = None, 0

  def _make(self, call: Mapping[str, Any]) -> list[requests.Completion]:
    """Makes an entry of `_calls`."""
    completions = self._post('engine', call)['completions']
    for fields in completions:
      for name, dtype in _ARRAYS.items():
        if fields[name] is not None:
          fields[name] = np.array(fields[name], dtype)
    return [requests.Completion(**fields) for fields in completions]

  def _send_weights(self) -> None:
    """Sends the weights, which the sampler then commits."""
    new = self.weights
    assert new is not None, 'weights are set before requests'
    self._post('pause', {}, mode='abort')
    self._post('start_weight_update', {})
    ending = self._send_arrays(new)
    body = {'weight_version': str(new.version), **ending}
    self._post('finish_weight_update', body)
    self._post('resume', {})
    self._loaded = new

  def _send_arrays(self, new: _Weights) -> dict[str, Any]:
    """Sends what has changed; returns what the commit must compare."""
    held = {} if self._loaded is None else self._loaded.sums
    part, size = {}, 0
    for path, leaf in tree.flat(new.params).items():
      if held.get(path) == new.sums[path]:
        continue
      if part and size + leaf.nbytes > _CHUNK:
        self._post('update_weights', safetensors.numpy.save(part))
        part, size = {}, 0
      part[path] = np.ascontiguousarray(jax.device_get(leaf))
      size += leaf.nbytes
    self._post('update_weights', safetensors.numpy.save(part))
    return {'checksums': new.sums}

  def _post(
    self, path: str, body: Mapping[str, Any] | bytes, **query: str
  ) -> dict[str, Any]:
    """Returns the reply to a request.

    Raises:
      EndpointError: there is none, or the sampler has no session; with a
        status, it refuses.
    """
    kind = 'application/octet-stream'
    if not isinstance(body, bytes):
      kind, body = 'application/json', json.dumps(body, default=plain)
    headers = {'Content-Type': kind}
    if self._session:
      query['session'] = self._session
    try:
      with watchdog.waiting(lambda: f'sampler {self.url}'):
        response = self._http.post(
          f'/{path}', params=query, content=body, headers=headers
        )
      if response.status_code == 200:
        return response.json()
    except (httpx.HTTPError, ValueError) as error:
      problem = errors.text(error) or type(error).__name__
      raise calls.EndpointError(problem) from error
    status = response.status_code
    problem = f'status {status} {endpoints.message(response.content)}'.strip()
    if status in _PASSING:
      raise calls.EndpointError(problem)
    raise calls.EndpointError(
      f'--samplers must name samplers that accept {path}: got {problem} from '
      f'{self.url}; {_ADVICE.get(status, f"start one by {self.START}")}',
      status,
    )


class _Vllm(_Sampler):
  """A vLLM server: the same routes for weights, and `/v1/completions`.

  It needs a backend of weight transfer that reads the HuggingFace directory of
  `update_info`, in a folder that both sides see.
  """

  START = 'vllm serve with VLLM_SERVER_DEV_MODE=1'

  @functools.cached_property
  def _endpoint(self) -> endpoints.Endpoint:
    address = schema.Endpoint(
      base_url=f'{self.url}/v1', api_key_env=self._run.api_key_env, tries=1
    )
    return endpoints.Endpoint(address, 'rollouts')

  def _open(self) -> None:
    self._session, self._loaded, self._num_made = '', None, 0
    self._post('init_weight_transfer_engine', {'init_info': {}})
    self._endpoint.check(self._renderer)
    seed = self._init_info['engine']['seed']
    self._engine = endpoints.Engine(self._endpoint, seed=seed)

  def _make(self, call: Mapping[str, Any]) -> list[requests.Completion]:
    for name, *args in call['commands']:
      if name != 'launch':
        getattr(self._engine, name)(*args)
    assert self.weights is not None
    version = self.weights.version
    completions = self._engine.poll()
    return [dataclasses.replace(x, version=version) for x in completions]

  def _send_arrays(self, new: _Weights) -> dict[str, Any]:
    self._engine.drop()  # what the pause has cancelled
    model = schema.Model.from_json(self._init_info['model'])
    name = re.sub(r'\W+', '_', self.url)
    folder = os.path.join(self._run.vllm_folder, name)
    shutil.rmtree(folder, ignore_errors=True)  # the version before
    hf.save(lora.merge(new.params), model, folder, dtype='float32')
    shapes = hf.shapes(model)
    info = {
      'names': list(shapes),
      'dtype_names': ['float32'] * len(shapes),
      'shapes': list(shapes.values()),
      'folder': folder,
    }
    self._post('update_weights', {'update_info': info})
    return {}


class EngineClient:
  """An engine whose requests are decoded by samplers."""

  def __init__(
    self,
    samplers: types.Samplers,
    init_info: Mapping[str, Any],
    local: engines.Engine,
    renderer: rendering.Renderer,
  ):
    """Sends nothing yet.

    Args:
      samplers: their addresses and key.
      init_info: the model and the options of each engine, the JSON that
        `serve.sampler` reads.
      local: an engine of this process, which scores.
      renderer: the policy's, whose tokens a vLLM server must have.
    """
    self._local, self.score = local, local.score
    self._closed = threading.Event()
    routes = init_info['model']['routes']
    requests.require(
      routes == 'own' or not samplers.vllm_folder,
      'model.routes',
      "be 'own' with --vllm_folder",
      routes,
    )
    kind = _Vllm if samplers.vllm_folder else _Sampler
    self._samplers = [
      kind(url, samplers, init_info, renderer, self._closed)
      for url in samplers.urls
    ]
    self._owners: dict[int, _Sampler] = {}  # of open requests
    self._holds: set[int] = set()  # ids of requests that keep their slots
    self._stopped = False
    self._turn, self._prompt = -1, np.zeros(0, np.int32)

  def close(self) -> None:
    """Ends waits for samplers that are away."""
    self._closed.set()

  def stop(self) -> None:
    """Makes `poll` and `step` raise `requests.Stopped`, in any thread."""
    self._stopped = True
    self.close()

  def set_params(self, params: Any, version: int, decodes: bool = True) -> None:
    """Sets the weights of all samplers, as `Engine.set_params`.

    They are sent before the first request is decoded.
    """
    assert not self._owners, 'release all requests first'
    self._local.set_params(params, version, decodes=False)
    if not decodes:
      return
    weights = _Weights(params, tree.checksums(params), version)
    for sampler in self._samplers:
      sampler.reset()
      sampler.weights = weights

  def sleep(self) -> None:
    """Does nothing: the caches take no memory of this process."""

  def launch(self) -> None:
    """Queues a chunk before what follows; it is decoded at the next call."""
    for sampler in self._samplers:
      if sampler.decoding:
        sampler.commands.append(['launch'])

  def submit(self, request: requests.Request) -> None:
    """Queues a request."""
    if not self._owners:
      self._turn = -1
    if self._turn < 0 or not np.array_equal(request.ids, self._prompt):
      self._turn, self._prompt = self._turn + 1, request.ids
    sampler = self._samplers[self._turn % len(self._samplers)]
    self._owners[request.id] = sampler
    if request.hold:
      self._holds.add(request.id)
    sampler.commands.append(['submit', request])
    sampler.decoding.add(request.id)

  def extend(self, id: int, ids: np.ndarray, max_tokens: int) -> None:
    """Appends tokens to a held sequence, and queues its next turn."""
    sampler = self._owners[id]
    sampler.commands.append(['extend', id, ids, max_tokens])
    sampler.decoding.add(id)

  def release(self, id: int) -> None:
    """Removes a held request."""
    self._holds.remove(id)
    self._owners.pop(id).commands.append(['release', id])

  def poll(self) -> list[requests.Completion]:
    """Decodes until each sampler that decodes has completions.

    Raises:
      EndpointError: a sampler stayed away, or refuses.
    """
    return self._call('poll')

  def step(self) -> list[requests.Completion]:
    """Decodes a chunk at each sampler that decodes.

    Raises:
      EndpointError: as `poll`.
    """
    return self._call('step')

  def drop(self) -> None:
    """Removes all requests: their episodes have failed."""
    if self._owners:
      for sampler in self._samplers:
        sampler.forget()
      self._owners.clear()
      self._holds.clear()

  def _call(self, name: str) -> list[requests.Completion]:
    if self._stopped:
      raise requests.Stopped
    decoding = [x for x in self._samplers if x.decoding]
    results = [side_by_side.thread(x.call, name) for x in decoding]
    completions = [x for result in results for x in result.result()]
    for id in {x.id for x in completions} - self._holds:
      del self._owners[id]
    for sampler in self._samplers if not self._owners else ():
      if not sampler.commands:  # no slot is to be released
        sampler.reset()
    return completions
