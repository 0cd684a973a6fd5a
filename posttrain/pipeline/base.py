"""The two interfaces behind every stage's batches, and one step's item.

    data, known before any model exists  ->  pipeline, the iterator of items

`tokens` and `pair_data` implement both.
"""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

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


class StageData:
  """The data of a stage, which needs no model: environments or pairs.

  Attributes:
    shape: [micro_batches, rows, row_tokens] of a batch.
    envs: all environments by name; evaluation plays their tasks.
    env_names: in the order of `Batch.env_ids`; () for batches without them.
    task_counts: tasks of an epoch, by environment; pairs of a file.
    held_out_counts: held-out tasks that no environment has: pairs of a file.
    group_sizes: samples per task, by environment; of pairs, answers per pair.
    references: models that score, judge or play, each with the stage's key.
    reward_models: reward models, each with the stage's key that names it.
    players: frozen models that play episodes.
    held_models: those of all these that stay loaded while the stage trains.
    min_capacity: tokens that a sequence of the decode engine must hold.
  """

  shape: tuple[int, int, int]
  envs: Mapping[str, base.Env]
  env_names: tuple[str, ...] = ()
  task_counts: Mapping[str, int]
  held_out_counts: Mapping[str, int] = {}
  group_sizes: Mapping[str, int]
  references: Mapping[schema.Reference, str]
  reward_models: Mapping[str, str] = {}
  players: Collection[schema.Reference] = ()
  held_models: Collection[schema.Reference] = ()
  min_capacity: int

  def check(self) -> None:
    """Checks the first tasks or all pairs; does not advance a source.

    Raises:
      ValueError: a row cannot train; names it.
    """


class Pipeline:
  """An infinite iterator of items, deterministic in its seed and state.

  Attributes:
    uses_policy: whether batches depend on the policy's weights.
    can_prefetch: whether a batch can be built during a step: it needs no model.
    learns_by_trial: environments that train on rewards of the policy's
      rollouts.
    tally: counts of the stage's rewards; None for pairs.
    held_out: held-out pairs as one batch; None without any.
    selecting: further held-out pairs, which `eval.best` is measured on; or
      None.
  """

  uses_policy: bool = False
  can_prefetch: bool = True
  learns_by_trial: Collection[str] = ()
  tally: tallies.Tally | None = None
  held_out: types.PairBatch | None = None
  selecting: types.PairBatch | None = None

  def __iter__(self):
    return self

  def __next__(self) -> Item:
    raise NotImplementedError

  def get_state(self) -> dict[str, Any]:
    """Returns JSON-able state that determines all later items."""
    raise NotImplementedError

  def set_state(self, state: dict[str, Any]) -> None:
    """Continues from a state of `get_state`."""
    raise NotImplementedError
