"""The two protocols behind every stage's batches, and one step's item.

    data, known before any model exists  ->  pipeline, the iterator of items

`tokens` and `pairs` implement both.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from posttrain import schema, types
from posttrain.envs import base

Batch = types.Batch | types.PairBatch


@dataclasses.dataclass(frozen=True)
class Item:
  """The batch of one step, and the pipeline's state after it."""

  batch: Batch
  metrics: dict[str, float]
  state: dict[str, Any]
  # One per dropped episode, and one per failed call of a reward function.
  errors: tuple[str, ...] = ()


class DataError(ValueError):
  """The data that one of a stage's keys names cannot be used."""

  def __init__(self, key: str, error: Exception):
    self.key = key
    super().__init__(str(error))


class StageData(Protocol):
  """The data of a stage, which needs no model: environments or pairs."""

  # [micro_batches, rows, row_tokens] of a batch.
  shape: tuple[int, int, int]
  # All environments of the stage, by name; evaluation plays their tasks.
  envs: Mapping[str, base.Env]
  # Names in the order of `Batch.env_ids`; () for batches without.
  env_names: tuple[str, ...]
  # Samples per task, by environment.
  group_sizes: Mapping[str, int]
  # Models that score, judge or play, each with the stage's key that names it.
  references: Mapping[schema.Reference, str]
  # Reward models, each with the stage's key that names it.
  reward_models: Mapping[str, str]
  # Frozen models that play episodes.
  players: Collection[schema.Reference]
  # Models of `references` and `reward_models` that stay loaded while the stage
  # trains.
  held_models: Collection[schema.Reference]
  # Tokens that a sequence of the decode engine must have space for.
  min_capacity: int

  def check(self) -> None:
    """Looks at the first tasks or at all pairs, and draws none.

    Raises:
      ValueError: a row cannot train; names it.
    """
    ...


class Pipeline(Protocol):
  """An infinite iterator of items, deterministic in its seed and state."""

  # Whether batches depend on the policy's weights.
  uses_policy: bool
  # Whether a batch can be built while a step runs: no model is needed for it.
  can_prefetch: bool
  # Names of the environments that train on rewards of the policy's rollouts.
  learns_by_trial: Collection[str]
  # Held-out pairs as one batch; None without any.
  held_out: types.PairBatch | None

  def __next__(self) -> Item: ...

  def get_state(self) -> dict[str, Any]:
    """Returns JSON-able state that determines all later items."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a state of `get_state`."""
    ...
