"""The HTTP routes, who may use them, and the server process.

    GET  /health                 counts of jobs; needs no key
    GET  /v1/models              the one model
    GET  /v1/models/{name}
    POST /v1/completions
    POST /v1/chat/completions
    POST /pooling                of a reward model, in place of completions

1. The socket is bound before the model is loaded: a port in use is reported at
   once, and port 0 becomes a free one.
2. `Guard` refuses foreign Hosts and callers without the key before a body is
   read. A web page can make a browser send requests to this machine; two rules
   keep pages out: bodies are `application/json`, which no page may send to
   another origin without asking first, and a server on a loopback address
   answers only to its own names, so that a page cannot give its own name this
   address (DNS rebinding).
3. Bodies are bounded, connections are bounded in number and closed when they
   keep the server waiting (`OWED`); a proxy does the rest in front of the open
   internet.
4. Bodies are read and responses written in threads. What a request has in the
   worker is dropped with its client.
5. SIGTERM and SIGINT fail the open calls, so that clients get an error, and end
   the process even if the engine is busy; a second signal ends it at once.

Every refusal of a route is an error object in OpenAI's form.
"""

import asyncio
import contextlib
import functools
import hmac
import ipaddress
import json
import logging
import os
import re
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import uvicorn
from starlette import (
  applications,
  exceptions,
  middleware,
  requests,
  responses,
  routing,
  types,
)

import posttrain
from posttrain.serve import call, protocol, worker
from posttrain.util import errors

LEAVE = 2  # seconds of grace for the clients, and then for the engine
MAX_CONNECTIONS = 500
MAX_HEAD = 2**14  # bytes of a request's head
# Seconds that a client may take to send a head or a body, or to read.
OWED = {'head': 10.0, 'body': 60.0, 'read': 60.0}
_JSON = 'application/json'
_HOST = re.compile(r'(?:\[([\da-fA-F:.]+)\]|([\w.-]+))(?::\d*)?', re.ASCII)


def bind(host: str, port: int) -> socket.socket:
  """Returns a listening socket; port 0 = any free port.

  Raises:
    ValueError: the address is in use or invalid.
  """
  try:
    family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    return socket.create_server((host, port), family=family, backlog=2048)
  except OSError as error:
    raise ValueError(
      f'--host and --port must be free: got {host}:{port}; {error}; --port=0 '
      'takes a free one'
    ) from error


def address(listening: socket.socket) -> str:
  """Returns the URL of a socket."""
  host, port = listening.getsockname()[:2]
  return f'http://[{host}]:{port}' if ':' in host else f'http://{host}:{port}'


def is_loopback(listening: socket.socket) -> bool:
  """Returns whether a socket is reachable from this machine only."""
  host = listening.getsockname()[0].partition('%')[0]
  return ipaddress.ip_address(host).is_loopback


def own_hosts(
  listening: socket.socket, further: Sequence[str] = ()
) -> frozenset[str] | None:
  """Returns the names that the Host header may have; None = any.

  Args:
    listening: the server's socket.
    further: names besides those of this machine, such as a proxy's.

  Raises:
    ValueError: one of them is no host's name.
  """
  names = [_name(name.strip()) for name in further if name.strip()]
  if '' in names:
    raise ValueError(
      '--allowed_hosts must be names or addresses, with commas: got '
      f'{",".join(further)!r:.80}'
    )
  if not names and not is_loopback(listening):
    return None
  bound = listening.getsockname()[0]
  own = {'localhost', '127.0.0.1', '::1', bound} - {'0.0.0.0', '::'}
  return frozenset({*own, *names})


def _name(host: str) -> str:
  """Returns the name in a Host header, without the port; '' if it has none."""
  match = _HOST.fullmatch(host)
  return '' if match is None else (match[1] or match[2]).lower()


class Guard:
  """The middleware that refuses foreign Hosts, and callers without the key."""

  def __init__(
    self, app: types.ASGIApp, api_key: str | None, hosts: frozenset[str] | None
  ):
    """Stores the rules.

    Args:
      app: the application behind it.
      api_key: the key that requests must have; None = no key.
      hosts: names that the Host header may have; None = any.
    """
    self._app, self._api_key, self._hosts = app, api_key, hosts

  async def __call__(self, scope, receive, send) -> None:
    """Handles a request, as ASGI wants it."""
    request, refused = requests.Request(scope), None
    host = request.headers.get('host', '')
    kind, _, key = request.headers.get('authorization', '').partition(' ')
    if 'x-api-key' in request.headers:  # of Tinker's SDK
      kind, key = 'bearer', request.headers['x-api-key']
    if self._hosts is not None and _name(host) not in self._hosts:
      refused = protocol.Refused(
        403,
        f'the header Host must be one of {sorted(self._hosts)}: got '
        f'{errors.quote(host)}; --allowed_hosts adds names',
        code='invalid_host',
      )
    elif self._api_key is not None and scope['path'] != '/health':
      ours, theirs = self._api_key.encode(), key.strip().encode()
      if kind.lower() != 'bearer' or not hmac.compare_digest(ours, theirs):
        refused = protocol.Refused(
          401,
          "the header Authorization must be 'Bearer' and the server's API "
          f'key: got {"another key" if key else "none"}',
          code='invalid_api_key',
        )
    app = (
      self._app if refused is None else await error_response(request, refused)
    )
    await app(scope, receive, send)


