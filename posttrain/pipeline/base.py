"""The two protocols behind every stage's batches, and one step's item.

    data, known before any model exists  ->  pipeline, the iterator of items

`tokens` and `pairs` implement both.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from posttrain import schema, types
from posttrain.envs import base
from posttrain.pipeline import rollout_rows
from posttrain.pipeline import tally as tallies

Batch = types.Batch | types.PairBatch


@dataclasses.dataclass(frozen=True)
class Item:
  """The batch of one step, and the pipeline's state after it."""

  batch: Batch
  metrics: dict[str, float]
  state: dict[str, Any]
  # One per dropped episode, and one per failed call of a reward function.
  errors: tuple[str, ...] = ()
  # Environment -> its rollouts, where a model has sampled them.
  played: Mapping[str, rollout_rows.Played] = dataclasses.field(
    default_factory=dict
  )


class DataError(ValueError):
  """The data that one of a stage's keys names cannot be used."""

  def __init__(self, key: str, error: Exception):
    self.key = key
    super().__init__(str(error))


class StageData(Protocol):
  """The data of a stage, which needs no model: environments or pairs."""

  @property
  def shape(self) -> tuple[int, int, int]:
    """[micro_batches, rows, row_tokens] of a batch."""
    ...

  @property
  def envs(self) -> Mapping[str, base.Env]:
    """All environments of the stage, by name; evaluation plays their tasks."""
    ...

  @property
  def env_names(self) -> tuple[str, ...]:
    """Names in the order of `Batch.env_ids`; () for batches without them."""
    ...

  @property
  def task_counts(self) -> Mapping[str, int]:
    """Tasks of an epoch, by environment that trains; pairs of a file."""
    ...

  @property
  def held_out_counts(self) -> Mapping[str, int]:
    """Held-out tasks that no environment has: pairs of a file."""
    ...

  @property
  def group_sizes(self) -> Mapping[str, int]:
    """Samples per task, by environment; of pairs, answers per pair."""
    ...

  @property
  def references(self) -> Mapping[schema.Reference, str]:
    """Models that score, judge or play, each with the stage's key for it."""
    ...

  @property
  def reward_models(self) -> Mapping[str, str]:
    """Reward models, each with the stage's key that names it."""
    ...

  @property
  def players(self) -> Collection[schema.Reference]:
    """Frozen models that play episodes."""
    ...

  @property
  def held_models(self) -> Collection[schema.Reference]:
    """Those of all these models that stay loaded while the stage trains."""
    ...

  @property
  def min_capacity(self) -> int:
    """Tokens that a sequence of the decode engine must have space for."""
    ...

  def check(self) -> None:
    """Checks the first tasks or all pairs; does not advance a source.

    Raises:
      ValueError: a row cannot train; names it.
    """
    ...


class Pipeline(Protocol):
  """An infinite iterator of items, deterministic in its seed and state."""

  @property
  def uses_policy(self) -> bool:
    """Whether batches depend on the policy's weights."""
    ...

  @property
  def can_prefetch(self) -> bool:
    """Whether a batch can be built during a step: it needs no model."""
    ...

  @property
  def learns_by_trial(self) -> Collection[str]:
    """Environments that train on rewards of the policy's rollouts."""
    ...

  @property
  def tally(self) -> tallies.Tally | None:
    """Counts of the stage's rewards; None for pairs."""
    ...

  @property
  def held_out(self) -> types.PairBatch | None:
    """Held-out pairs as one batch; None without any."""
    ...

  @property
  def selecting(self) -> types.PairBatch | None:
    """Further held-out pairs, which `eval.best` is measured on; or None."""
    ...

  def __next__(self) -> Item: ...

  def get_state(self) -> dict[str, Any]:
    """Returns JSON-able state that determines all later items."""
    ...

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a state of `get_state`."""
    ...
