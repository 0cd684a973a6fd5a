"""The HTTP routes.

    GET  /health                 counts of jobs; needs no key
    GET  /v1/models              the one model
    GET  /v1/models/{name}
    POST /v1/completions
    POST /v1/chat/completions

1. `access` refuses foreign Hosts before any route, callers without the key
   before a body is read; `bodies` refuses large bodies.
2. The slow parts, reading a body and writing a response, run in a `pool`.
3. What a request has in the pool or the worker is dropped with its client.

Every refusal is an error object in OpenAI's form.
"""

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable
from typing import Any, TypeVar

from starlette import (
  applications,
  exceptions,
  middleware,
  requests,
  responses,
  routing,
)
from starlette import types as starlette_types

from posttrain.serve import access as access_lib
from posttrain.serve import bodies, fields, pool, protocol, texts
from posttrain.serve import call as calls
from posttrain.serve import worker as workers
from posttrain.util import foreign, release

T = TypeVar('T')

_THREADS = 2  # of the pool
_INLINE = 2**15  # bytes of a response that is written at once
_MESSAGE_BYTES = 500  # that take as long to read as a message to render


def make(
  served: texts.Served,
  worker: workers.Worker,
  *,
  access: access_lib.Access,
  max_body_bytes: int,
) -> applications.Starlette:
  """Builds the application.

  Args:
    served: the policy, and its limits.
    worker: a started worker.
    access: the rules about who may send requests.
    max_body_bytes: the most bytes of a request's body.
  """
  routes = _Routes(served, worker, access, max_body_bytes)
  return applications.Starlette(
    routes=[
      routing.Route('/health', routes.health),
      routing.Route('/v1/models', routes.models),
      routing.Route('/v1/models/{name:path}', routes.model),
      routing.Route('/v1/completions', routes.completions, methods=['POST']),
      routing.Route('/v1/chat/completions', routes.chat, methods=['POST']),
    ],
    middleware=[middleware.Middleware(_OwnHosts, access=access)],
    exception_handlers={
      fields.Refused: _refused,
      exceptions.HTTPException: _no_route,
      Exception: _failed,
    },
  )


class _OwnHosts:
  """The middleware that refuses other Hosts, whatever the path and method."""

  def __init__(self, app: starlette_types.ASGIApp, access: access_lib.Access):
    self._app, self._access = app, access

  async def __call__(self, scope, receive, send) -> None:
    app = self._app
    if scope['type'] == 'http':
      try:
        self._access.check_host(requests.Request(scope))
      except fields.Refused as error:
        app = await _refused(None, error)
    await app(scope, receive, send)


class _Routes:
  """The handlers of the routes."""

  def __init__(
    self,
    served: texts.Served,
    worker: workers.Worker,
    access: access_lib.Access,
    max_body_bytes: int,
  ):
    self._served, self._worker, self._access = served, worker, access
    self._bodies = bodies.Bodies(max_body_bytes)
    self._pool = pool.Pool(_THREADS, worker.max_jobs)
    self._created = int(time.time())

  async def health(self, request: requests.Request) -> responses.Response:
    """Returns the worker's counts; 503 once it accepts no more jobs."""
    failure = self._worker.failure
    return _json(
      {
        'status': 'ok' if failure is None else failure.message,
        **self._worker.counts(),
      },
      200 if failure is None else 503,
    )

  async def models(self, request: requests.Request) -> responses.Response:
    """Returns the list of the one model."""
    self._access.check(request)
    return _json({'object': 'list', 'data': [self._model()]})

  async def model(self, request: requests.Request) -> responses.Response:
    """Returns the model of a name."""
    self._access.check(request)
    protocol.check_model(request.path_params['name'], self._served.name)
    return _json(self._model())

  def _model(self) -> dict[str, Any]:
    policy = self._served.policy
    return {
      'id': self._served.name,
      'object': 'model',
      'created': self._created,
      'owned_by': 'posttrain',
      'max_model_len': self._served.capacity,
      'tokenizer': policy.renderer and policy.renderer.fingerprint,
      'vocab_size': policy.model.vocab_size,
      'version': release.__version__,
    }

  async def completions(self, request: requests.Request) -> responses.Response:
    """Completes prompts."""
    return await self._respond(request, chat=False)

  async def chat(self, request: requests.Request) -> responses.Response:
    """Completes a conversation."""
    return await self._respond(request, chat=True)

  async def _respond(
    self, request: requests.Request, chat: bool
  ) -> responses.Response:
    self._access.check(request)
    self._access.check_json(request)
    try:
      self._worker.check_space()
      parsed = await self._parsed(request, chat)
      call = calls.Call(
        parsed, self._worker, self._served.policy, self._served.name
      )
      if parsed.stream:
        return _Stream(call)
      try:
        return await _unless_disconnected(request, self._whole(call))
      finally:
        call.close()
    except (requests.ClientDisconnect, _Disconnected):
      return responses.Response(status_code=499)  # nobody reads it
    except (pool.Full, workers.Full) as error:
      raise fields.Refused(
        429,
        f"the server's queue must not be full: got {error} under way; "
        'try again later',
        code='rate_limit_exceeded',
      ) from error

  async def _parsed(
    self, request: requests.Request, chat: bool
  ) -> protocol.ApiRequest:
    left = threading.Event()
    async with self._bodies.read(request) as content:
      size = len(content)
      if chat:  # each message has a brace
        size += _MESSAGE_BYTES * content.count(b'{')

      def read() -> protocol.ApiRequest | fields.Refused:
        try:
          return protocol.read(
            content, self._served, chat=chat, cancelled=left.is_set
          )
        except fields.Refused as error:
          # The frames hold the body, and would hold it as long as the error.
          error.__cause__ = error.__context__ = None
          return error.with_traceback(None)

      try:
        parsed = await _unless_disconnected(request, self._pool.run(size, read))
      finally:
        left.set()  # also if the client has: ends what runs for it
    if isinstance(parsed, fields.Refused):
      raise parsed
    return parsed

  async def _whole(self, call: calls.Call) -> responses.Response:
    """Returns the response without streaming."""
    size, write = await call.finished()
    if size <= _INLINE:
      return _json(write())
    return await self._pool.run(size, lambda: _json(write()))


