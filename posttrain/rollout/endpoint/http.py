"""Requests to a server that may be busy, slow, or away for a while.

1. A request is sent by one of `concurrency` threads, which all who share a
   client share.
2. Status 429 and 5xx, an answer that breaks off, and no answer at all are
   waited out and tried again, `tries` times in all; every wait says who waits
   for what. Every other refusal is an error at once.
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
_LONGEST_ASKED = 600.0  # that a server may ask for
_NOT_IMPLEMENTED = 501  # stays so, unlike the other 5xx
_HINTS = {
  401: "; name the variable with the server's key in api_key_env",
  403: "; name the variable with the server's key in api_key_env",
  404: '; check name, and that base_url ends where the API begins, as in /v1',
}


class EndpointError(RuntimeError):
  """A server does not answer, or refuses.

  `status` is the HTTP status of a refusal; None = no answer was to be had.
  """

  def __init__(self, message: str, status: int | None = None):
    super().__init__(message)
    self.status = status


class _Busy(Exception):
  """Another try may help; after so many seconds, if the server says so."""

  def __init__(self, words: str, seconds: float | None = None):
    super().__init__(words)
    self.seconds = seconds


class Client:
  """Asks one server; threads may share it."""

  def __init__(
    self,
    cfg: schema.Endpoint,
    *,
    transport: httpx.BaseTransport | None = None,
    sleep: Callable[[float], object] | None = None,
  ):
    """Asks for nothing yet.

    Args:
      cfg: which server, and how patiently.
      transport: carries the requests; None = the network.
      sleep: waits so many seconds; None = and ends with `close`.

    Raises:
      ValueError: there is no API key where the config says.
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
    """Ends waits, drops requests that have not begun, and hangs up."""
    self._closed.set()
    self._pool.shutdown(wait=False, cancel_futures=True)
    self._http.close()

  def submit(
    self, ask: Callable[..., Any], *args: Any
  ) -> concurrent.futures.Future:
    """Calls a function that sends requests, in one of the threads."""
    return self._pool.submit(ask, *args)

  def result(self, future: concurrent.futures.Future) -> Any:
    """What came of a call; EndpointError where `close` dropped it."""
    try:
      return future.result()
    except concurrent.futures.CancelledError as error:
      raise EndpointError(f'{self._cfg} must be open: got closed') from error

  def each(
    self, ask: Callable[..., Any], jobs: Iterable[tuple[Any, ...]]
  ) -> list[Any]:
    """Calls it with the arguments of each job; returns the results in order.

    The first error in that order is raised; what has not begun is dropped.
    """
    futures = [self.submit(ask, *job) for job in jobs]
    try:
      return [self.result(future) for future in futures]
    finally:
      for future in futures:
        future.cancel()

  def get(self, url: str, who: str) -> dict[str, Any]:
    """Returns the JSON that lies there; see `post`."""
    return self._ask('GET', url, None, who)

  def post(self, url: str, body: dict[str, Any], who: str) -> dict[str, Any]:
    """Returns the server's answer.

    Args:
      url: of the request.
      body: sent as JSON.
      who: waits for the answer, as in 'environment sums'.

    Raises:
      EndpointError: the last try failed, or the server refuses.
    """
    return self._ask('POST', url, body, who)

  def _ask(
    self, method: str, url: str, body: dict[str, Any] | None, who: str
  ) -> dict[str, Any]:
    tries = self._cfg.tries
    for tried in range(1, tries + 1):
      try:
        return self._once(method, url, body, who)
      except _Busy as busy:
        reason = busy
      if tried < tries:
        self._wait(reason, tried, who)
    raise EndpointError(
      f'{self._cfg} must answer {who}: got {reason} at the last of {tries} '
      'tries; start the server again, or raise timeout or tries'
    ) from reason

  def _wait(self, reason: _Busy, tried: int, who: str) -> None:
    # Half of it by chance: those whom a server turned away come back apart.
    longest = min(_LONGEST, 2 * _SHORTEST * 2.0 ** min(tried - 1, 16))
    seconds = longest * random.uniform(0.5, 1)
    if reason.seconds is not None:
      # Not sooner than asked; a server may ask for a second for ever.
      seconds = max(seconds, reason.seconds)
    logging.getLogger('absl').warning(
      '%s waits for %s: %s; try %d of %d, next in %.3g s',
      who,
      self._cfg,
      reason,
      tried,
      self._cfg.tries,
      seconds,
    )
    self._sleep(seconds)

  def _once(
    self, method: str, url: str, body: dict[str, Any] | None, who: str
  ) -> dict[str, Any]:
    if self._closed.is_set():
      raise EndpointError(f'{self._cfg} must be open for {who}: got closed')
    try:
      response = self._http.request(method, url, json=body)
    except httpx.TimeoutException as error:
      words = f'no answer within {self._cfg.timeout:g} s'
      raise _Busy(words) from error
    except httpx.UnsupportedProtocol as error:
      raise ValueError(f'base_url must be an address: {error}') from None
    except httpx.RequestError as error:
      words = str(error).rstrip('.') or type(error).__name__
      raise _Busy(words) from error
    status = response.status_code
    if status == 429 or status >= 500 and status != _NOT_IMPLEMENTED:
      raise _Busy(f'status {status}: {_words(response)}', _asked(response))
    if status != 200:
      raise EndpointError(
        f'{self._cfg} must accept what {who} asks of {url}: got status '
        f'{status}: {_words(response)}{_HINTS.get(status, "")}',
        status,
      )
    return self._read(response)

  def _read(self, response: httpx.Response) -> dict[str, Any]:
    try:
      answer = response.json()
    except ValueError:
      answer = None
    if not isinstance(answer, dict):
      raise EndpointError(
        f'{self._cfg} must answer with a JSON object: got '
        f'{_words(response)!r}; check that base_url is that of an '
        'OpenAI-compatible API',
        response.status_code,
      )
    choices = answer.get('choices')
    if isinstance(choices, list) and any(
      isinstance(choice, dict) and choice.get('finish_reason') == 'abort'
      for choice in choices
    ):
      raise _Busy('an answer that the server broke off')  # it shuts down
    return answer


def _headers(variable: str) -> dict[str, str]:
  """The key that lies in an environment variable, as a header."""
  if not variable:
    return {}
  key = os.environ.get(variable, '')
  # The key itself is shown nowhere.
  if not (key and key.isascii() and key.isprintable() and ' ' not in key):
    got = 'one with other characters' if key else 'none'
    raise ValueError(
      f'api_key_env must name an environment variable with a key in it: got '
      f"{got} in {variable!r}; export it, or set api_key_env to ''"
    )
  return {'Authorization': f'Bearer {key}'}


def _words(response: httpx.Response) -> str:
  """What the server says of its refusal: several forms are about."""
  try:
    said = response.json()
  except ValueError:
    said = response.text
  for key in ('error', 'message', 'detail'):
    if isinstance(said, dict) and said.get(key):
      said = said[key]
  return str(said)[:500].strip() or response.reason_phrase


def _asked(response: httpx.Response) -> float | None:
  """Seconds that the server asks to be left alone for; None = it does not."""
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
  return min(seconds, _LONGEST_ASKED)
