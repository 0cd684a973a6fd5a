"""Requests to a server that may be busy, slow, or temporarily away.

1. A request is sent by one of the client's `concurrency` threads.
2. Status 429 and 5xx, an aborted response, and no response are retried after a
   wait, `tries` times in all; every wait is logged with the caller's name.
   Every other refusal is an error at once.
"""

import concurrent.futures
import datetime
import email.utils
import logging
import math
import os
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from posttrain import schema

_SHORTEST, _LONGEST = 1.0, 30.0  # seconds between tries
_LONGEST_RETRY_AFTER = 600.0  # seconds that a server may request
_NOT_IMPLEMENTED = 501  # permanent, unlike the other 5xx
_HINTS = {
  401: "; name the variable with the server's key in api_key_env",
  403: "; name the variable with the server's key in api_key_env",
  404: '; check name, and that base_url ends where the API begins, as in /v1',
}


class EndpointError(RuntimeError):
  """A server that does not answer, or refuses.

  `status` is the HTTP status of a refusal; None = no response.
  """

  def __init__(self, message: str, status: int | None = None):
    super().__init__(message)
    self.status = status


class _Busy(Exception):
  """A failure to retry; `seconds`: the server's Retry-After, if any."""

  def __init__(self, text: str, seconds: float | None = None):
    super().__init__(text)
    self.seconds = seconds


