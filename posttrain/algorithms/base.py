"""What an algorithm is: a writer of per-token streams, nothing else.

Hooks return and never write; `streams.finalize` stamps what they return.

1. `observation_weights(rollout)`: CE weight per token the policy did not
   sample (default: none).
2. `assign(group)`: credit when the group is complete.
3. `score(samples, scorer)`: logprobs under a reference, before packing.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import types

# Per rollout: a scalar for every completion token, an array over the tokens
# of its samples, or None for "no credit".
Credit = float | np.ndarray | None


class Algorithm:
  """Base class. A subclass states which component its mask tokens train."""

  component: str  # 'rl', 'ce' or 'ref_kl'

  def observation_weights(
      self, rollout: types.Rollout
  ) -> Sequence[np.ndarray] | None:
    """Returns one f32[T] per sample of CE weights, or None for no weight."""
    del rollout

  def assign(self, group: Sequence[types.Rollout]) -> Sequence[Credit]:
    """Returns the credit of each rollout of the finished group."""
    return [None] * len(group)

  def score(
      self, samples: Sequence[types.Sample], scorer
  ) -> Sequence[np.ndarray] | None:
    """Returns one f32[T] of reference logprobs per sample, or None."""
    del samples, scorer

  def get_state(self) -> dict[str, Any]:
    """Returns what it has learned so far, as JSON can hold it."""
    return {}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on where `get_state` was called."""
    assert not state, f'{type(self).__name__} keeps no state: got {state}'
