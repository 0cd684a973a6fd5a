"""Sizes of a LoRA adapter on one device of a mesh."""

import dataclasses
import math
from typing import Any

from posttrain import sharding, tree


@dataclasses.dataclass(frozen=True)
class Adapter:
  """Numbers of an adapter on a device, and its sums over `tensor`."""

  split: int  # numbers that `fsdp` splits, counted over all its devices
  whole: int  # numbers that it does not
  # Columns of x A, and of its gradient, that are summed over `tensor`: all
  # passes and layers.
  summed: int

  @property
  def numbers(self) -> int:
    """Returns the numbers of the adapter that is whole over `fsdp`."""
    return self.split + self.whole


def of(params: Any) -> Adapter:
  """Returns the sizes of an adapter.

  Args:
    params: its shapes, as ShapeDtypeStructs with shardings.
  """
  split, whole, summed = 0, 0, 0
  for path, x in tree.flat(params).items():
    spec = x.sharding.spec
    size = math.prod(x.sharding.shard_shape(x.shape))
    if sharding.FSDP in spec:
      split += size * x.sharding.mesh.shape[sharding.FSDP]
    else:
      whole += size
    if sharding.TENSOR in spec and path.endswith('/a'):
      # Each device has part of A's rows: x A is summed, also when recomputed.
      summed += 2 * x.shape[0] * x.shape[-1]
    elif sharding.TENSOR in spec:
      # Each device has part of B's columns: the gradient of x A is summed.
      summed += x.shape[0] * x.shape[1]
  return Adapter(split, whole, summed)