class Client:
  """The HTTP client of one server; thread-safe."""

  def __init__(
    self,
    cfg: schema.Endpoint,
    *,
    transport: httpx.BaseTransport | None = None,
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
    self._cfg = cfg
    self._closed = threading.Event()
    self._sleep = sleep or self._closed.wait
    try:
      self._http = httpx.Client(
        headers=_headers(cfg.api_key_env),
        transport=transport,
        timeout=httpx.Timeout(cfg.timeout, pool=None),
        limits=httpx.Limits(max_connections=cfg.concurrency),
      )
      httpx.URL(cfg.base_url)
    except httpx.InvalidURL as error:
      raise ValueError(
        f'base_url must be an address: got {cfg.base_url!r}; {error}'
      ) from None
    self._pool = concurrent.futures.ThreadPoolExecutor(
      cfg.concurrency, 'endpoint'
    )

  def close(self) -> None:
    """Ends waits, drops requests that have not begun, closes connections."""
    self._closed.set()
    self._pool.shutdown(wait=False, cancel_futures=True)
    self._http.close()

  def submit(
    self, fn: Callable[..., Any], *args: Any
  ) -> concurrent.futures.Future:
    """Calls a function that sends requests in one of the threads."""
    return self._pool.submit(fn, *args)

  def result(self, future: concurrent.futures.Future) -> Any:
    """Returns a call's result; EndpointError if `close` dropped the call."""
    try:
      return future.result()
    except concurrent.futures.CancelledError as error:
      raise EndpointError(f'{self._cfg} must be open: got closed') from error

  def each(
    self, fn: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
  ) -> list[Any]:
    """Calls a function with the arguments of each job; returns the results.

    Raises the first error in the order of jobs, and drops the calls that have
    not begun.
    """
    futures = [self.submit(fn, *job) for job in jobs]
    try:
      return [self.result(future) for future in futures]
    finally:
      for future in futures:
        future.cancel()

  def get(self, url: str, caller: str) -> dict[str, Any]:
    """Returns the JSON object at a URL; see `post`."""
    return self._request('GET', url, None, caller)

  def post(self, url: str, body: dict[str, Any], caller: str) -> dict[str, Any]:
    """Returns the JSON object of the server's response.

    Args:
      url: the request's URL.
      body: sent as JSON.
      caller: the caller's name in logs and errors, as in 'environment sums'.

    Raises:
      EndpointError: the last try failed, or the server refuses.
    """
    return self._request('POST', url, body, caller)

  def _request(
    self, method: str, url: str, body: dict[str, Any] | None, caller: str
  ) -> dict[str, Any]:
    tries = self._cfg.tries
    for attempt in range(1, tries + 1):
      try:
        return self._once(method, url, body, caller)
      except _Busy as busy:
        reason = busy
      if attempt < tries:
        self._wait(reason, attempt, caller)
    raise EndpointError(
      f'{self._cfg} must answer {caller}: got {reason} at the last of {tries} '
      'tries; start the server again, or raise timeout or tries'
    ) from reason

  def _wait(self, reason: _Busy, attempt: int, caller: str) -> None:
    # Half of it is random, so that refused requests do not return all at once.
    longest = min(_LONGEST, 2 * _SHORTEST * 2.0 ** min(attempt - 1, 16))
    seconds = longest * random.uniform(0.5, 1)
    if reason.seconds is not None:
      # At least Retry-After; a server may always send 1 second.
      seconds = max(seconds, reason.seconds)
    logging.getLogger('absl').warning(
      '%s waits for %s: %s; try %d of %d, next in %.3g s',
      caller,
      self._cfg,
      reason,
      attempt,
      self._cfg.tries,
      seconds,
    )
    self._sleep(seconds)

  def _once(
    self, method: str, url: str, body: dict[str, Any] | None, caller: str
  ) -> dict[str, Any]:
    if self._closed.is_set():
      raise EndpointError(f'{self._cfg} must be open for {caller}: got closed')
    try:
      response = self._http.request(method, url, json=body)
    except httpx.TimeoutException as error:
      text = f'no answer within {self._cfg.timeout:g} s'
      raise _Busy(text) from error
    except httpx.UnsupportedProtocol as error:
      raise ValueError(f'base_url must be an address: {error}') from None
    except httpx.RequestError as error:
      text = str(error).rstrip('.') or type(error).__name__
      raise _Busy(text) from error
    status = response.status_code
    if status == 429 or status >= 500 and status != _NOT_IMPLEMENTED:
      seconds = _retry_after(response)
      raise _Busy(f'status {status}: {_message(response)}', seconds)
    if status != 200:
      raise EndpointError(
        f'{self._cfg} must accept the request of {caller} to {url}: got status '
        f'{status}: {_message(response)}{_HINTS.get(status, "")}',
        status,
      )
    return self._read(response)

  def _read(self, response: httpx.Response) -> dict[str, Any]:
    try:
      body = response.json()
    except ValueError:
      body = None
    if not isinstance(body, dict):
      raise EndpointError(
        f'{self._cfg} must answer with a JSON object: got '
        f'{_message(response)!r}; check that base_url is that of an '
        'OpenAI-compatible API',
        response.status_code,
      )
    choices = body.get('choices')
    if isinstance(choices, list) and any(
      isinstance(choice, dict) and choice.get('finish_reason') == 'abort'
      for choice in choices
    ):
      raise _Busy('an aborted response')  # the server shuts down
    return body


def _headers(variable: str) -> dict[str, str]:
  """Returns the header with the key of an environment variable."""
  if not variable:
    return {}
  key = os.environ.get(variable, '')
  # Errors never show the key itself.
  if not (key and key.isascii() and key.isprintable() and ' ' not in key):
    got = 'one with other characters' if key else 'none'
    raise ValueError(
      f'api_key_env must name an environment variable with a key in it: got '
      f"{got} in {variable!r}; export it, or set api_key_env to ''"
    )
  return {'Authorization': f'Bearer {key}'}


def _message(response: httpx.Response) -> str:
  """Returns the error message of a refusal; servers use several forms."""
  try:
    message = response.json()
  except ValueError:
    message = response.text
  for key in ('error', 'message', 'detail'):
    if isinstance(message, dict) and message.get(key):
      message = message[key]
  return str(message)[:500].strip() or response.reason_phrase


def _retry_after(response: httpx.Response) -> float | None:
  """Returns the seconds of Retry-After; None if absent or invalid."""
  text = response.headers.get('Retry-After', '')
  try:
    seconds = float(text)
  except ValueError:
    try:
      until = email.utils.parsedate_to_datetime(text)
    except ValueError:
      return None
    if until.tzinfo is None:  # '-0000': in UTC as well
      until = until.replace(tzinfo=datetime.UTC)
    now = datetime.datetime.now(datetime.UTC)
    seconds = (until - now).total_seconds()
  if math.isnan(seconds):
    return None
  return min(seconds, _LONGEST_RETRY_AFTER)
