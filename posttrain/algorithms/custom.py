"""Credit by a function of yours, turn by turn or token by token."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from posttrain import types
from posttrain.algorithms import base, credit
from posttrain.util import imports


@dataclasses.dataclass(frozen=True)
class Inputs:
  """What the function is told of a finished group."""

  rollouts: Sequence[types.Rollout]
  rewards: np.ndarray  # f32[G]
  # Sampled tokens of each rollout, of all its samples one behind the other.
  completion_lengths: Sequence[int]

  @property
  def turn_rewards(self) -> list[np.ndarray]:
    """Per rollout, what the environment gave for each turn: f32[turns]."""
    return [
      np.array([turn.reward for turn in rollout.turns], np.float32)
      for rollout in self.rollouts
    ]

  def broadcast(self, values: Sequence[float]) -> list[list[float]]:
    """Returns one value per rollout as one per sampled token."""
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
    """Returns one value per rollout and turn as one per sampled token."""
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

  one list per rollout, aligned with its sampled tokens: of the length that
  `inputs.completion_lengths` says. `inputs.broadcast` makes such lists of one
  number per rollout, so that

      def fn(inputs, scale=1.0):
        rewards = inputs.rewards - inputs.rewards.mean()
        return inputs.broadcast(scale * rewards)

  is `grpo` with a factor. `inputs.turn_rewards` are what the environment gave
  turn by turn, and `inputs.broadcast_turns` lays out one number per turn. This
  credits each with all that was given from it on (no baseline is taken off):

      def reward_to_go(inputs):
        rewards = inputs.turn_rewards
        return inputs.broadcast_turns([r[::-1].cumsum()[::-1] for r in rewards])

  It must not write to what it is given.

  Streams: `advantages`, `rl_weights`, and the leash, as `grpo`.
  """

  component = 'rl'

  def __init__(self, cfg):
    super().__init__(cfg)
    self._fn = imports.function(cfg.import_path, 'algorithm.import_path')

  def assign(self, group: base.Group) -> list[np.ndarray]:
    masks = [
      np.concatenate([np.zeros(0, bool), *(s.mask for s in rollout.samples)])
      for rollout in group
    ]
    lengths = [int(mask.sum()) for mask in masks]
    inputs = Inputs(group, credit.rewards(group), lengths)
    found = self._fn(inputs, **self.cfg.kwargs)
    self._check(found, lengths)
    return [_lay(mask, x) for mask, x in zip(masks, found, strict=True)]

  def _check(self, found, lengths: Sequence[int]) -> None:
    name = f'{self.cfg.import_path} must return'
    if len(found) != len(lengths):
      raise ValueError(
        f'{name} one list per rollout: got {len(found)}, expected '
        f'{len(lengths)}'
      )
    for i, (values, length) in enumerate(zip(found, lengths, strict=True)):
      if np.shape(values) != (length,):
        raise ValueError(
          f'{name} a number per sampled token: got shape {np.shape(values)} '
          f'for rollout {i}, expected {(length,)}; inputs.broadcast makes '
          'one number as many'
        )
      if not np.isfinite(values).all():
        raise ValueError(f'{name} finite numbers: got {values} for rollout {i}')


def _lay(mask: np.ndarray, values: Sequence[float]) -> np.ndarray:
  laid = np.zeros(len(mask), np.float32)
  laid[mask] = values
  return laid
