"""Requests to a server that may be busy, slow, or temporarily away.

1. A request is sent by one of the client's `concurrency` threads, with one time
   limit up to the last byte of the response, and a limit of its size. Redirects
   are not followed: the key is for the named server alone.
2. Status 429 and 5xx, an aborted response, and no whole response are retried
   after a wait, `tries` times in all; every wait is logged with the caller's
   name. Every other refusal is an error at once.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import json
import logging
import os
import random
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator
from typing import Any

import httpx

from posttrain import schema
from posttrain.rollout import calls
from posttrain.util import disk, errors, watchdog

_lock = threading.Lock()


class Calls:
  """Coroutines that other threads wait for; `cancel` ends all of them."""

  def __init__(self):
    self._lock, self._cancelled = threading.Lock(), False
    self._running: set[concurrent.futures.Future] = set()

  def run(self, coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
    """Runs a coroutine in the loop; returns its result.

    Args:
      coroutine: of any thread; it must not block.
      seconds: the most time.

    Raises:
      TimeoutError: it took longer; it was cancelled.
      concurrent.futures.CancelledError: `cancel` was called.
    """
    with self._lock:
      if self._cancelled:
        coroutine.close()
        raise concurrent.futures.CancelledError
      future = start(_limited(coroutine, seconds))
      self._running.add(future)
    try:
      return future.result()
    finally:
      future.cancel()  # after an interrupt of this thread
      with self._lock:
        self._running.discard(future)

  def cancel(self) -> None:
    """Cancels all coroutines, also later ones."""
    with self._lock:
      self._cancelled = True
      running = tuple(self._running)
    for future in running:
      future.cancel()


def start(coroutine: Coroutine[Any, Any, Any]) -> concurrent.futures.Future:
  """Starts a coroutine in the loop."""
  with _lock:
    loop = _loop(os.getpid())
  return asyncio.run_coroutine_threadsafe(coroutine, loop)


async def _limited(coroutine: Coroutine[Any, Any, Any], seconds: float) -> Any:
  async with asyncio.timeout(seconds):
    return await coroutine


@functools.cache
def _loop(pid: int) -> asyncio.AbstractEventLoop:
  """Returns the loop of a process; a forked process has no thread of it."""
  del pid
  loop = asyncio.new_event_loop()
  threading.Thread(target=loop.run_forever, name='network', daemon=True).start()
  return loop


# The largest answer: the ids, texts and logprobs of some tokens, and the rest.
# vLLM takes about 100 bytes per token, many more where a text is escaped.
_BYTES, _BYTES_PER_TOKEN = 2**22, 2**11
_SHORTEST, _LONGEST = 1.0, 30.0  # seconds between tries
_LONGEST_RETRY_AFTER = 600.0  # seconds that a server may request
_NOT_IMPLEMENTED = 501  # permanent, unlike the other 5xx
_HINTS = {
  401: "; name the variable with the server's key in api_key_env",
  403: "; name the variable with the server's key in api_key_env",
  404: '; check name, and that base_url ends where the API begins, as in /v1',
}


EndpointError = calls.EndpointError


class _Busy(Exception):
  """A failure to retry; `seconds`: the server's Retry-After, if any."""

  def __init__(self, text: str, seconds: float = 0.0):
    super().__init__(text)
    self.seconds = seconds


