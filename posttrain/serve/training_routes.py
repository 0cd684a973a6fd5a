"""The routes of a training service, as Tinker's SDK calls them.

Under /api/v1. A request that takes time is answered with the id of a future
once the journal has it; /retrieve_future waits for the result, and is answered
408 while there is none. What is not served is a 404 that names the path.
"""

import asyncio
import datetime
import functools
from collections.abc import Callable
from typing import Any

from starlette import (
  applications,
  exceptions,
  middleware,
  requests,
  responses,
  routing,
)
from tinker import types
from tinker.types import try_again_response

from posttrain.serve import app, protocol, training, wire

WAIT = 20.0  # seconds until a request for a result is answered 408
PARALLEL = 128  # samples that a client requests at a time


class _Routes:
  """The handlers of the routes."""

  def __init__(self, service: training.Service, max_body_bytes: int):
    self._service, self._max_body_bytes = service, max_body_bytes
    self._loop: asyncio.AbstractEventLoop | None = None
    self._finished = asyncio.Event()  # replaced when a request has finished
    self.posts: dict[str, Callable[[bytes], Any]] = {
      'client/config': lambda _: types.ClientConfigResponse(
        pjwt_auth_enabled=False,
        use_pyqwest_transport=False,
        sample_max_concurrent_requests=PARALLEL,
        fwdbwd_max_chunk_bytes_count=max_body_bytes // 2,
      ),
      'client/dynamic_config': lambda _: types.ClientDynamicConfigResponse(),
      'telemetry': lambda _: types.TelemetryResponse(status='accepted'),
      'create_session': lambda body: types.CreateSessionResponse(
        session_id=service.open_session(body)
      ),
      'session_heartbeat': self._heartbeat,
      'create_sampling_session': lambda body: (
        types.CreateSamplingSessionResponse(
          sampling_session_id=service.open_sampler(body)
        )
      ),
      'get_info': self._info,
      **{
        verb: functools.partial(service.accept, verb)
        for verb in (
          'create_model',
          'forward_backward',
          'optim_step',
          'load_weights',
          'asample',
          *training.KINDS,
        )
      },
    }
    self.gets: dict[str, Callable[[requests.Request], Any]] = {
      'healthz': lambda _: types.HealthResponse(status='ok'),
      'get_server_capabilities': self._capabilities,
      'samplers/{id}': self._sampler,
      'training_runs/{id}': self._run,
      'training_runs/{id}/checkpoints': self._checkpoints,
      'checkpoints': self._checkpoints,
      'training_runs/{id}/checkpoints/{kind}/{name}/external_weights_urls': (
        self._urls
      ),
    }

  def notify(self) -> None:
    """Wakes the requests for results; for any thread."""
    if self._loop is not None:
      self._loop.call_soon_threadsafe(self._wake)

  def _wake(self) -> None:
    self._finished.set()
    self._finished = asyncio.Event()

  async def answer(
    self, request: requests.Request, respond: Callable[[Any], Any]
  ) -> responses.Response:
    """Answers with what `respond` returns for a body, or for a GET request."""
    given: Any = request
    if request.method == 'POST':
      kinds = training.JSON, training.PROTOBUF
      given = await app.read_body(request, self._max_body_bytes, kinds)
    return _json(await asyncio.to_thread(respond, given))

  async def retrieve(self, request: requests.Request) -> responses.Response:
    """Waits for a result; 408 if there is none yet."""
    self._loop = asyncio.get_running_loop()
    body = await app.read_body(request, self._max_body_bytes)
    id = wire.read('retrieve_future', body).request_id
    end = self._loop.time() + WAIT
    while (result := self._service.result(id)) is None:
      left = end - self._loop.time()
      if left <= 0:
        waiting = try_again_response.TryAgainResponse(
          request_id=id, queue_state='active'
        )
        return _json(waiting, 408)
      try:
        await asyncio.wait_for(self._finished.wait(), left)
      except TimeoutError:
        pass
    kind, content = result
    return responses.Response(content, media_type=kind)

  async def finish(self, request: requests.Request) -> responses.Response:
    """Ends a session."""
    await app.read_body(request, self._max_body_bytes)
    id = request.path_params['id']
    await asyncio.to_thread(self._service.finish_session, id)
    return responses.Response(status_code=204)

  async def delete(self, request: requests.Request) -> responses.Response:
    """Deletes a checkpoint."""
    await asyncio.to_thread(self._service.delete, _path(request))
    return responses.Response(status_code=204)

  async def file(self, request: requests.Request) -> responses.Response:
    """Sends a file of an exported adapter."""
    folder = self._service.checkpoint(_path(request)).folder
    file = folder / request.path_params['file']
    if not file.is_file():
      raise exceptions.HTTPException(404)
    return responses.FileResponse(file)

  def _heartbeat(self, body: bytes) -> Any:
    self._service.session(wire.read('session_heartbeat', body).session_id)
    return types.SessionHeartbeatResponse()

  def _capabilities(self, _: requests.Request) -> Any:
    service = self._service
    return types.GetServerCapabilitiesResponse(
      supported_models=[
        types.SupportedModel(
          model_name=service.name + suffix,
          max_context_length=service.capacity,
          trainable=True,
          sampleable=True,
        )
        for suffix in ('', wire.FULL)
      ]
    )

  def _info(self, body: bytes) -> Any:
    model = self._service.model(wire.read('get_info', body).model_id)
    return types.GetInfoResponse(
      type='get_info',
      model_data=types.ModelData(arch='posttrain', model_name=model.base),
      model_id=model.id,
      model_name=model.base,
      is_lora=model.lora is not None,
      lora_rank=model.lora and model.lora.rank,
    )

  def _sampler(self, request: requests.Request) -> Any:
    id = request.path_params['id']
    saved = self._service.sampler(id)
    return types.GetSamplerResponse(
      sampler_id=id,
      base_model=saved.model.base if saved else self._service.name,
      model_path=saved and saved.path,
    )

  def _run(self, request: requests.Request) -> Any:
    id = request.path_params['id']
    model = self._service.model(id)
    return types.TrainingRun(
      training_run_id=id,
      base_model=model.base,
      model_owner='posttrain',
      is_lora=model.lora is not None,
      lora_rank=model.lora and model.lora.rank,
      last_request_time=_time(model.used),
      user_metadata=model.metadata,
    )

  def _checkpoints(self, request: requests.Request) -> Any:
    """Returns the checkpoints of a model, or all, in the order of saving."""
    model, result = request.path_params.get('id'), []
    for path, saved in list(self._service.checkpoints.items()):
      if saved.is_listed and model in (None, saved.model.id):
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
        result.append(
          types.Checkpoint(
            checkpoint_id=parsed.checkpoint_id,
            checkpoint_type=parsed.checkpoint_type,
            time=_time(saved.folder.stat().st_mtime),
            tinker_path=path,
            user_metadata=saved.metadata,
          )
        )
    return types.CheckpointsListResponse(checkpoints=result)

  def _urls(self, request: requests.Request) -> Any:
    folder = self._service.checkpoint(_path(request)).folder
    base = str(request.url).removesuffix('external_weights_urls')
    now = datetime.datetime.now(datetime.UTC)
    return types.ExternalWeightsUrlsResponse(
      urls={x.name: f'{base}files/{x.name}' for x in sorted(folder.iterdir())},
      expires=now + datetime.timedelta(days=1),
    )


