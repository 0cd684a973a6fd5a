"""Device types: arguments and results of the jitted train step, as pytrees."""

import dataclasses
from typing import Any

import jax

from posttrain import types

# The host's batches, registered as pytrees: numpy in the pipeline, jax arrays
# once the train step has placed them.
Batch = types.Batch
PairBatch = types.PairBatch
jax.tree_util.register_dataclass(Batch)
jax.tree_util.register_dataclass(PairBatch)


@dataclasses.dataclass(frozen=True)
class TrainState:
  """All that an update reads and writes, and a checkpoint's `state` item."""

  step: jax.Array  # i32[], batches trained on (the optimizer counts updates)
  params: Any  # f32 master weights
  opt_state: Any  # optax state
  average: Any  # moving average of params for evaluation, or None
  skipped: jax.Array  # i32[], updates skipped for a non-finite gradient
  skipped_in_row: jax.Array  # i32[], those since the last good update
  # Name -> params, see `step.update_ema_and_snapshots`; None = no names.
  ema_and_snapshots: Any = None


# Field -> its name in the tree paths of checkpoints, where they differ.
_STORED_NAMES = {'ema_and_snapshots': 'late'}


def _flatten_with_keys(state: TrainState):
  keys = jax.tree_util.GetAttrKey
  return tuple(
    (
      keys(_STORED_NAMES.get(field.name, field.name)),
      getattr(state, field.name),
    )
    for field in dataclasses.fields(TrainState)
  ), None


jax.tree_util.register_pytree_with_keys(
  TrainState, _flatten_with_keys, lambda _, leaves: TrainState(*leaves)
)
