"""The part of a job that trains: state, objective, optimizer, train step.

1. `make_spec`: shapes and shardings of everything; nothing is computed.
2. `LearnerSpec.base`: the frozen weights, with LoRA.
3. `LearnerSpec.fresh`: the state before the first step, unless one is restored.
4. `LearnerSpec.learner`: the train step around them.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posttrain import processes, schema, sharding, tree
from posttrain.metrics import estimates
from posttrain.models import lora, transformer
from posttrain.training import arrays, objectives, optim, step
from posttrain.util import disk


class NonFiniteError(RuntimeError):
  """Too many gradients in a row were NaN or infinite."""


def weights_of(state: arrays.TrainState) -> dict[str, Any]:
  """Returns what trains, with its EMAs and snapshots, by reference name."""
  policy, _ = transformer.split_critic(state.params)
  return {'policy': policy, **(state.ema_and_snapshots or {})}


def _copies(weights: Any, dtype: str) -> Any:
  return jax.tree.map(jnp.copy, lora.cast_matrices(weights, dtype))


@dataclasses.dataclass(frozen=True)
class Learner:
  """A train step with the state that it starts from."""

  name: str  # the stage's
  cfg: schema.Stage
  state: arrays.TrainState
  base: lora.Base | None  # the frozen weights that an adapter corrects
  objective: arrays.Objective
  update: step.TrainStep

  def copies(self, state: arrays.TrainState) -> dict[str, Any]:
    """Returns copies of `weights`, which an update does not overwrite.

    Matrices have the compute dtype, in which alone they are used.
    """
    return self._copy(weights_of(state))

  @functools.cached_property
  def _copy(self) -> Callable[[Any], Any]:
    """The compiled function of `copies`."""
    places = jax.tree.map(lambda x: x.sharding, weights_of(self.state))
    copy = functools.partial(_copies, dtype=self.objective.dtype)
    return jax.jit(copy, out_shardings=places)

  def measured(
    self, batch: arrays.AnyBatch, metrics: Mapping[str, float]
  ) -> dict[str, float]:
    """Returns the metrics of a step that something contributed to."""
    unmeasured = self.objective.unmeasured(batch, metrics)
    return {k: v for k, v in metrics.items() if k not in unmeasured}

  def check_finite(
    self,
    step: int,
    metrics: Mapping[str, float],
    batch: arrays.AnyBatch,
    path: str,
  ) -> None:
    """Saves the batch and aborts after `optim.max_skipped` bad gradients.

    Args:
      step: the number of the step.
      metrics: its metrics.
      batch: its batch, on the host.
      path: npz file for the last offending batch.

    Raises:
      NonFiniteError: with the file that holds the batch.
    """
    limit = self.cfg.optim.max_skipped
    if metrics['optim/skipped_in_row'] < limit:
      return
    if processes.is_first():
      arrays = {k: v for k, v in vars(batch).items() if v is not None}
      arrays['live'] = arrays.pop('num_micro_batches')  # its stored name
      with disk.replacing(path, 'xb') as file:
        np.savez_compressed(file, **arrays)
    raise NonFiniteError(
      f'gradients must be finite: {limit} in a row were not, the last at step '
      f'{step} of stage {self.name}; its batch is in {path}; lower '
      f'config.{self.name}.optim.lr'
    )


class HeldOutPairs:
  """Measures one batch of held-out pairs."""

  def __init__(
    self, learner: Learner, batch: arrays.AnyBatch | None, prefix: str
  ):
    """Places nothing yet.

    Args:
      learner: the stage's.
      batch: the pairs; None = the stage has none.
      prefix: of the metrics' names.
    """
    self._learner, self._batch, self._placed = learner, batch, None
    self._prefix = prefix
    self._measure = step.make_measure(
      learner.objective, learner.update.mesh, learner.base
    )

  def __call__(self, params: Any) -> dict[str, float]:
    """Returns the metrics `<prefix>/pairs/<name>` under the parameters.

    Returns {} without pairs.

    `rewards/accuracies` has bounds of its 95 % interval over the pairs,
    `rewards_low/accuracies` and `rewards_high/accuracies`.
    """
    if self._batch is None:
      return {}
    if self._placed is None:
      self._placed = self._learner.update.place(self._batch)
    metrics = jax.device_get(self._measure(params, self._placed))
    measured = self._learner.measured(self._batch, metrics)
    values = {key: float(value) for key, value in measured.items()}
    if 'rewards/accuracies' in values:
      count = int(self._batch.pairs)
      right = round(2 * count * values['rewards/accuracies']) / 2
      right = np.clip(right - np.arange(count), 0, 1)  # of each, one may be 0.5
      ends = estimates.interval(right.tolist()) or ()
      keys = estimates.bound_keys('rewards/accuracies')
      values |= zip(keys, ends, strict=False)
    return {f'{self._prefix}/pairs/{k}': x for k, x in values.items()}


@dataclasses.dataclass(frozen=True)
class LearnerSpec:
  """A learner before its weights exist."""

  name: str
  cfg: schema.Stage
  seed: tuple[int, int]  # the run's seed, and the stage's index in the run
  mesh: jax.sharding.Mesh
  objective: arrays.Objective
  optimizer: optim.Optimizer
  state_like: arrays.TrainState  # shapes and shardings
  weights_like: Any  # the same, of the model's whole weights

  def stored_like(self, max_lag: int) -> arrays.TrainState:
    """Returns the shapes and shardings of the state in a checkpoint.

    Args:
      max_lag: number of past versions that it holds, see `pipeline.ahead`.
    """
    if not max_lag:
      return self.state_like
    copy = functools.partial(_copies, dtype=self.objective.dtype)
    shapes = jax.eval_shape(copy, weights_of(self.state_like))
    rules = transformer.SHARDING_RULES
    past = sharding.placed([shapes] * max_lag, rules, self.mesh)
    return dataclasses.replace(self.state_like, past=tuple(past))

  def base(self, init: Callable[[], Any]) -> lora.Base | None:
    """Returns the frozen weights of a stage with LoRA, else None.

    Args:
      init: loads the weights that the stage begins with.
    """
    if not self.cfg.lora.rank:
      return None
    options = self.cfg.lora
    return lora.Base(init(), lora.scale(options), lora.keeps_factors(options))

  def fresh(
    self, init: Callable[[], Any], base: lora.Base | None
  ) -> arrays.TrainState:
    """Returns the state before the first step.

    Args:
      init: loads the weights that the stage begins with.
      base: from `base`.
    """
    key = jax.random.fold_in(jax.random.key(self.seed[0]), self.seed[1])
    return step.fresh_state(
      self.cfg, self.optimizer, self.state_like, base, init, key
    )

  def learner(
    self, state: arrays.TrainState, base: lora.Base | None
  ) -> Learner:
    """Returns the learner that starts from a state."""
    tree.checksums(state)  # compiles its program before the first save
    update = step.make_train_step(
      self.objective,
      self.optimizer,
      mesh=self.mesh,
      rules=transformer.SHARDING_RULES,
      average=self.cfg.optim.average,
      updates=self.cfg.updates_per_rollout,
      base=base,
      reduce=self.cfg.batch.reduce_gradients,
    )
    return Learner(self.name, self.cfg, state, base, self.objective, update)


def make_spec(
  name: str,
  stage: schema.Stage,
  model: schema.Model,
  mesh: jax.sharding.Mesh,
  env_names: tuple[str, ...] = (),
  seed: tuple[int, int] = (0, 0),
) -> LearnerSpec:
  """Builds objective, optimizer, shapes and shardings; computes nothing.

  Args:
    name: the stage's name.
    stage: its options.
    model: the model's options, with the vocabulary.
    mesh: devices that hold the state; they need not exist.
    env_names: environments in `env_ids` order.
    seed: the run's seed and the stage's index.

  Raises:
    ValueError: a weight does not divide over the mesh.
    FieldError: LoRA does not fit the model.
  """
  optimizer = optim.make_all(
    stage.optim, stage.critic, stage.steps * stage.updates_per_rollout
  )
  state_like, weights_like = step.state_shapes(stage, model, optimizer, mesh)
  return LearnerSpec(
    name=name,
    cfg=stage,
    seed=seed,
    mesh=mesh,
    objective=objectives.TYPES[stage.kind](model, env_names, stage.loss),
    optimizer=optimizer,
    state_like=state_like,
    weights_like=weights_like,
  )
