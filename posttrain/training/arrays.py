"""Interfaces of the jitted train step: batches, state and objective.

Axes: B rows, T tokens of one micro-batch.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax

from posttrain import schema, types
from posttrain.losses import combine

Params = Any  # a model's parameters
AnyBatch = Any  # a `Batch` or a `PairBatch`, of jax arrays in jit

# The host's batches, registered as pytrees: numpy in the pipeline, jax arrays
# once the train step has placed them.
Batch = types.Batch
PairBatch = types.PairBatch
jax.tree_util.register_dataclass(Batch)
jax.tree_util.register_dataclass(PairBatch)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ScoredBatch(Batch):
  """A batch with what the parameters before a step's updates say of it."""

  proximal_logprobs: jax.Array | None = None  # f32, nats
  # With a critic, whose advantages the batch has.
  values: jax.Array | None = None  # f32
  returns: jax.Array | None = None  # f32
  return_scale: jax.Array | None = None  # f32[], see `Value.normalize_returns`


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
  # Earlier versions of params and of those, in checkpoints alone, see
  # `pipeline.ahead`; None = the run needs none.
  past: Any = None


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


class Objective(Protocol):
  """A loss of a batch, as a sum over its micro-batches.

  1. `before_updates` adds what the parameters before the updates give, where
     there are several, or a critic;
  2. `prepare` adds to the batch the values that need the whole batch;
  3. the call returns one micro-batch's share of the loss, and its metrics;
  4. `unmeasured` names the metrics of the step without a measurement.
  """

  # Whether the model that it trains generates text; a reward model does not.
  generates_text: ClassVar[bool] = True
  dtype: str = 'float32'  # compute dtype of the model that it trains

  @staticmethod
  def init_params(params: Params, loss: schema.Loss) -> Params:
    """Returns a model's initial parameters, with those of a new head."""
    del loss
    return params

  def before_updates(
    self, params: Params, batch: AnyBatch
  ) -> tuple[AnyBatch, dict[str, jax.Array]]:
    """Returns the batch of the updates, and metrics, before the first one."""
    del params
    return batch, {}

  def prepare(self, params: Params, batch: AnyBatch) -> AnyBatch:
    """Returns the batch, with the values that need the whole batch."""
    del params
    return batch

  def unmeasured(
    self, batch: AnyBatch, metrics: Mapping[str, float]
  ) -> set[str]:
    """Returns the metrics with no contributing tokens or pairs.

    They read 0 and are not logged.

    Args:
      batch: the step's batch, on the host.
      metrics: the step's metrics, by name.
    """
    ...

  def __call__(
    self, params: Params, micro: AnyBatch
  ) -> tuple[jax.Array, combine.Metrics]:
    """Returns the micro-batch's share of the loss, f32[], and its metrics.

    Args:
      params: f32 master weights of the whole model.
      micro: a batch whose arrays lack the axis of micro-batches.
    """
    ...
