"""Length penalties: rewards that depend on the number of tokens and turns.

1. `count`: tokens and turns of a rollout.
2. `rewards`: the rewards of a group after a penalty, if there is one.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from posttrain import schema, types
from posttrain.algorithms import base

_TOOL = types.ROLES.index('tool')


class Count(NamedTuple):
  """Numbers of tokens and turns of a rollout."""

  output: int  # sampled tokens
  input: int  # all other tokens of the samples, the prompt's included
  tool: int  # tokens of tool messages, each message once
  turns: int  # turns of the policy


def count(rollout: types.Rollout) -> Count:
  """Counts a rollout; a rewritten history counts again as input."""
  output = total = tool = turns = 0
  contents = base.contents(rollout)
  for sample, content in zip(rollout.samples, contents, strict=True):
    mask = sample.mask
    output, total = output + int(mask.sum()), total + len(sample)
    tool += int((content & (sample.roles == _TOOL)).sum())
    # A turn is a run of the mask: a header separates two turns.
    turns += int((mask[1:] & ~mask[:-1]).sum() + mask[:1].sum())
  return Count(output, total - output, tool, turns)


def rewards(
  group: base.Group, penalty: schema.LengthPenalty | None
) -> np.ndarray:
  """Returns the rewards of a group after a length penalty, f32[G]."""
  rewards = base.rewards(group)
  if penalty is None or not group:
    return rewards
  counts = np.array([count(r) for r in group])
  return TYPES[penalty.type](rewards, counts, penalty)


def efficiency(rewards: np.ndarray, cost: np.ndarray) -> np.ndarray:
  """Returns rewards with a bonus for a low cost, f32[G].

      r_i (1 + [r_i = max r] clip(1 - c_i / c, 0, 1))
      c: mean cost of the rollouts with the group's largest reward

  Rewards are unchanged if none is positive, or if c is 0.

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
  """Returns rewards minus a price per count, f32[G].

      r_i - max(mean(r), 0) sum_k w_k n_ik / max(max_j n_jk, 1)

  The price grows with the group's mean reward. A group with a mean <= 0 has no
  price: a negative price would reward length.

  Args:
    rewards: f32[G].
    counts: f32[G, K], >= 0.
    weights: K factors.
  """
  if not rewards.size:
    return rewards
  share = counts / np.maximum(counts.max(axis=0, keepdims=True), 1)
  price = np.maximum(rewards.mean(), 0)
  return rewards - price * (share @ np.asarray(weights, np.float32))


def overlong(
  rewards: np.ndarray, tokens: np.ndarray, cfg: schema.Overlong
) -> np.ndarray:
  """Returns rewards with a penalty on answers near the limit, f32[G].

      r_i - weight clip((n_i - (max_tokens - buffer)) / buffer, 0, 1)

  The soft overlong punishment of DAPO (Yu et al., arXiv 2503.14476, eq. 13).

  Args:
    rewards: f32[G].
    tokens: f32[G], numbers n of sampled tokens.
    cfg: max_tokens, buffer and weight.
  """
  over = (tokens - (cfg.max_tokens - cfg.buffer)) / cfg.buffer
  return rewards - np.float32(cfg.weight) * np.clip(over, 0, 1)


# By `type` of the options: functions of the rewards, f32[G], of the counts,
# i64[G, 4], and of the options.
TYPES = {
  'efficiency': lambda rewards, counts, cfg: efficiency(
    rewards,
    (
      counts @ (cfg.completion_weight, 0, cfg.tool_weight, cfg.turn_weight)
    ).astype(np.float32),
  ),
  'linear': lambda rewards, counts, cfg: linear(
    rewards,
    counts[:, [0, 1, 3]].astype(np.float32),
    (cfg.output_weight, cfg.input_weight, cfg.turn_weight),
  ),
  'overlong': lambda rewards, counts, cfg: overlong(
    rewards, counts[:, 0].astype(np.float32), cfg
  ),
}
