"""The engine's requests and completions. Host types, numpy only."""

import dataclasses
from typing import Any

import numpy as np


class Stopped(Exception):
  """Decoding was ended from another thread."""


def require(ok: Any, what: str, must: str, got: Any, advice: str = '') -> None:
  """Raises ValueError unless `ok`."""
  if not ok:
    raise ValueError(f'{what} must {must}: got {got!r}{advice}')


@dataclasses.dataclass(frozen=True)
class Sampling:
  """The distribution that tokens are drawn from.

  Truncation applies in this order: top-k, top-p over the kept tokens, min-p.
  Tokens tied with a threshold are kept.
  """

  temperature: float = 1.0  # 0 = greedy
  top_k: int = 0  # keep the k most likely tokens; 0 = all
  top_p: float = 1.0  # keep the likeliest tokens whose mass reaches this
  min_p: float = 0.0  # keep tokens this likely relative to the likeliest

  def __post_init__(self):
    for ok, field, must in (
      (self.temperature >= 0, 'temperature', 'be >= 0'),
      (self.top_k >= 0, 'top_k', 'be >= 0 (0 = off)'),
      (0 < self.top_p <= 1, 'top_p', 'be in (0, 1] (1 = off)'),
      (0 <= self.min_p < 1, 'min_p', 'be in [0, 1) (0 = off)'),
    ):
      require(ok, f'sampling {field}', must, getattr(self, field))


@dataclasses.dataclass(frozen=True)
class Request:
  """A prompt to continue."""

  # Identifies the request, below 2**63. The random number of a token depends on
  # the engine's seed, this id and the token's position, and on nothing else.
  id: int
  ids: np.ndarray  # i32[P], at least one token
  max_tokens: int  # of the completion, at least 1
  stop_ids: tuple[int, ...] = ()
  sampling: Sampling = Sampling()
  hold: bool = False  # keep the slot when it stops, for `extend`
  # Replaces the id as the source of random numbers.
  key: int | None = None

  @property
  def draw_key(self) -> int:
    """The number that random numbers depend on: `key`, or else the id."""
    return self.id if self.key is None else self.key


@dataclasses.dataclass(frozen=True)
class Completion:
  """The tokens drawn after a prompt, or after an extension of it."""

  id: int  # of the request
  ids: np.ndarray  # i32[n], with the stop token where one came
  # f32[n], log_softmax(logits / temperature) before truncation, in nats; at
  # temperature 0 those of temperature 1.
  logprobs: np.ndarray
  stop_reason: str  # 'eos', 'max_tokens', or 'overflow': the cache was full
  version: int | np.ndarray  # of the weights; i32[n], if they are several
  cached: int = 0  # tokens of the prompt that were not computed again
  # i16[P + n - 1, L, k], the experts in the L layers with experts of all tokens
  # before the last, prompt and earlier turns included; None = not recorded.
  routes: np.ndarray | None = None
