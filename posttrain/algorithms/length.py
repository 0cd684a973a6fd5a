"""Rewards with a price on length: what counts, and two ways to charge it.

1. `count`: tokens and turns of a rollout.
2. `shaped`: the rewards of a group behind a penalty.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from posttrain import schema, types
from posttrain.algorithms import observed

_TOOL = types.ROLES.index('tool')


class Count(NamedTuple):
  """What an episode took."""

  output: int  # tokens that the policy sampled
  input: int  # all others of its samples, the prompt's among them
  tool: int  # what tools said, each word once
  turns: int  # of the policy


def count(rollout: types.Rollout) -> Count:
  """Counts a rollout; a history that was rewritten has been read again."""
  output = total = tool = turns = 0
  said = observed.contents(rollout)
  for sample, here in zip(rollout.samples, said, strict=True):
    mask = sample.mask
    output, total = output + int(mask.sum()), total + len(sample)
    tool += int((here & (sample.roles == _TOOL)).sum())
    # A turn begins where the mask does: between two stands a header.
    turns += int((mask[1:] & ~mask[:-1]).sum() + mask[:1].sum())
  return Count(output, total - output, tool, turns)


def shaped(
  rewards: np.ndarray,
  counts: Sequence[Count],
  penalty: schema.LengthPenalty | None,
) -> np.ndarray:
  """Returns what the rewards of a group are worth, f32[G].

  Args:
    rewards: f32[G].
    counts: of each rollout.
    penalty: its options; None = the rewards as they are.
  """
  if penalty is None:
    return rewards
  return TYPES[penalty.type](rewards, counts, penalty)


def efficiency(rewards: np.ndarray, cost: np.ndarray) -> np.ndarray:
  """Pays a bonus for what is right and cheap.

      r_i (1 + [r_i = max r] clip(1 - c_i / c, 0, 1))
      c the mean cost of those whose reward is the group's largest

  The rewards as they are where none is positive, or where the right ones
  cost nothing.

  Args:
    rewards: f32[G].
    cost: f32[G], >= 0.
  """
  if not rewards.size or rewards.max() <= 0:
    return rewards
  best = rewards >= rewards.max()
  typical = cost[best].mean()
  if typical <= 0:
    return rewards
  bonus = np.clip(1 - cost / typical, 0, 1)
  return rewards * (1 + bonus * best)


def linear(
  rewards: np.ndarray, counts: np.ndarray, weights: Sequence[float]
) -> np.ndarray:
  """Charges every count, the more the oftener the group is right.

      r_i - max(mean(r), 0) sum_k w_k n_ik / max(max_j n_jk, 1)

  A group that is never right pays nothing, nor does one whose mean is negative:
  that would be a prize on length.

  Args:
    rewards: f32[G].
    counts: f32[G, K], >= 0.
    weights: K prices.
  """
  if not rewards.size:
    return rewards
  share = counts / np.maximum(counts.max(axis=0, keepdims=True), 1)
  price = np.maximum(rewards.mean(), 0)
  return rewards - price * (share @ np.asarray(weights, np.float32))


def _efficiency(
  rewards: np.ndarray, counts: Sequence[Count], cfg: schema.Efficiency
) -> np.ndarray:
  cost = np.array(
    [
      cfg.completion_weight * c.output
      + cfg.tool_weight * c.tool
      + cfg.turn_weight * c.turns
      for c in counts
    ],
    np.float32,
  )
  return efficiency(rewards, cost)


def _linear(
  rewards: np.ndarray, counts: Sequence[Count], cfg: schema.Linear
) -> np.ndarray:
  return linear(
    rewards,
    np.array([[c.output, c.input, c.turns] for c in counts], np.float32),
    (cfg.output_weight, cfg.input_weight, cfg.turn_weight),
  )


TYPES = {'efficiency': _efficiency, 'linear': _linear}
