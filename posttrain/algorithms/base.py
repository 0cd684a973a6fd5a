"""What an algorithm is: a writer of per-token streams, nothing else.

Hooks return and never write; `streams.finalize` stamps what they return, for
all finished groups of an environment and a step at once:

1. `observation_weights(rollout)`: CE weight per token the policy did not
   sample (default: none).
2. `assign(group)`: credit when the group is complete.
3. `rescale(groups, credits)`: the credit of all groups, side by side
   (default: as assigned).
4. `score(samples, scorer)`: logprobs under a reference, before packing.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from posttrain import schema, types

# Per rollout: a scalar for every completion token, an array over the tokens
# of its samples, or None for "no credit".
Credit = float | np.ndarray | None
Group = Sequence[types.Rollout]


class Scorer(Protocol):
  """Logprobs under a frozen model (or the policy)."""

  def __call__(
    self,
    reference: schema.Reference,
    samples: Sequence[types.Sample],
    hints: Sequence[types.Messages] | None = None,
  ) -> Sequence[np.ndarray]:
    """Scores samples under a reference.

    Args:
      reference: as the config names it, see `rollout.references`.
      samples: whose tokens to score, each at its own temperatures.
      hints: what the reference reads before each sample; None = nothing.

    Returns:
      One f32[T] per sample: log q(token_t | <t) in nats; 0 at token 0.
    """
    ...


class Algorithm:
  """Base class. A subclass states which component its mask tokens train.

  The attributes below are what `streams.finalize` reads, besides the hooks.
  """

  component: str  # 'rl', 'ce' or 'ref_kl'
  # Whether credit is relative to the rest of the group: one alone has none.
  group_relative: bool = False
  # Weight of the KL to `reference` on all mask tokens: the leash. 0 = none.
  kl_beta: float = 0.0
  reference: schema.Reference = 'init'  # what the default `score` asks for
  # Whether tokens with advantage 0 leave the rl component.
  prune_zero_advantage: bool = True

  def __init__(self, cfg: Any):
    """Args: cfg: of this type; the options above are read where it has them."""
    self.cfg = cfg
    for name in ('kl_beta', 'reference', 'prune_zero_advantage'):
      setattr(self, name, getattr(cfg, name, getattr(type(self), name)))

  def check(self, task: types.Task) -> None:
    """Refuses a task that it cannot learn from; names the row."""

  def observation_weights(
    self, rollout: types.Rollout
  ) -> Sequence[np.ndarray] | None:
    """Returns one f32[T] per sample of CE weights, or None for no weight."""
    del rollout

  def assign(self, group: Group) -> Sequence[Credit]:
    """Returns the credit of each rollout of the finished group."""
    return [None] * len(group)

  def rescale(
    self, groups: Sequence[Group], credits: Sequence[Sequence[Credit]]
  ) -> Sequence[Sequence[Credit]]:
    """Returns the credit of each rollout of each group, as `assign` does.

    Args:
      groups: all of the step and this environment.
      credits: what `assign` returned for each.
    """
    del groups
    return credits

  def score(
    self, samples: Sequence[types.Sample], scorer: Scorer
  ) -> Sequence[np.ndarray]:
    """Returns one f32[T] of reference logprobs per sample.

    Asked once per step, for the samples with ref_kl members; not if there
    are none.
    """
    return scorer(self.reference, samples)

  def get_state(self) -> dict[str, Any]:
    """Returns what it has learned so far, as JSON can hold it."""
    return {}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Goes on where `get_state` was called."""
    assert not state, f'{type(self).__name__} keeps no state: got {state}'
