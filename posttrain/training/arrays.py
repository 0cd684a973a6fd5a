"""Device types: what the jitted train step takes and returns, as pytrees."""

import dataclasses
from typing import Any

import jax

from posttrain import types

# The host's batches, registered as pytrees: numpy in the pipeline, jax arrays
# once the train step has placed them.
Batch = jax.tree_util.register_dataclass(types.Batch)
ChoiceBatch = jax.tree_util.register_dataclass(types.ChoiceBatch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that an update reads and writes, and a checkpoint's `state` item."""

  step: jax.Array  # i32[], batches trained on (the optimizer counts updates)
  params: Any  # f32 master weights
  opt_state: Any  # optax state
  average: Any  # moving average of params for evaluation, or None
  skipped: jax.Array  # i32[], updates skipped for a non-finite gradient
  skipped_in_row: jax.Array  # i32[], those since the last good update
  # Name -> params of late, see `train_step.late`; None = no names.
  late: Any = None
