"""References: names of models that are used and not trained.

A string, in the grammar of `init`, is a model in this process; an `Endpoint` is
a model on a server.
"""

import dataclasses
import re
from typing import Annotated, Any

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A model on an OpenAI-compatible server."""

  # Which kind of reference this is; fixed.
  type: str = 'endpoint'
  # The model's name on the server.
  name: str = ''
  # Base URL of the API, such as 'http://127.0.0.1:8000/v1'.
  base_url: base.Server = ''
  # Name of the environment variable with the API key; '' = no key.
  api_key_env: base.Variable = ''
  # Time limit of a whole answer, from the request to its last byte, in seconds.
  timeout: float = 120.0
  # Number of attempts at a request, for a busy server, a server error or a
  # timeout; the pauses between them grow from 1 to 30 seconds, or are those of
  # the server's Retry-After, at most 600.
  tries: int = 10
  # Largest number of concurrent requests.
  concurrency: int = 16

  def __post_init__(self):
    base.require(bool(self.name), 'name', 'name a model', self.name)
    base.require(
      re.match(r'https?://[^/]', self.base_url) is not None,
      'base_url',
      "begin with 'http://' or 'https://' and a host",
      self.base_url,
      "it is the address of the server's API",
    )
    base.require_seconds(self, 'timeout')
    base.require_positive(self, 'tries', 'concurrency')

  @property
  def address(self) -> str:
    """`base_url` without its user and password, and without a last slash."""
    return re.sub(r'(?<=//)[^?#]*@', '', self.base_url).rstrip('/')

  def __str__(self) -> str:
    return f'{self.name} at {self.address}'


Reference = Annotated[str | Endpoint, 'folder']
ReferenceOrNone = Annotated[str | Endpoint | None, 'folder']

# Kind -> regex of its number: a decay in (0, 1), or at least 2 steps.
_EMA_AND_SNAPSHOT = {'ema': r'0\.\d*[1-9]\d*', 'snapshot': r'[2-9]|[1-9]\d+'}


def ema_or_snapshot(reference: Reference) -> tuple[str, float] | None:
  """Parses 'ema:DECAY' and 'snapshot:STEPS', copies of the policy in the state.

  Returns:
    The kind and its number; None for other references.
  """
  if not isinstance(reference, str):
    return None
  kind, _, number = reference.partition(':')
  if kind not in _EMA_AND_SNAPSHOT or not re.fullmatch(
    _EMA_AND_SNAPSHOT[kind], number
  ):
    return None
  return kind, float(number)


def is_path(name: str) -> bool:
  """Returns whether a reference, or an `init`, is a path."""
  known = name in ('init', 'policy', 'random') or name.startswith('stage:')
  return not known and ema_or_snapshot(name) is None


def require(node: Any, field: str) -> None:
  """Checks that a field is an endpoint, or a string in the grammar."""
  value = getattr(node, field)
  if isinstance(value, Endpoint):
    return
  base.require(
    not value.startswith(('http://', 'https://')),
    field,
    'be a node for a model on a server',
    value,
    '{"type": "endpoint", "name": ..., "base_url": ...}',
  )
  kind = value.partition(':')[0]
  base.require(
    value not in ('', 'random', 'stage:')
    and (kind not in _EMA_AND_SNAPSHOT or ema_or_snapshot(value) is not None),
    field,
    "be 'init', 'policy', 'ema:0.99', 'snapshot:50', 'stage:NAME', a "
    'path or an endpoint',
    value,
  )


def require_frozen(node: Any, field: str) -> None:
  """Checks that a field is a reference that does not change in training."""
  require(node, field)
  value = getattr(node, field)
  base.require(
    value != 'policy' and ema_or_snapshot(value) is None,
    field,
    'be frozen',
    value,
    "'init', 'stage:NAME', a path and an endpoint are",
  )
