"""One HTTP request and its answer, under limits of time and size.

1. An exchange has a deadline, up to the last byte of the body (`loops`).
2. A body is decoded while it arrives, up to a number of bytes. Only gzip is
   offered: a piece of it is decoded under the limit, too.
3. Redirects are not followed: the key is for the named server alone. Cookies
   are not kept: they would grow.
"""

import base64
import concurrent.futures
import http.cookiejar
import json
import os
import zlib
from typing import Any, NamedTuple

import httpx

from posttrain import schema
from posttrain.util import foreign, loops

_REFUSAL_BYTES = 2**16  # read from an answer that is no success
_SUCCESS = 200


class NoAnswer(Exception):
  """No whole answer; another try may have one."""


class BadAnswer(Exception):
  """An answer that is over the limits, or cannot be decoded; its status."""

  def __init__(self, text: str, status: int):
    super().__init__(text)
    self.status = status


class Closed(Exception):
  """`close` was called."""


class Answer(NamedTuple):
  """A server's answer."""

  status: int
  reason: str  # the words of the status line
  headers: httpx.Headers
  body: bytes  # the start alone unless the status is 200


class Channel:
  """The connections to one server; thread-safe."""

  def __init__(
    self, cfg: schema.Endpoint, transport: httpx.AsyncBaseTransport | None
  ):
    """Reads the key; sends nothing yet.

    Args:
      cfg: the server and its timeout.
      transport: carries the requests; None = the network.

    Raises:
      ValueError: the address is invalid, or the environment variable has no
        valid API key.
    """
    self._timeout, self._calls = cfg.timeout, loops.Calls()
    try:
      httpx.URL(cfg.address)
    except httpx.InvalidURL as error:
      raise _invalid(cfg.address, error) from None
    self._http = httpx.AsyncClient(
      headers={'Accept-Encoding': 'gzip', **_headers(cfg.api_key_env)},
      auth=_auth(cfg.base_url),
      transport=transport,
      timeout=None,  # one clock for the whole exchange
      limits=httpx.Limits(max_connections=cfg.concurrency),
      follow_redirects=False,
      cookies=http.cookiejar.CookieJar(
        http.cookiejar.DefaultCookiePolicy(allowed_domains=())
      ),
    )

  def close(self) -> None:
    """Ends the exchanges and closes the connections."""
    self._calls.cancel()
    loops.start(self._http.aclose())

  def request(
    self, method: str, url: str, body: dict[str, Any] | None, max_bytes: int
  ) -> Answer:
    """Sends a request and returns the answer.

    Args:
      method: 'GET' or 'POST'.
      url: the request's URL, without user and password.
      body: sent as JSON; None = none.
      max_bytes: the largest body of an answer, decoded.

    Raises:
      NoAnswer: there is none in time, or it ends early.
      BadAnswer: it is larger, or has another encoding.
      Closed: `close` was called.
      ValueError: the URL is invalid.
    """
    content = None if body is None else json.dumps(body).encode()
    exchange = self._exchange(method, url, content, max_bytes)
    try:
      return self._calls.run(exchange, self._timeout)
    except concurrent.futures.CancelledError:
      raise Closed from None
    except (TimeoutError, httpx.TimeoutException):
      raise NoAnswer(f'no answer within {self._timeout:g} s') from None
    except httpx.UnsupportedProtocol as error:
      raise _invalid(url, error) from None
    except (httpx.HTTPError, OSError) as error:
      # The text may have a part of the answer, such as an invalid header.
      text = foreign.text(error).rstrip('.') or foreign.kind(error)
      raise NoAnswer(text) from None

  async def _exchange(self, method, url, content, max_bytes) -> Answer:
    headers = {} if content is None else {'Content-Type': 'application/json'}
    async with self._http.stream(
      method, url, content=content, headers=headers
    ) as response:
      whole = response.status_code == _SUCCESS
      return Answer(
        response.status_code,
        response.reason_phrase,
        response.headers,
        await _read(response, max_bytes if whole else _REFUSAL_BYTES, whole),
      )


async def _read(response: httpx.Response, most: int, whole: bool) -> bytes:
  """Returns the decoded body; `whole`: a larger one raises, else is cut."""
  status = response.status_code
  coding = response.headers.get('Content-Encoding', '').strip().lower()
  if coding not in ('', 'identity', 'gzip', 'x-gzip'):
    if not whole:
      return b''
    raise BadAnswer(
      'answer without an encoding or in gzip: got Content-Encoding '
      f'{foreign.quote(coding, 80)}',
      status,
    )
  inflate = (
    zlib.decompressobj(zlib.MAX_WBITS | 16) if 'gzip' in coding else None
  )
  body, size = bytearray(), 0
  async for piece in response.aiter_raw():
    size += len(piece)
    try:
      # At most one byte over the limit, however much a piece expands to.
      body += (
        inflate.decompress(piece, most + 1 - len(body)) if inflate else piece
      )
    except zlib.error as error:
      if not whole:
        break
      raise BadAnswer(f'answer in gzip as it says: {error}', status) from None
    if max(size, len(body)) > most:
      if not whole:
        break
      raise BadAnswer(
        f'answer with at most {most} bytes, decoded: got more', status
      )
  if whole and inflate and body and not inflate.eof:
    raise NoAnswer('an answer in gzip that ends early')
  return bytes(body[:most])


def _headers(variable: str) -> dict[str, str]:
  """Returns the header with the key of an environment variable."""
  if not variable:
    return {}
  key = os.environ.get(variable, '')
  foreign.mask(key)
  # Errors never show the key itself.
  if not (key and key.isascii() and key.isprintable() and ' ' not in key):
    got = 'one with other characters' if key else 'none'
    raise ValueError(
      f'api_key_env must name an environment variable with a key in it: got '
      f"{got} in {variable!r}; export it, or set api_key_env to ''"
    )
  return {'Authorization': f'Bearer {key}'}


def _auth(base_url: str) -> httpx.BasicAuth | None:
  """Returns the user and password of an address; masks the password."""
  try:
    url = httpx.URL(base_url)
  except httpx.InvalidURL:  # its text may have a part of the password
    raise ValueError(
      'base_url must be an address, with user and password percent-encoded: '
      'got another'
    ) from None
  if not url.userinfo:
    return None
  header = base64.b64encode(f'{url.username}:{url.password}'.encode())
  for secret in (url.password, header.decode()):
    foreign.mask(secret)
  return httpx.BasicAuth(url.username, url.password)


def _invalid(url: str, error: Exception) -> ValueError:
  return ValueError(
    f'base_url must be an address: got {foreign.quote(url)}; '
    f'{foreign.text(error)}'
  )