def make(
  engine: worker.Worker,
  *,
  api_key: str | None = None,
  hosts: frozenset[str] | None = None,
  max_body_bytes: int,
) -> applications.Starlette:
  """Builds the application.

  Args:
    engine: a started worker.
    api_key: the key that requests must have; None = no key.
    hosts: names that the Host header may have; None = any.
    max_body_bytes: the most bytes of a request's body.
  """
  routes = _Routes(engine, max_body_bytes)
  return application(
    [
      routing.Route('/health', routes.health),
      routing.Route('/v1/models', routes.models),
      routing.Route('/v1/models/{name:path}', routes.model),
      *(
        routing.Route(
          path, functools.partial(routes.respond, answer=x), methods=['POST']
        )
        for path, x in routes.answers.items()
      ),
    ],
    api_key,
    hosts,
  )


def application(
  routes: Sequence[routing.Route],
  api_key: str | None,
  hosts: frozenset[str] | None,
) -> applications.Starlette:
  """Builds an application behind a `Guard`.

  Args:
    routes: its routes.
    api_key, hosts: those of `Guard`.
  """
  return applications.Starlette(
    routes=routes,
    middleware=[middleware.Middleware(Guard, api_key=api_key, hosts=hosts)],
    exception_handlers={
      kind: error_response
      for kind in (protocol.Refused, exceptions.HTTPException, Exception)
    },
  )


async def read_body(
  request: requests.Request, most: int, kinds: Sequence[str] = (_JSON,)
) -> bytes:
  """Reads a body of at most `most` bytes, of one of these content types.

  Raises:
    Refused: with 413 or 415.
  """
  kind = request.headers.get('content-type', '')
  if kind.partition(';')[0].strip().lower() not in kinds:
    must = ' or '.join(kinds)
    raise protocol.Refused(
      415,
      f'the header Content-Type must be {must}: got {errors.quote(kind)}',
      code='unsupported_media_type',
    )
  size, parts = 0, []
  async for part in request.stream():
    size += len(part)
    parts.append(part)
    if size > most:
      raise protocol.Refused(
        413,
        f'the body must be of at most {most} bytes: got more',
        code='request_too_large',
      )
  return b''.join(parts)


class _Routes:
  """The handlers of the routes."""

  def __init__(self, engine: worker.Worker, max_body_bytes: int):
    self._worker, policy = engine, engine.policy
    self._max_body_bytes = max_body_bytes
    self.answers = {
      '/v1/completions': functools.partial(self._answer, chat=False),
      '/v1/chat/completions': functools.partial(self._answer, chat=True),
    }
    if engine.is_reward:
      self.answers = {'/pooling': self._score}
    self._model = {
      'id': engine.name,
      'object': 'model',
      'created': int(time.time()),
      'owned_by': 'posttrain',
      'max_model_len': engine.capacity,
      'tokenizer': policy.renderer and policy.renderer.fingerprint,
      'vocab_size': policy.model.vocab_size,
      'version': posttrain.__version__,
    }

  async def health(self, request: requests.Request) -> responses.Response:
    """Returns the worker's counts; 503 once it accepts no more jobs."""
    failure = self._worker.failure
    status = 'ok' if failure is None else failure.message
    return _json(
      {'status': status, **self._worker.counts()},
      200 if failure is None else 503,
    )

  async def models(self, request: requests.Request) -> responses.Response:
    """Returns the list of the one model."""
    return _json({'object': 'list', 'data': [self._model]})

  async def model(self, request: requests.Request) -> responses.Response:
    """Returns the model of a name."""
    protocol.check_model(request.path_params['name'], self._worker.name)
    return _json(self._model)

  async def respond(
    self, request: requests.Request, answer: Callable[[bytes], Any]
  ) -> responses.Response:
    """Reads a body, and answers it while the client is there."""
    content = await read_body(request, self._max_body_bytes)

    async def disconnect():
      while (await request.receive())['type'] != 'http.disconnect':
        pass

    task = asyncio.create_task(answer(content))
    left = asyncio.create_task(disconnect())
    try:
      await asyncio.wait((task, left), return_when=asyncio.FIRST_COMPLETED)
      if not task.done():
        return responses.Response(status_code=499)  # nobody reads it
      return task.result()
    except worker.Full as error:
      raise protocol.Refused(
        429,
        f"the server's queue must not be full: got {error} under way; try "
        'again later',
        code='rate_limit_exceeded',
      ) from error
    finally:
      task.cancel()
      left.cancel()
      await asyncio.gather(task, left, return_exceptions=True)

  async def _answer(self, content: bytes, chat: bool) -> responses.Response:
    parsed = await asyncio.to_thread(
      protocol.read, content, self._worker, chat=chat
    )
    job = call.Call(parsed, self._worker)
    if parsed.stream:
      return _Stream(job)
    try:
      return await asyncio.to_thread(_json, await job.finished())
    finally:
      job.close()

  async def _score(self, content: bytes) -> responses.Response:
    """Scores by a reward model, in the form of vLLM's /pooling."""
    ids = await asyncio.to_thread(protocol.read_scored, content, self._worker)
    reward = await call.reward(ids, self._worker)
    data = [{'index': 0, 'object': 'pooling', 'data': [reward]}]
    return _json({'object': 'list', 'model': self._worker.name, 'data': data})