class _Disconnected(Exception):
  """The client has disconnected."""


async def _unless_disconnected(
  request: requests.Request, work: Awaitable[T]
) -> T:
  """Awaits a result; cancels it if the client disconnects before.

  Raises:
    _Disconnected: the client has disconnected.
  """

  async def disconnect():
    while (await request.receive())['type'] != 'http.disconnect':
      pass

  result = asyncio.ensure_future(work)
  left = asyncio.ensure_future(disconnect())
  try:
    await asyncio.wait((result, left), return_when=asyncio.FIRST_COMPLETED)
    if not result.done():
      raise _Disconnected
    return result.result()
  finally:
    for task in (result, left):
      task.cancel()
    await asyncio.gather(result, left, return_exceptions=True)
    del result, left, task  # an error of theirs holds this frame: a cycle


class _Stream(responses.StreamingResponse):
  """A call's chunks as server-sent events."""

  def __init__(self, call: calls.Call):
    super().__init__(
      _events(call),
      media_type='text/event-stream',
      headers={'Cache-Control': 'no-cache'},
    )
    self._call = call

  async def __call__(self, scope, receive, send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:  # also if the client has disconnected before the first chunk
      self._call.close()


async def _events(call: calls.Call) -> AsyncIterator[str]:
  """Yields server-sent events; the last one is [DONE]."""
  try:
    async with contextlib.aclosing(call.chunks()) as chunks:
      async for chunk in chunks:
        yield f'data: {_dumps(chunk)}\n\n'
        await asyncio.sleep(0)  # sending waits only for slow clients
    yield 'data: [DONE]\n\n'
  except fields.Refused as error:  # too late for a status
    yield f'data: {_dumps(error.body)}\n\n'


def _dumps(value: Any) -> str:
  # ASCII: text may contain lone surrogates, which UTF-8 cannot encode.
  return json.dumps(value, allow_nan=False, separators=(',', ':'))


def _dumps_body(body: dict[str, Any]) -> str:
  """Writes the choices one by one, so that other threads run in between."""
  choices = body.pop('choices', None)
  text = _dumps(body)
  if choices is None:
    return text
  return f'{text[:-1]},"choices":[{",".join(map(_dumps, choices))}]}}'


def _json(value: Any, status: int = 200, headers=None) -> responses.Response:
  return responses.Response(
    _dumps_body(value), status, headers, media_type='application/json'
  )


async def _refused(request, error: fields.Refused) -> responses.Response:
  headers = {
    401: {'WWW-Authenticate': 'Bearer'},
    429: {'Retry-After': '1'},
    503: {'Retry-After': '5'},
  }.get(error.status)
  return _json(error.body, error.status, headers)


async def _no_route(request, error) -> responses.Response:
  path = request.scope.get('path', '')  # a URL needs a Host that is one
  route = foreign.quote(f'{request.method[:20]} {path[:200]}')
  must = {
    404: 'the path must be one that is served',
    405: 'the method must be one that the path takes',
  }.get(error.status_code, foreign.text(error.detail))
  refused = fields.Refused(error.status_code, f'{must}: got {route}')
  return _json(refused.body, error.status_code, error.headers)


async def _failed(request, error: Exception) -> responses.Response:
  logging.getLogger('absl').error('a request failed', exc_info=error)
  refused = fields.Refused(500, "the server failed; see the server's log")
  return _json(refused.body, 500)
