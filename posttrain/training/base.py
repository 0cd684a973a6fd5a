"""The objective protocol: the loss of a train step.

Axes: B rows, T tokens of one micro-batch.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import jax

from posttrain import schema
from posttrain.losses import combine

Params = Any  # a model's parameters
Batch = Any  # an `arrays.Batch` or `arrays.PairBatch`, of jax arrays in jit


class Objective(Protocol):
  """A loss of a batch, as a sum over its micro-batches.

  1. `prepare` adds to the batch the values that need the whole batch;
  2. the call returns one micro-batch's share of the loss, and its metrics;
  3. `unmeasured` names the metrics of the step without a measurement.
  """

  # Whether the model that it trains generates text; a reward model does not.
  generates_text: ClassVar[bool] = True
  dtype: str = 'float32'  # compute dtype of the model that it trains

  @staticmethod
  def init_params(params: Params, loss: schema.Loss) -> Params:
    """Returns a model's initial parameters, with those of a new head."""
    del loss
    return params

  def prepare(self, params: Params, batch: Batch) -> Batch:
    """Returns the batch, with the values that need the whole batch."""
    del params
    return batch

  def unmeasured(self, batch: Batch, metrics: Mapping[str, float]) -> set[str]:
    """Returns the metrics with no contributing tokens or pairs.

    They read 0 and are not logged.

    Args:
      batch: the step's batch, on the host.
      metrics: the step's metrics, by name.
    """
    ...

  def __call__(
    self, params: Params, micro: Batch
  ) -> tuple[jax.Array, combine.Metrics]:
    """Returns the micro-batch's share of the loss, f32[], and its metrics.

    Args:
      params: f32 master weights of the whole model.
      micro: a batch whose arrays lack the axis of micro-batches.
    """
    ...
