"""Models that are asked and not trained: how a config names one.

A string, in the grammar of `init`, is one in this process; an `Endpoint` is
one that a server answers for.
"""

import dataclasses

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
        self.base_url.startswith(('http://', 'https://')), 'base_url',
        "begin with 'http://' or 'https://'", self.base_url,
        'a model behind a server needs the address of its API',
    )
    base.require_positive(self, 'timeout', 'tries', 'concurrency')

  def __str__(self) -> str:
    return f'{self.name} at {self.base_url}'


Reference = str | Endpoint
