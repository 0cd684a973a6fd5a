"""The rewards of a group, and credit relative to them."""

import numpy as np

from posttrain import schema
from posttrain.algorithms import base, length


def rewards(
  group: base.Group, penalty: schema.LengthPenalty | None = None
) -> np.ndarray:
  """Returns the rewards of a group of survivors, f32[G].

  Args:
    group: rollouts that have a reward.
    penalty: what length costs.
  """
  for rollout in group:
    assert rollout.stop_reason != 'error' and rollout.score.reward is not None
  found = np.array([r.score.reward for r in group], np.float32)
  if penalty is None:
    return found
  return length.shaped(found, [length.count(r) for r in group], penalty)


def centered(values: np.ndarray) -> np.ndarray:
  """Returns values - mean(values); exactly 0 where all are equal.

  The mean of equal floats may differ from them in the last bit.
  """
  if not values.size or values.min() == values.max():
    return np.zeros_like(values)
  return values - values.mean()
