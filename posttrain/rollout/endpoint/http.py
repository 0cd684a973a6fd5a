"""Requests to a server that may be busy, slow, or temporarily away.

1. A request is sent by one of the client's `concurrency` threads, under limits
   of time and size (`channel`).
2. Status 429 and 5xx, an aborted response, and no whole response are retried
   after a wait, `tries` times in all; every wait is logged with the caller's
   name. Every other refusal is an error at once.
3. What a server sends is quoted by `foreign`: shortened, and without the key.
   Its own exceptions are not chained, since tracebacks would show them whole.
"""

import concurrent.futures
import datetime
import email.utils
import logging
import math
import random
import threading
from collections.abc import Callable, Iterable
from typing import Any

import httpx

from posttrain import schema
from posttrain.rollout.endpoint import channel
from posttrain.util import foreign, json_files, watchdog

# The largest answer: the ids, texts and logprobs of some tokens, and the rest.
# vLLM takes about 100 bytes per token, many more where a text is escaped.
_BYTES, _BYTES_PER_TOKEN = 2**22, 2**11
_MAX_RETRY_AFTER = 100  # characters of the header
_SHORTEST, _LONGEST = 1.0, 30.0  # seconds between tries
_LONGEST_RETRY_AFTER = 600.0  # seconds that a server may request
_NOT_IMPLEMENTED = 501  # permanent, unlike the other 5xx
_HINTS = {
  401: "; name the variable with the server's key in api_key_env",
  403: "; name the variable with the server's key in api_key_env",
  404: '; check name, and that base_url ends where the API begins, as in /v1',
}


class EndpointError(RuntimeError):
  """A server that does not answer, refuses, or gives an invalid answer.

  `status` is the HTTP status of an answer; None = no answer.
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
    self._cfg = cfg
    self._closed = threading.Event()
    self._sleep = sleep or self._closed.wait
    self._channel = channel.Channel(cfg, transport)
    self._pool = concurrent.futures.ThreadPoolExecutor(
      cfg.concurrency, 'endpoint'
    )

  def close(self) -> None:
    """Ends waits, drops requests that have not begun, closes connections."""
    self._closed.set()
    self._pool.shutdown(wait=False, cancel_futures=True)
    self._channel.close()

  def submit(
    self, fn: Callable[..., Any], *args: Any
  ) -> concurrent.futures.Future:
    """Calls a function that sends requests in one of the threads.

    Raises:
      EndpointError: `close` was called.
    """
    try:
      return self._pool.submit(fn, *args)
    except RuntimeError as error:
      if not self._closed.is_set():
        raise
      raise EndpointError(f'{self._cfg} must be open: got closed') from error

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
    return self._request('GET', url, None, caller, 0)

  def post(
    self, url: str, body: dict[str, Any], caller: str, tokens: int = 0
  ) -> dict[str, Any]:
    """Returns the JSON object of the server's response.

    Args:
      url: the request's URL.
      body: sent as JSON.
      caller: the caller's name in logs and errors, as in 'environment sums'.
      tokens: the tokens that the response may be about; they bound its size.

    Raises:
      EndpointError: the last try failed, the server refuses, or its response
        is too large or no JSON object.
    """
    return self._request('POST', url, body, caller, tokens)

  def _request(
    self,
    method: str,
    url: str,
    body: dict[str, Any] | None,
    caller: str,
    tokens: int,
  ) -> dict[str, Any]:
    tries, max_bytes = self._cfg.tries, _BYTES + _BYTES_PER_TOKEN * tokens
    reason = None
    for attempt in range(1, tries + 1):
      try:
        return self._once(method, url, body, caller, max_bytes)
      except _Busy as busy:
        reason = busy
      if attempt < tries:
        self._wait(reason, attempt, caller)
    raise EndpointError(
      f'{self._cfg} must answer {caller}: got {reason} at the last of {tries} '
      'tries; start the server again, or raise timeout or tries'
    )

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
    with watchdog.waiting(lambda: f'{self._cfg} for {caller}: {reason}'):
      self._sleep(seconds)

  def _once(
    self,
    method: str,
    url: str,
    body: dict[str, Any] | None,
    caller: str,
    max_bytes: int,
  ) -> dict[str, Any]:
    try:
      if self._closed.is_set():
        raise channel.Closed
      with watchdog.waiting(lambda: f'{self._cfg} for {caller}'):
        answer = self._channel.request(method, url, body, max_bytes)
    except channel.NoAnswer as error:
      raise _Busy(str(error)) from None
    except channel.BadAnswer as error:
      raise EndpointError(
        f'{self._cfg} must {error}, for {caller} at {url}', error.status
      ) from None
    except channel.Closed:
      raise EndpointError(
        f'{self._cfg} must be open for {caller}: got closed'
      ) from None
    status = answer.status
    if status == 429 or status >= 500 and status != _NOT_IMPLEMENTED:
      seconds = _retry_after(answer.headers.get('Retry-After', ''))
      raise _Busy(f'status {status}: {_message(answer)}', seconds)
    if status != 200:
      raise EndpointError(
        f'{self._cfg} must accept the request of {caller} to {url}: got status '
        f'{status}: {_message(answer)}{_hint(answer)}',
        status,
      )
    return self._read(answer, max_bytes)

  def _read(self, answer: channel.Answer, max_bytes: int) -> dict[str, Any]:
    problem = ''
    try:
      body = json_files.parse(answer.body, 'the answer', max_bytes)
    except ValueError as error:
      body, problem = None, f'; {error}'
    if not isinstance(body, dict):
      start = answer.body[:4096].decode(errors='replace')
      raise EndpointError(
        f'{self._cfg} must answer with a JSON object: got '
        f'{foreign.quote(start or answer.reason)}{problem}; check that '
        'base_url is that of an OpenAI-compatible API',
        answer.status,
      )
    choices = body.get('choices')
    if isinstance(choices, list) and any(
      isinstance(choice, dict) and choice.get('finish_reason') == 'abort'
      for choice in choices
    ):
      raise _Busy('an aborted response')  # the server shuts down
    return body


def _message(answer: channel.Answer) -> str:
  """Returns the error message of a refusal; servers use several forms."""
  try:
    message = json_files.parse(answer.body, 'the answer')
  except ValueError:
    message = answer.body.decode(errors='replace')
  for key in ('error', 'message', 'detail'):
    if isinstance(message, dict) and message.get(key):
      message = message[key]
  return foreign.text(message).strip() or foreign.text(answer.reason)


def _hint(answer: channel.Answer) -> str:
  place = answer.headers.get('Location')
  if 300 <= answer.status < 400 and place:
    return f'; name the address itself: {foreign.quote(place)} is not followed'
  return _HINTS.get(answer.status, '')


def _retry_after(text: str) -> float | None:
  """Returns the seconds of Retry-After; None if absent or invalid."""
  try:
    seconds = float(text[:_MAX_RETRY_AFTER])
  except ValueError:
    try:
      until = email.utils.parsedate_to_datetime(text[:_MAX_RETRY_AFTER])
      if until.tzinfo is None:  # '-0000': in UTC as well
        until = until.replace(tzinfo=datetime.UTC)
      now = datetime.datetime.now(datetime.UTC)
      seconds = (until - now).total_seconds()
    except (ValueError, TypeError, IndexError, OverflowError):
      return None
  if math.isnan(seconds):
    return None
  return min(seconds, _LONGEST_RETRY_AFTER)
