"""Credit from the user's function, per rollout, turn or token."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from posttrain import schema, types
from posttrain.algorithms import base, credit
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
    if len(values) != len(self.rollouts):
      raise ValueError(
        f'broadcast must get one value per rollout: got {len(values)}, '
        f'expected {len(self.rollouts)}'
      )
    pairs = zip(values, self.completion_lengths, strict=True)
    return [[float(value)] * length for value, length in pairs]

  def broadcast_turns(
    self, values: Sequence[Sequence[float]]
  ) -> list[list[float]]:
    """Repeats one value per rollout and turn over the turn's tokens."""
    turns = [[turn.length for turn in r.turns] for r in self.rollouts]
    if [len(row) for row in values] != [len(row) for row in turns]:
      raise ValueError(
        'broadcast_turns must get one value per rollout and turn: got '
        f'{[len(row) for row in values]}, expected '
        f'{[len(row) for row in turns]}'
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

  component = 'rl'

  def __init__(self, cfg: schema.Custom):
    """Imports the function; ValueError if it cannot be imported."""
    super().__init__(cfg)
    self._fn = imports.function(cfg.import_path, 'algorithm.import_path')

  def assign(self, group: base.Group) -> list[np.ndarray]:
    """Returns the function's advantages, f32[T] over a rollout's samples."""
    masks = [
      np.concatenate([np.zeros(0, bool), *(s.mask for s in rollout.samples)])
      for rollout in group
    ]
    lengths = [int(mask.sum()) for mask in masks]
    inputs = Inputs(group, credit.rewards(group), lengths)
    advantages = self._fn(inputs, **self.cfg.kwargs)
    self._check(advantages, lengths)
    return [_spread(mask, x) for mask, x in zip(masks, advantages, strict=True)]

  def _check(self, advantages, lengths: Sequence[int]) -> None:
    name = f'{self.cfg.import_path} must return'
    if len(advantages) != len(lengths):
      raise ValueError(
        f'{name} one list per rollout: got {len(advantages)}, expected '
        f'{len(lengths)}'
      )
    for i, (values, length) in enumerate(zip(advantages, lengths, strict=True)):
      if np.shape(values) != (length,):
        raise ValueError(
          f'{name} a number per sampled token: got shape {np.shape(values)} '
          f'for rollout {i}, expected {(length,)}; inputs.broadcast repeats '
          'one number per rollout'
        )
      if not np.isfinite(values).all():
        raise ValueError(f'{name} finite numbers: got {values} for rollout {i}')


def _spread(mask: np.ndarray, values: Sequence[float]) -> np.ndarray:
  """Returns the values at the tokens of the mask, 0 at the others, f32[T]."""
  advantages = np.zeros(len(mask), np.float32)
  advantages[mask] = values
  return advantages
