"""The routes of a training service, as Tinker's SDK calls them.

Under /api/v1. A request that takes time is answered with the id of a future
once the journal has it; /retrieve_future waits for the result, and is answered
408 while there is none. What is not served is a 404 that names the path.
"""

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable
from typing import Any

from google.protobuf import message
from starlette import applications, requests, responses, routing
from tinker import types
from tinker.types import try_again_response

from posttrain.serve import app, protocol, training, wire

WAIT = 20.0  # seconds until a request for a result is answered 408
PARALLEL = 128  # samples that a client requests at a time
_SAVED = 'training_runs/{id}/checkpoints/{kind}/{name}'


class _Routes:
  """The handlers of the routes."""

  def __init__(self, service: training.Service, max_body_bytes: int):
    self._service, self._max_body_bytes = service, max_body_bytes
    self._loop: asyncio.AbstractEventLoop | None = None
    self._finished = asyncio.Event()  # replaced when a request has finished
    # By method and path: a request, whose body is in `state`, -> a type of the
    # SDK, or None.
    self.table: dict[str, Callable[..., Any]] = {
      'POST client/config': lambda _: types.ClientConfigResponse(
        pjwt_auth_enabled=False,
        use_pyqwest_transport=False,
        sample_max_concurrent_requests=PARALLEL,
        fwdbwd_max_chunk_bytes_count=max_body_bytes // 2,
      ),
      'POST telemetry': lambda _: types.TelemetryResponse(status='accepted'),
      'POST create_session': lambda _: types.CreateSessionResponse(
        session_id=service.open_session()
      ),
      'POST session_heartbeat': self._heartbeat,
      'POST sessions/{id}/finish': lambda request: service.finish_session(
        request.path_params['id']
      ),
      'POST create_sampling_session': self._open_sampler,
      'POST get_info': self._info,
      'POST retrieve_future': self._retrieve,
      **{
        f'POST {verb}': lambda request, verb=verb: service.accept(
          verb, request.state.body
        )
        for verb in ('asample', *service.verbs)
      },
      'GET get_server_capabilities': self._capabilities,
      'GET samplers/{id}': self._sampler,
      'GET training_runs/{id}': self._run,
      'GET training_runs/{id}/checkpoints': self._checkpoints,
      'GET checkpoints': self._checkpoints,
      f'GET {_SAVED}/external_weights_urls': self._urls,
      f'GET {_SAVED}/files/{{file}}': self._file,
      f'DELETE {_SAVED}': lambda request: service.delete(self._saved(request)),
    }

  def notify(self) -> None:
    """Wakes the requests for results; for any thread."""
    if self._loop is not None:
      self._loop.call_soon_threadsafe(self._wake)

  def _wake(self) -> None:
    self._finished.set()
    self._finished = asyncio.Event()

  async def answer(
    self, request: requests.Request, respond: Callable[..., Any]
  ) -> responses.Response:
    """Answers with what a function of the table returns."""
    if request.method == 'POST':
      kinds, most = (training.JSON, training.PROTOBUF), self._max_body_bytes
      request.state.body = await app.read_body(request, most, kinds)
    try:
      if respond == self._retrieve:
        return await self._retrieve(request)
      value = await asyncio.to_thread(respond, request)
    except (ValueError, message.DecodeError) as error:
      if getattr(error, 'status', 400) != 400:
        raise
      # The SDK repeats requests with status 400.
      raise protocol.Refused(422, f'{error}') from error
    if value is None:
      return responses.Response(status_code=204)
    return value if isinstance(value, responses.Response) else _json(value)

  async def _retrieve(self, request: requests.Request) -> responses.Response:
    """Waits for a result; 408 if there is none yet."""
    self._loop = asyncio.get_running_loop()
    kind, body = types.FutureRetrieveRequest, request.state.body
    id = kind.model_validate_json(body).request_id
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(WAIT):
        while (result := self._service.result(id))[0] is None:
          await self._finished.wait()
      kind, content = result
      return responses.Response(content, media_type=kind)
    waiting = try_again_response.TryAgainResponse(
      request_id=id, queue_state='active'
    )
    return _json(waiting, 408)

  def _heartbeat(self, request: requests.Request) -> Any:
    kind, body = types.SessionHeartbeatRequest, request.state.body
    self._service.session(kind.model_validate_json(body).session_id)
    return types.SessionHeartbeatResponse()

  def _open_sampler(self, request: requests.Request) -> Any:
    future = self._service.accept('create_sampling_session', request.state.body)
    return types.CreateSamplingSessionResponse(
      sampling_session_id=future.request_id
    )

  def _capabilities(self, _: requests.Request) -> Any:
    served = self._service.served
    return types.GetServerCapabilitiesResponse(
      supported_models=[
        types.SupportedModel(
          model_name=served.name + suffix,
          max_context_length=served.capacity,
          trainable=True,
          sampleable=True,
        )
        for suffix in ('', wire.FULL)
      ]
    )

  def _info(self, request: requests.Request) -> Any:
    id = types.GetInfoRequest.model_validate_json(request.state.body).model_id
    model = training.find(self._service.models, id)
    return types.GetInfoResponse(
      model_data=types.ModelData(model_name=model.base),
      model_id=model.id,
      model_name=model.base,
      is_lora=model.lora is not None,
      lora_rank=model.lora and model.lora.rank,
    )

  def _sampler(self, request: requests.Request) -> Any:
    id = request.path_params['id']
    saved = training.find(self._service.samplers, id)
    return types.GetSamplerResponse(
      sampler_id=id,
      base_model=saved.model.base if saved else self._service.served.name,
      model_path=saved and saved.path,
    )

  def _run(self, request: requests.Request) -> Any:
    model = training.find(self._service.models, request.path_params['id'])
    return types.TrainingRun(
      training_run_id=model.id,
      base_model=model.base,
      model_owner='posttrain',
      is_lora=model.lora is not None,
      lora_rank=model.lora and model.lora.rank,
      last_request_time=model.used,
      user_metadata=model.metadata,
    )

  def _checkpoints(self, request: requests.Request) -> Any:
    """Returns the named checkpoints of a model, or all, in order of saving."""
    model, result = request.path_params.get('id'), []
    for path, saved in list(self._service.checkpoints.items()):
      if saved.request.path and model in (None, saved.model.id):
        parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(path)
        result.append(
          types.Checkpoint(
            **parsed.model_dump(),
            time=saved.folder.stat().st_mtime,
            user_metadata=getattr(saved.request, 'user_metadata', None),
          )
        )
    return types.CheckpointsListResponse(checkpoints=result)

  def _saved(self, request: requests.Request) -> training.Checkpoint:
    path = 'tinker://{id}/{kind}/{name}'.format_map(request.path_params)
    return training.find(self._service.checkpoints, path)

  def _urls(self, request: requests.Request) -> Any:
    base = str(request.url).removesuffix('external_weights_urls')
    files = sorted(self._saved(request).folder.iterdir())
    return types.ExternalWeightsUrlsResponse(
      urls={x.name: f'{base}files/{x.name}' for x in files},
      expires=time.time() + 86400,
    )

  def _file(self, request: requests.Request) -> responses.Response:
    """Sends a file of an exported adapter."""
    folder = self._saved(request).folder
    return responses.FileResponse(folder / request.path_params['file'])


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
  return app.application(
    [
      routing.Route(f'/api/v1/{path}', handler, methods=[method])
      for (method, path), handler in (
        (route.split(), functools.partial(routes.answer, respond=respond))
        for route, respond in routes.table.items()
      )
    ],
    api_key,
    hosts,
  )


def _json(value: Any, status: int = 200) -> responses.Response:
  content = value.model_dump_json(exclude_none=True)
  return responses.Response(content, status, media_type=training.JSON)
