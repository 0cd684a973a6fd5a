"""A sampler: the engine of a learner, in another process.

    GET  /health
    POST /init_weight_transfer_engine  {"init_info": {...}} -> {"session": ...}
    POST /pause                        cancels all requests
    POST /start_weight_update
    POST /update_weights               a safetensors file; any number of times
    POST /finish_weight_update         {"weight_version", "checksums"}
    POST /resume
    POST /weight_checker               {"action": "checksum" or "compare"}
    POST /engine                       {"commands": [...], "call": "poll"}

The routes of the weights are those of vLLM. `rollout.engine_client` calls them.

1. A learner opens a session with the model's options and the engine's sizes, so
   that nothing is said twice. It replaces that of an earlier learner, whose
   requests get status 409 from then on; those before any session get 422.
2. Weights have two phases. `update_weights` holds arrays beside the weights in
   use. `finish_weight_update` loads them, and compares the checksums of the
   whole tree with the learner's; only if all are equal, it commits them.
   Otherwise (422) the old weights stay.
3. `/engine` makes the calls that a learner would make to an engine of its own,
   in the same order, so that their bits are the same.

One thread does all of this, a request at a time.
"""

import asyncio
import concurrent.futures
import json
import logging
import secrets
import sys
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import safetensors
from starlette import applications, requests, responses, routing

import posttrain
from posttrain import schema, sharding, tree
from posttrain.decode import engines
from posttrain.models import lora, transformer
from posttrain.rollout import engine_client
from posttrain.serve import app, protocol

_JSON, _BYTES = 'application/json', 'application/octet-stream'


class Sampler:
  """The engine and the weights of the learner that came last."""

  def __init__(self):
    self.version: int | None = None  # of the weights; None = none yet
    self._session = ''
    self._engine: Any = None  # the `engines.Engine` of the session
    self._mesh, self._static = sharding.one_device(), (1.0, False)
    self._leaves: dict[str, jax.Array] = {}  # the weights by path
    self._staged: dict[str, np.ndarray] = {}  # those to come
    self._thread = concurrent.futures.ThreadPoolExecutor(1)
    self._routes = {
      '/init_weight_transfer_engine': self._open,
      '/pause': self._pause,
      '/start_weight_update': self._start_update,
      '/update_weights': self._update,
      '/finish_weight_update': self._finish_update,
      '/resume': lambda _: {'status': 'resumed'},
      '/weight_checker': self._check,
      '/engine': self._run,
    }

  def application(
    self, api_key: str | None, hosts: frozenset[str] | None
  ) -> applications.Starlette:
    """Builds the application; the arguments are those of `app.Guard`."""
    return app.application(
      [
        routing.Route('/health', self._health),
        *(
          routing.Route(path, self._respond, methods=['POST'])
          for path in self._routes
        ),
      ],
      api_key,
      hosts,
    )

  def stop(self, wait: float) -> bool:
    """Returns False: the thread may decode, which ends with the process."""
    return False

  async def _health(self, _: requests.Request) -> responses.Response:
    return responses.JSONResponse({'status': 'ok', 'version': self.version})

  async def _respond(self, request: requests.Request) -> responses.Response:
    data = await app.read_body(request, sys.maxsize, (_JSON, _BYTES))
    path, is_json = request.url.path, request.headers['content-type'] == _JSON
    session = request.query_params.get('session', '')
    result = await asyncio.get_running_loop().run_in_executor(
      self._thread, self._answer, path, session, data, is_json
    )
    # With NaN, which logprobs of a policy that has diverged may be.
    text = json.dumps(result, default=engine_client.plain)
    return responses.Response(text, media_type=_JSON)

  def _answer(
    self, path: str, session: str, data: bytes, is_json: bool
  ) -> dict[str, Any]:
    if path != '/init_weight_transfer_engine' and session != self._session:
      if self._session:
        raise protocol.Refused(409, 'the session must be that of the last init')
      raise protocol.Refused(422, 'a session must be begun first')
    try:
      return self._routes[path](json.loads(data) if is_json else data)
    except protocol.Refused:
      raise
    except Exception as error:  # the engine's state is unknown: begin anew
      logging.getLogger('absl').exception('the request %s failed', path)
      self._session = ''
      status = 400 if isinstance(error, ValueError) else 500
      raise protocol.Refused(
        status, f'{type(error).__name__}: {error}'
      ) from error

  def _open(self, body: dict[str, Any]) -> dict[str, Any]:
    """Makes the engine of a new session, without weights."""
    info = body['init_info']
    protocol.require(
      info['posttrain'] == posttrain.__version__,
      'posttrain',
      f'be of the version {posttrain.__version__} of the sampler',
      info['posttrain'],
    )
    self._session = secrets.token_hex(8)
    self._engine = self.version = None  # freed first
    self._leaves, self._staged = {}, {}
    self._static = info['scale'], info['factors']
    self._mesh = sharding.make_mesh(schema.Mesh(tensor=info['tensor']))
    model = schema.Model.from_json(info['model'])
    options = engines.Options(**info['engine'])
    self._engine = engines.Engine(model, options, self._mesh)
    return {'session': self._session}

  def _pause(self, _: Any) -> dict[str, Any]:
    for id in self._engine.in_flight:
      self._engine.cancel(id)
    return {'status': 'paused'}

  def _start_update(self, _: Any) -> dict[str, Any]:
    self._staged = {}
    return {'message': 'started'}

  def _update(self, data: bytes) -> dict[str, Any]:
    try:
      self._staged |= engine_client.read_arrays(data)
    except (safetensors.SafetensorError, KeyError, ValueError) as error:
      message = f'the weights must be a whole safetensors file: {error}'
      raise protocol.Refused(422, message) from error
    return {'message': f'{len(self._staged)} arrays'}

  def _finish_update(self, body: dict[str, Any]) -> dict[str, Any]:
    """Commits the new weights, if their checksums are the learner's."""
    staged, self._staged = self._staged, {}
    # An adapted kernel is placed as it is without its adapter.
    names = {x: x.replace('/kernel/kernel', '/kernel') for x in staged}
    new = {names[path]: x for path, x in staged.items()}
    rules = transformer.SHARDING_RULES
    new = sharding.put(new, sharding.shardings(new, rules, self._mesh))
    leaves = self._leaves | {path: new[name] for path, name in names.items()}
    params = lora.nest(leaves, *self._static)
    differing = _differing(tree.checksums(params), body['checksums'])
    if differing:
      raise protocol.Refused(
        422,
        f'the checksums of {len(differing)} arrays differ from those of the '
        f'learner, the first of {differing[0]}; the weights stay as they were',
      )
    version = int(body['weight_version'])
    self._engine.set_params(params, version)
    self._leaves, self.version = leaves, version
    return {'message': f'version {version}'}

  def _check(self, body: dict[str, Any]) -> dict[str, Any]:
    """Returns the checksums of the weights, or compares them."""
    sums = tree.checksums(lora.nest(self._leaves, *self._static))
    if body['action'] == 'compare':
      differing = _differing(sums, body['baseline'])
      return {'match': not differing, 'mismatches': differing}
    return {'checksums': sums}

  def _run(self, body: dict[str, Any]) -> dict[str, Any]:
    """Makes the calls to the engine, in their order."""
    for name, *args in body['commands']:
      if name == 'submit':
        args = [engine_client.read_request(*args)]
      getattr(self._engine, name)(*args)
    return {'completions': getattr(self._engine, body['call'])()}


def _differing(sums: Mapping[str, int], others: Mapping[str, int]) -> list[str]:
  return sorted({path for path, _ in sums.items() ^ others.items()})
