"""The components of a stage that exist before the run starts.

`preflight` builds and checks them: nothing is compiled for them, and no weights
are read. The run then trains on the same objects.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import jax

from posttrain import schema, scoring
from posttrain.chat import rendering
from posttrain.evaluation import evaluator
from posttrain.pipeline import base
from posttrain.rollout import env_calls, frozen_models
from posttrain.stage import plan

# Tokens of a micro-batch, and the most slots, per device of data x fsdp.
_TOKENS = 2048
_SLOTS = 256


class Loader(Protocol):
  """Models of the folders that a stage's references and `init` name."""

  @property
  def workdir(self) -> str:
    """The run's folder."""
    ...

  @property
  def folders(self) -> Mapping[str, str]:
    """Name -> the folder of its weights, or 'random'."""
    ...

  def __call__(self, name: str) -> frozen_models.Model:
    """Builds or restores a model; every call does so anew."""
    ...

  def init(self) -> Any:
    """Returns the stage's initial parameters."""

  def reward_model(
    self, name: str, scorer: Callable[[schema.Model], scoring.Scorer]
  ) -> frozen_models.RewardModel:
    """Restores a reward model onto the devices."""
    ...

  def fingerprint(self, name: str) -> str:
    """Returns a hash of a model's weights."""
    ...

  def base_sums(self, base: Any) -> dict[str, Any]:
    """Returns checksums of frozen weights, for `check_base`."""
    ...

  def check_base(self, folder: str, base: Any) -> None:
    """Refuses base weights that have changed since a step was saved."""


@dataclasses.dataclass(frozen=True)
class Outside:
  """What a stage gets from files and servers, see `loading.outside`.

  Attributes:
    options: the run's options as plain data, for checkpoints.
    resolve: (name, workdir) -> the folder of a reference or an `init`.
    loader: returns a `Loader`; its arguments are those of `loading.Loader`.
    connect: (endpoint, caller, number of tokens) -> the client of a server.
    player: (client, caller, seed) -> an engine that samples from a server.
  """

  options: dict[str, Any]
  resolve: Callable[[str, str], str]
  loader: Callable[..., Loader]
  connect: Callable[[schema.Endpoint, str, int], Any]
  player: Callable[[Any, str, int], Any]


@dataclasses.dataclass(frozen=True)
class Components:
  """A stage before anything is compiled or restored."""

  cfg: schema.Run  # the options, where a size may be None
  name: str
  stage: schema.Stage  # its options, with the sizes on the mesh
  renderer: rendering.Renderer
  model: schema.Model  # with its vocabulary
  mesh: jax.sharding.Mesh  # an AbstractMesh in a plan for other devices
  data: base.StageData
  eval_tasks: evaluator.EvalTasks
  capacity: int  # tokens of the longest sequence to decode or score
  plan: plan.Plan
  workers: env_calls.Workers | None  # worker processes; None = threads
  outside: Outside


def resolve_sizes(stage: schema.Stage, devices: int) -> schema.Stage:
  """Returns a stage's options with every size set.

  `batch.micro_batch_tokens`: as many rows per device of data x fsdp as 2,048
  tokens hold, at least one. `rollout.slots`: as many as a step has samples, at
  most 256 per device of data x fsdp.

  Args:
    stage: the options.
    devices: number of devices that share rows and slots, `sharding.batch_ways`.
  """
  batch, rollout = stage.batch, stage.rollout
  if batch.micro_batch_tokens is None:
    rows = devices * max(1, _TOKENS // batch.packed_tokens)
    tokens = rows * batch.packed_tokens
    batch = dataclasses.replace(batch, micro_batch_tokens=tokens)
  if rollout.slots is None:
    sizes = (x.group_size for x in stage.envs.values() if x.ratio)
    group_size = max(sizes, default=1)
    each = -(-batch.prompts_per_step * group_size // devices)
    rollout = dataclasses.replace(rollout, slots=devices * min(each, _SLOTS))
  return dataclasses.replace(stage, batch=batch, rollout=rollout)