class Client:
  """The HTTP client of one server; thread-safe."""

  def __init__(
    self,
    cfg: schema.Endpoint,
    *,
    transport: httpx.AsyncBaseTransport | None = None,
    sleep: Callable[[float], object] | None = None,
  ):
    """Makes a client; sends nothing yet.

    Args:
      cfg: the server, timeouts and tries.
      transport: carries the requests; None = the network.
      sleep: waits for some seconds; None = a wait that `close` ends.

    Raises:
      ValueError: the address is invalid, or the environment variable has no
        valid API key.
    """
    self._cfg, self._calls = cfg, Calls()
    self._closed = threading.Event()
    self._sleep = sleep or self._closed.wait
    headers = {'Content-Type': 'application/json'}
    if variable := cfg.api_key_env:
      key = os.environ.get(variable, '')
      # Errors never show the key itself.
      if not (key and key.isascii() and key.isprintable() and ' ' not in key):
        got = 'one with other characters' if key else 'none'
        raise ValueError(
          'api_key_env must name an environment variable with a key in it: got '
          f"{got} in {variable!r}; export it, or set api_key_env to ''"
        )
      headers['Authorization'] = f'Bearer {key}'
    try:
      url = httpx.URL(cfg.base_url)
    except httpx.InvalidURL:  # its text may have a part of the password
      url = None
    if url is None or not url.host:
      raise ValueError(
        'base_url must be an address, with user and password percent-encoded: '
        'got another'
      )
    self._http = httpx.AsyncClient(
      headers=headers,
      auth=(url.username, url.password) if url.userinfo else None,
      transport=transport,
      timeout=None,  # one clock for the whole exchange
      limits=httpx.Limits(max_connections=cfg.concurrency),
    )
    self._pool = concurrent.futures.ThreadPoolExecutor(
      cfg.concurrency, 'endpoint'
    )

  def close(self) -> None:
    """Ends waits, drops requests that have not begun, closes connections."""
    self._closed.set()
    self._pool.shutdown(wait=False, cancel_futures=True)
    self._calls.cancel()
    start(self._http.aclose())

  @contextlib.contextmanager
  def _open(self) -> Iterator[None]:
    """Raises EndpointError for a call that `close` ended or dropped."""
    try:
      yield
    except EndpointError:
      raise
    except (RuntimeError, concurrent.futures.CancelledError) as error:
      if not self._closed.is_set():
        raise
      raise EndpointError(f'{self._cfg} must be open: got closed') from error

  def submit(
    self, fn: Callable[..., Any], *args: Any
  ) -> concurrent.futures.Future:
    """Calls a function that sends requests in one of the threads.

    Raises:
      EndpointError: `close` was called.
    """
    with self._open():
      return self._pool.submit(fn, *args)

  def each(
    self, fn: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
  ) -> list[Any]:
    """Calls a function with the arguments of each job; returns the results.

    Raises the first error in the order of jobs, and drops the calls that have
    not begun.
    """
    with self._open():
      return list(self._pool.map(lambda job: fn(*job), jobs))

  def request(
    self, url: str, body: dict[str, Any] | None, caller: str, tokens: int = 0
  ) -> dict[str, Any]:
    """Returns the JSON object of the server's response.

    Args:
      url: the request's URL.
      body: sent as JSON, by POST; None = a GET.
      caller: the caller's name in logs and errors, as in 'environment sums'.
      tokens: the tokens that the response may be about; they bound its size.

    Raises:
      EndpointError: the last try failed, the server refuses, or its response
        is too large or no JSON object.
    """
    tries, most = self._cfg.tries, _BYTES + _BYTES_PER_TOKEN * tokens
    content = None if body is None else json.dumps(body).encode()
    attempt = 1
    while True:
      try:
        return self._once(url, content, caller, most)
      except _Busy as reason:
        if attempt == tries:
          raise EndpointError(
            f'{self._cfg} must answer {caller}: got {reason} at the last of '
            f'{tries} tries; start the server again, or raise timeout or tries'
          ) from None
        self._wait(reason, attempt, caller)
      attempt += 1

  def _wait(self, reason: _Busy, attempt: int, caller: str) -> None:
    # Half of it is random, so that refused requests do not return all at once.
    longest = min(_LONGEST, 2 * _SHORTEST * 2.0 ** min(attempt - 1, 16))
    # At least Retry-After; a server may always send 1 second.
    seconds = max(longest * random.uniform(0.5, 1), reason.seconds)
    logging.getLogger('absl').warning(
      '%s waits for %s: %s; try %d of %d, next in %.3g s',
      caller,
      self._cfg,
      reason,
      attempt,
      self._cfg.tries,
      seconds,
    )
    with watchdog.waiting(lambda: f'{self._cfg} for {caller}: {reason}'):
      self._sleep(seconds)

  def _once(
    self, url: str, content: bytes | None, caller: str, most: int
  ) -> dict[str, Any]:
    timeout = self._cfg.timeout
    try:
      if self._closed.is_set():
        raise concurrent.futures.CancelledError
      with watchdog.waiting(lambda: f'{self._cfg} for {caller}'):
        response, data = self._calls.run(
          self._exchange(url, content, most), timeout
        )
    except concurrent.futures.CancelledError:
      raise EndpointError(
        f'{self._cfg} must be open for {caller}: got closed'
      ) from None
    except (TimeoutError, httpx.TimeoutException):
      raise _Busy(f'no answer within {timeout:g} s') from None
    except (httpx.HTTPError, OSError) as error:
      raise _Busy(errors.text(error) or type(error).__name__) from None
    status = response.status_code
    if status == 429 or status >= 500 and status != _NOT_IMPLEMENTED:
      seconds = _retry_after(response.headers.get('Retry-After', ''))
      raise _Busy(f'status {status}: {_message(response, data)}', seconds)
    if status != 200:
      raise EndpointError(
        f'{self._cfg} must accept the request of {caller} to {url}: got status '
        f'{status}: {_message(response, data)}{_HINTS.get(status, "")}',
        status,
      )
    return self._read(data, most)

  async def _exchange(
    self, url: str, content: bytes | None, most: int
  ) -> tuple[httpx.Response, bytes]:
    """Returns the response and its body, decoded."""
    method, data = 'GET' if content is None else 'POST', bytearray()
    async with self._http.stream(method, url, content=content) as response:
      async for piece in response.aiter_bytes():
        data += piece
        if len(data) > most:
          raise EndpointError(
            f'{self._cfg} must answer with at most {most} bytes, decoded: got '
            'more',
            response.status_code,
          )
    return response, bytes(data)

  def _read(self, data: bytes, most: int) -> dict[str, Any]:
    problem = ''
    try:
      body = disk.parse_json(data, 'the answer')
    except ValueError as error:
      body, problem = None, f'; {error}'
    if not isinstance(body, dict):
      raise EndpointError(
        f'{self._cfg} must answer with a JSON object: got '
        f'{errors.quote(data[:4096].decode(errors="replace"))}{problem}; check '
        'that base_url is that of an OpenAI-compatible API',
        200,
      )
    choices = body.get('choices')
    if isinstance(choices, list) and any(
      isinstance(choice, dict) and choice.get('finish_reason') == 'abort'
      for choice in choices
    ):
      raise _Busy('an aborted response')  # the server shuts down
    return body


def _message(response: httpx.Response, data: bytes) -> str:
  """Returns the error message of a refusal; servers use several forms."""
  try:
    message = disk.parse_json(data, 'the answer')
  except ValueError:
    message = data[:4096].decode(errors='replace')
  for key in ('error', 'message', 'detail'):
    if isinstance(message, dict) and message.get(key):
      message = message[key]
  return errors.text(message).strip() or response.reason_phrase


def _retry_after(text: str) -> float:
  """Returns the seconds of Retry-After; 0 if absent, a date or invalid."""
  try:
    seconds = float(text)
  except ValueError:
    return 0.0
  return min(seconds, _LONGEST_RETRY_AFTER) if seconds > 0 else 0.0