class _Stream(responses.StreamingResponse):
  """A call's chunks as server-sent events; the last one is [DONE]."""

  def __init__(self, job: call.Call):
    super().__init__(
      self._events(),
      media_type='text/event-stream',
      headers={'Cache-Control': 'no-cache'},
    )
    self._call = job

  async def __call__(self, scope, receive, send) -> None:
    try:
      await super().__call__(scope, receive, send)
    finally:  # also if the client has disconnected before the first chunk
      self._call.close()

  async def _events(self) -> AsyncIterator[str]:
    try:
      async with contextlib.aclosing(self._call.chunks()) as chunks:
        async for chunk in chunks:
          yield f'data: {_dumps(chunk)}\n\n'
          await asyncio.sleep(0)  # sending waits only for slow clients
      yield 'data: [DONE]\n\n'
    except protocol.Refused as error:  # too late for a status
      yield f'data: {_dumps(error.body)}\n\n'


def _dumps(value: Any) -> str:
  # ASCII: text may contain lone surrogates, which UTF-8 cannot encode.
  return json.dumps(value, allow_nan=False, separators=(',', ':'))


def _json(value: Any, status: int = 200, headers=None) -> responses.Response:
  return responses.Response(_dumps(value), status, headers, media_type=_JSON)


async def error_response(request, error: Exception) -> responses.Response:
  """Returns the response to an exception; see Starlette's handlers."""
  headers = {}
  if isinstance(error, exceptions.HTTPException):  # of no route
    path = request.scope.get('path', '')  # a URL needs a Host that is one
    got, headers = errors.quote(f'{request.method} {path}'), error.headers
    message = f'the path and its method must be ones of the API: got {got}'
    error = protocol.Refused(error.status_code, message)
  elif not isinstance(error, protocol.Refused):
    logging.getLogger('absl').error('a request failed', exc_info=error)
    error = protocol.Refused(500, "the server failed; see the server's log")
  elif error.status == 401:
    headers = {'WWW-Authenticate': 'Bearer'}
  elif error.status == 429:
    headers = {'Retry-After': '1'}
  return _json(error.body, error.status, headers)


class Server(uvicorn.Server):
  """Serves an application on a socket until `leave`."""

  def __init__(self, app: types.ASGIApp, engine: Any):
    """Configures uvicorn.

    Args:
      app: the application, from `make`.
      engine: the application's worker, started, or its sampler.
    """
    super().__init__(
      uvicorn.Config(
        app,
        log_level='error',
        access_log=False,
        lifespan='off',
        ws='none',
        http='h11',
        h11_max_incomplete_event_size=MAX_HEAD,
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=LEAVE,
      )
    )
    self._worker = engine
    self._owed: dict[Any, tuple[str, Any, float]] = {}
    self.code = 0  # the exit code

  def handle_exit(self, sig: int, frame: Any) -> None:
    """Handles a signal; uvicorn's own way ends the process by the signal."""
    if self.should_exit:
      os._exit(self.code)
    self.code = errors.INTERRUPTED if sig == signal.SIGINT else 0
    self.leave()

  def leave(self) -> None:
    """Starts the shutdown; works in any thread, and in a signal handler."""
    self.should_exit = True
    # Not here: the interrupted code may hold the worker's lock.
    threading.Thread(target=self._worker.stop, args=(0.0,)).start()

  async def on_tick(self, counter: int) -> bool:
    """Closes connections that have kept the server waiting for too long."""
    now, before, self._owed = time.monotonic(), self._owed, {}
    for connection in list(self.server_state.connections):
      cycle = connection.cycle
      if connection.flow.write_paused:
        owed = 'read'
      elif cycle is None or cycle.response_complete:
        owed = 'head'
      elif cycle.more_body:
        owed = 'body'
      else:
        continue
      since = before.get(connection, ())
      if since[:2] != (owed, cycle):
        since = (owed, cycle, now)
      self._owed[connection] = since
      if now - since[2] > OWED[owed]:
        connection.transport.abort()
    return await super().on_tick(counter)
