"""Rewards of a group, and centering."""

import numpy as np

from posttrain import schema
from posttrain.algorithms import base, length


def rewards(
  group: base.Group, penalty: schema.LengthPenalty | None = None
) -> np.ndarray:
  """Returns the rewards of a group, f32[G].

  Args:
    group: rollouts without errors, all with a reward.
    penalty: options of the length penalty; None = none.
  """
  for rollout in group:
    assert rollout.stop_reason != 'error' and rollout.score.reward is not None
  values = np.array([r.score.reward for r in group], np.float32)
  if penalty is None:
    return values
  return length.penalized(values, [length.count(r) for r in group], penalty)


def centered(values: np.ndarray) -> np.ndarray:
  """Returns values - mean(values); exactly 0 where all are equal.

  The mean of equal floats may differ from them in the last bit.
  """
  if not values.size or values.min() == values.max():
    return np.zeros_like(values)
  return values - values.mean()
