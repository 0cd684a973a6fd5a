"""Credit from the user's function, per rollout, turn or token."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.algorithms import base
from posttrain.util import imports


@dataclasses.dataclass(frozen=True)
class Inputs:
  """Inputs of the user's function: a complete group."""

  rollouts: Sequence[types.Rollout]
  rewards: np.ndarray  # f32[G]
  # Number of sampled tokens of each rollout, over all its samples.
  completion_lengths: Sequence[int]

  @property
  def turn_rewards(self) -> list[np.ndarray]:
    """Rewards of each rollout's turns, f32[turns] per rollout."""
    return [
      np.array([turn.reward for turn in rollout.turns], np.float32)
      for rollout in self.rollouts
    ]

  def broadcast(self, values: Sequence[float]) -> list[list[float]]:
    """Repeats one value per rollout over its sampled tokens."""
    count = len(self.rollouts)
    what = 'broadcast must get one value per rollout'
    base.require_equal(what, len(values), count)
    pairs = zip(values, self.completion_lengths, strict=True)
    return [[float(value)] * length for value, length in pairs]

  def broadcast_turns(
    self, values: Sequence[Sequence[float]]
  ) -> list[list[float]]:
    """Repeats one value per rollout and turn over the turn's tokens."""
    turns = [[turn.length for turn in r.turns] for r in self.rollouts]
    base.require_equal(
      'broadcast_turns must get one value per rollout and turn',
      [len(row) for row in values],
      [len(row) for row in turns],
    )
    return [
      np.repeat(np.asarray(row, float), lengths).tolist()
      for row, lengths in zip(values, turns, strict=True)
    ]


class Custom(base.Algorithm):
  """Policy gradient with A = fn(inputs, **kwargs).

      def fn(inputs, **kwargs) -> list[list[float]]

  returns one list per rollout with one number per sampled token; the lengths
  are `inputs.completion_lengths`. `inputs.broadcast` repeats one number per
  rollout:

      def fn(inputs, scale=1.0):
        rewards = inputs.rewards - inputs.rewards.mean()
        return inputs.broadcast(scale * rewards)

  is `grpo` with a factor. `inputs.turn_rewards` are the rewards of the turns,
  and `inputs.broadcast_turns` repeats one number per turn. The reward to go,
  without a baseline:

      def reward_to_go(inputs):
        rewards = inputs.turn_rewards
        return inputs.broadcast_turns([r[::-1].cumsum()[::-1] for r in rewards])

  The function must not modify its inputs.

  Streams: `advantages`, `rl_weights`, and the KL to a reference, as `grpo`.
  """

  def __init__(self, cfg: schema.Custom, **kwargs: Any):
    """Imports the function; ValueError if it cannot be imported."""
    super().__init__(cfg)
    self._fn = imports.function(cfg.import_path, 'algorithm.import_path')
    self._kwargs = kwargs

  def assign(self, group: base.Group) -> list[np.ndarray]:
    """Returns the function's advantages, f32[T] over a rollout's samples."""
    masks = [
      np.concatenate([np.zeros(0, bool), *(s.mask for s in rollout.samples)])
      for rollout in group
    ]
    lengths = [int(mask.sum()) for mask in masks]
    inputs = Inputs(group, base.rewards(group), lengths)
    values = self._fn(inputs, **self._kwargs)
    name = f'{self.cfg.import_path} must return'
    is_list = isinstance(values, list | tuple | np.ndarray)
    count = len(values) if is_list else type(values).__name__
    base.require_equal(f'{name} one list per rollout', count, len(group))
    advantages = []
    for i, (mask, numbers) in enumerate(zip(masks, values, strict=True)):
      what = (
        f'{name} a number per sampled token of rollout {i}, as '
        'inputs.broadcast([...]) makes them of one number per rollout'
      )
      base.require_equal(what, np.shape(numbers) or 'one', (lengths[i],))
      advantages.append(np.zeros(len(mask), np.float32))
      advantages[-1][mask] = numbers
    return advantages
