"""Models that are asked and not trained: how a config names one.

A string, in the grammar of `init`, is one in this process; an `Endpoint` is
one that a server answers for.
"""

import dataclasses
import re

from posttrain.schema import base


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """A model behind an OpenAI-compatible server."""

  # Which kind of reference this is; fixed.
  type: str = 'endpoint'
  # What the server calls the model.
  name: str = ''
  # Where the API begins, as in 'http://127.0.0.1:8000/v1'.
  base_url: str = ''
  # Environment variable that holds the API key; '' = there is none.
  api_key_env: str = ''
  # Seconds that an answer may take.
  timeout: float = 120.0
  # Tries of a request that the server was too busy for, failed at, or never
  # answered; the waits between them grow from a second to half a minute.
  tries: int = 10
  # Requests under way at a time.
  concurrency: int = 16

  def __post_init__(self):
    base.require(bool(self.name), 'name', 'name a model', self.name)
    base.require(
      re.match(r'https?://[^/]', self.base_url) is not None,
      'base_url',
      "begin with 'http://' or 'https://' and a host",
      self.base_url,
      'a model behind a server needs the address of its API',
    )
    base.require_positive(self, 'timeout', 'tries', 'concurrency')

  def __str__(self) -> str:
    return f'{self.name} at {self.base_url}'


Reference = str | Endpoint

# With what follows: more than none, and more than the last step's.
_EMA_AND_SNAPSHOT = {'ema': r'0\.\d*[1-9]\d*', 'snapshot': r'[2-9]|[1-9]\d+'}


def ema_or_snapshot(reference: Reference) -> tuple[str, float] | None:
  """Reads 'ema:DECAY' and 'snapshot:STEPS', copies of the policy in the state.

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


def require(node, field: str) -> None:
  """Of a reference: a string must be of the grammar of references."""
  value = getattr(node, field)
  if isinstance(value, Endpoint):
    return
  base.require(
    not value.startswith(('http://', 'https://')),
    field,
    'be a node, where a server answers for the model',
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


def require_frozen(node, field: str) -> None:
  """Of a reference that must not change while a stage trains."""
  require(node, field)
  value = getattr(node, field)
  base.require(
    value != 'policy' and ema_or_snapshot(value) is None,
    field,
    'be frozen',
    value,
    "'init', 'stage:NAME', a path and an endpoint are",
  )
