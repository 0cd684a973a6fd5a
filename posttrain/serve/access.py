"""Who may send requests: the API key, the Host header, the content type.

A web page can make a browser send requests to this machine. Without a key two
rules keep pages out: bodies are `application/json`, which no page may send to
another origin without asking first, and a server on a loopback address answers
only to its own names, so that a page cannot give its own name this address
(DNS rebinding). On another address the names are those that are given, if any.
"""

import hmac
import ipaddress
import re
import socket
from collections.abc import Sequence

from starlette import requests

from posttrain.serve import fields
from posttrain.util import foreign

_JSON = 'application/json'
_HOST = re.compile(r'(?:\[([\da-fA-F:.]+)\]|([\w.-]+))(?::\d*)?', re.ASCII)


def is_loopback(host: str) -> bool:
  """Returns whether an IP address is reachable from this machine only."""
  try:
    return ipaddress.ip_address(host.partition('%')[0]).is_loopback
  except ValueError:
    return False


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
  further = [name.strip().lower() for name in further if name.strip()]
  for name in further:
    if not _is_name(name):
      raise ValueError(
        '--allowed_hosts must be names or addresses without ports: got '
        f'{foreign.quote(name, 80)}'
      )
  bound = listening.getsockname()[0]
  if not further and not is_loopback(bound):
    return None
  own = [] if ipaddress.ip_address(bound).is_unspecified else [bound]
  return frozenset(['localhost', '127.0.0.1', '::1', *own, *further])


class Access:
  """The rules of one server."""

  def __init__(
    self, api_key: str | None = None, hosts: frozenset[str] | None = None
  ):
    """Stores the rules.

    Args:
      api_key: the key that requests must have; None = no key.
      hosts: names that the Host header may have; None = any.
    """
    self._api_key, self._hosts = api_key, hosts
    if api_key:
      foreign.mask(api_key)

  def check_host(self, request: requests.Request) -> None:
    """Raises Refused if the Host header is another server's."""
    if self._hosts is None:
      return
    host = request.headers.get('host', '')
    if _name(host) not in self._hosts:
      raise fields.Refused(
        403,
        f'the header Host must be one of {sorted(self._hosts)}: got '
        f'{foreign.quote(host, 80)}; --allowed_hosts adds names',
        code='invalid_host',
      )

  def check(self, request: requests.Request) -> None:
    """Raises Refused without the key."""
    if self._api_key is None:
      return
    kind, _, key = request.headers.get('authorization', '').partition(' ')
    same = hmac.compare_digest(key.strip().encode(), self._api_key.encode())
    if kind.lower() != 'bearer' or not same:
      raise fields.Refused(
        401,
        "the header Authorization must be 'Bearer' and the server's "
        f'API key: got {"another key" if key else "none"}',
        code='invalid_api_key',
      )

  def check_json(self, request: requests.Request) -> None:
    """Raises Refused unless the body is declared to be JSON."""
    kind = request.headers.get('content-type', '')
    if kind.partition(';')[0].strip().lower() != _JSON:
      raise fields.Refused(
        415,
        f'the header Content-Type must be {_JSON}: got '
        f'{foreign.quote(kind, 80) if kind else "none"}',
        code='unsupported_media_type',
      )


def _is_name(name: str) -> bool:
  """Returns whether `_name` may return a name."""
  try:
    return bool(ipaddress.ip_address(name))
  except ValueError:
    return _name(name) == name


def _name(host: str) -> str:
  """Returns the name in a Host header, without the port; '' if it has none."""
  match = _HOST.fullmatch(host)
  return '' if match is None else (match[1] or match[2]).lower()