def make(
  service: training.Service,
  *,
  api_key: str | None,
  hosts: frozenset[str] | None,
  max_body_bytes: int,
) -> applications.Starlette:
  """Builds the application; see `app.make` for the arguments."""
  routes = _Routes(service, max_body_bytes)
  service.notify = routes.notify
  one = 'training_runs/{id}/checkpoints/{kind}/{name}'

  def route(path, handler, methods):
    return routing.Route(f'/api/v1/{path}', handler, methods=methods)

  return applications.Starlette(
    routes=[
      route('retrieve_future', routes.retrieve, ['POST']),
      route('sessions/{id}/finish', routes.finish, ['POST']),
      route(one, routes.delete, ['DELETE']),
      route(f'{one}/files/{{file}}', routes.file, ['GET']),
      *(
        route(path, functools.partial(routes.answer, respond=respond), [method])
        for method, handlers in (('POST', routes.posts), ('GET', routes.gets))
        for path, respond in handlers.items()
      ),
    ],
    middleware=[middleware.Middleware(app.Guard, api_key=api_key, hosts=hosts)],
    exception_handlers={
      kind: app.error_response
      for kind in (protocol.Refused, exceptions.HTTPException, Exception)
    },
  )


def _json(value: Any, status: int = 200) -> responses.Response:
  content = value.model_dump_json(exclude_none=True)
  return responses.Response(content, status, media_type=training.JSON)


def _path(request: requests.Request) -> str:
  """Returns the tinker path of a checkpoint's route."""
  return 'tinker://{id}/{kind}/{name}'.format_map(request.path_params)


def _time(seconds: float) -> datetime.datetime:
  return datetime.datetime.fromtimestamp(seconds, datetime.UTC)
