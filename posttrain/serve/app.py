"""The HTTP routes, the API key, and the size of bodies.

    GET  /health                 counts of jobs; needs no key
    GET  /v1/models              the one model
    POST /v1/completions
    POST /v1/chat/completions

Every refusal is an error object in OpenAI's form.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from starlette import applications, exceptions, requests, responses, routing

import posttrain
from posttrain.serve import call as calls
from posttrain.serve import fields, protocol, texts
from posttrain.serve import worker as workers

Handler = Callable[[requests.Request], Awaitable[responses.Response]]


def make(
  served: texts.Served,
  worker: workers.Worker,
  *,
  api_key: str | None,
  max_body_bytes: int,
) -> applications.Starlette:
  """Builds the application.

  Args:
    served: the policy, and its limits.
    worker: a started worker.
    api_key: the key that requests must have; None = no key.
    max_body_bytes: the most bytes of a request's body.
  """
  routes = _Routes(served, worker, api_key, max_body_bytes)
  return applications.Starlette(
    routes=[
      routing.Route('/health', routes.health),
      routing.Route('/v1/models', routes.models),
      routing.Route('/v1/completions', routes.completions, methods=['POST']),
      routing.Route('/v1/chat/completions', routes.chat, methods=['POST']),
    ],
    exception_handlers={
      fields.Refused: _refused,
      exceptions.HTTPException: _no_route,
      Exception: _failed,
    },
  )


class _Routes:
  """The handlers of the routes."""

  def __init__(
    self,
    served: texts.Served,
    worker: workers.Worker,
    api_key: str | None,
    max_body_bytes: int,
  ):
    self._served, self._worker = served, worker
    self._api_key, self._max_body_bytes = api_key, max_body_bytes
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
    self._check_key(request)
    policy = self._served.policy
    return _json(
      {
        'object': 'list',
        'data': [
          {
            'id': self._served.name,
            'object': 'model',
            'created': self._created,
            'owned_by': 'posttrain',
            'max_model_len': self._served.capacity,
            'tokenizer': policy.renderer and policy.renderer.fingerprint,
            'vocab_size': policy.model.vocab_size,
            'version': posttrain.__version__,
          }
        ],
      }
    )

  async def completions(self, request: requests.Request) -> responses.Response:
    """Completes prompts."""
    return await self._respond(request, chat=False)

  async def chat(self, request: requests.Request) -> responses.Response:
    """Completes a conversation."""
    return await self._respond(request, chat=True)

  async def _respond(
    self, request: requests.Request, chat: bool
  ) -> responses.Response:
    self._check_key(request)
    try:
      content = await self._body(request)
    except requests.ClientDisconnect:
      return responses.Response(status_code=499)  # the client has disconnected
    # In a thread: templates and tokenizers may be slow.
    parsed = await asyncio.to_thread(
      protocol.read, content, self._served, chat=chat
    )
    call = calls.Call(
      parsed, self._worker, self._served.policy, self._served.name
    )
    if parsed.stream:
      return _Stream(call)
    try:
      body = await _unless_disconnected(request, call.whole())
    finally:
      call.close()
    if body is None:
      return responses.Response(status_code=499)  # the client has disconnected
    return _json(body)

  def _check_key(self, request: requests.Request) -> None:
    if self._api_key is None:
      return
    kind, _, key = request.headers.get('authorization', '').partition(' ')
    same = hmac.compare_digest(key.encode(), self._api_key.encode())
    if kind.lower() != 'bearer' or not same:
      raise fields.Refused(
        401,
        "the header Authorization must be 'Bearer' and the server's "
        f'API key: got {"another key" if key else "none"}',
        code='invalid_api_key',
      )

  async def _body(self, request: requests.Request) -> bytes:
    """Reads the body, up to the size limit."""
    parts, size = [], 0
    async for part in request.stream():
      parts.append(part)
      size += len(part)
      if size > self._max_body_bytes:
        raise fields.Refused(
          413,
          f'the body must be of at most {self._max_body_bytes} bytes: got more',
          code='request_too_large',
        )
    return b''.join(parts)


async def _unless_disconnected(
  request: requests.Request, body: Awaitable[dict[str, Any]]
) -> dict[str, Any] | None:
  """Awaits a body; returns None if the client disconnects before."""

  async def disconnect():
    while (await request.receive())['type'] != 'http.disconnect':
      pass

  tasks = [asyncio.ensure_future(x) for x in (body, disconnect())]
  try:
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    return tasks[0].result() if tasks[0].done() else None
  finally:
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


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
    yield 'data: [DONE]\n\n'
  except fields.Refused as error:  # too late for a status
    yield f'data: {_dumps(error.body)}\n\n'


def _dumps(value: Any) -> str:
  # ASCII: text may contain lone surrogates, which UTF-8 cannot encode.
  return json.dumps(value, allow_nan=False, separators=(',', ':'))


def _json(value: Any, status: int = 200, headers=None) -> responses.Response:
  return responses.Response(
    _dumps(value), status, headers, media_type='application/json'
  )


async def _refused(request, error: fields.Refused) -> responses.Response:
  headers = {
    401: {'WWW-Authenticate': 'Bearer'},
    429: {'Retry-After': '1'},
    503: {'Retry-After': '5'},
  }.get(error.status)
  return _json(error.body, error.status, headers)


async def _no_route(request, error) -> responses.Response:
  route = f'{request.method} {request.url.path}'
  must = {
    404: 'the path must be one that is served',
    405: 'the method must be one that the path takes',
  }.get(error.status_code, str(error.detail))
  refused = fields.Refused(error.status_code, f'{must}: got {route!r:.200}')
  return _json(refused.body, error.status_code, error.headers)


async def _failed(request, error: Exception) -> responses.Response:
  logging.getLogger('absl').error('a request failed', exc_info=error)
  refused = fields.Refused(500, "the server failed; see the server's log")
  return _json(refused.body, 500)
