"""The train state of a stage: shapes, shardings and initial values.

Without LoRA the state's parameters are the model's, with the head of a reward
model. With LoRA they are the adapter's; the model's weights are frozen and lie
in the compute dtype, outside of the state and its checkpoints.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from posttrain import schema, sharding
from posttrain.models import lora, transformer
from posttrain.training import arrays, objectives, optim, step


def shapes(
  stage: schema.Stage,
  model: schema.Model,
  optimizer: optim.Optimizer,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> tuple[arrays.TrainState, Any]:
  """Returns (the state, the model's whole weights), as ShapeDtypeStructs.

  Both have their shardings; nothing is computed.

  Args:
    stage: the stage's options.
    model: the model's options, with the vocabulary resolved.
    optimizer: from `optim.make`.
    mesh: devices that hold them.
  """
  whole = params = transformer.shapes(model)
  if stage.lora.rank:
    whole = jax.eval_shape(lambda x: lora.cast_matrices(x, model.dtype), whole)
    params = lora.shapes(stage.lora, params)
  init_params = objectives.TYPES[stage.kind].init_params
  params = jax.eval_shape(lambda x: init_params(x, stage.loss), params)
  state = jax.eval_shape(
    lambda: _make(
      stage,
      optimizer,
      jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), params),
    )
  )

  rules = transformer.SHARDING_RULES
  return (
    sharding.placed(state, rules, mesh),
    sharding.placed(whole, rules, mesh),
  )


def fresh(
  stage: schema.Stage,
  optimizer: optim.Optimizer,
  like: arrays.TrainState,
  base: lora.Base | None,
  load: Callable[[], Any],
  key: jax.Array,
) -> arrays.TrainState:
  """Returns the state before the first step.

  Args:
    stage: the stage's options.
    optimizer: from `optim.make`.
    like: the state's shapes and shardings, from `shapes`.
    base: the frozen weights, with LoRA.
    load: returns the stage's initial weights, which are donated.
    key: PRNG key of the adapter's initial values.
  """
  places = jax.tree.map(lambda x: x.sharding, like)
  if base is not None:
    return jax.jit(
      lambda: _make(stage, optimizer, lora.init(key, stage.lora, base.params)),
      out_shardings=places,
    )()

  def begin(params):
    init_params = objectives.TYPES[stage.kind].init_params
    return _make(stage, optimizer, init_params(params, stage.loss))

  return jax.jit(begin, out_shardings=places, donate_argnums=0)(load())


def ema_and_snapshots(stage: schema.Stage) -> tuple[str, ...]:
  """Returns the sorted ema and snapshot references of a stage."""
  names = {
    getattr(entry.algorithm, 'reference', 'init')
    for entry in stage.envs.values()
  }
  return tuple(sorted(name for name in names if schema.ema_or_snapshot(name)))


def _make(stage: schema.Stage, optimizer, params) -> arrays.TrainState:
  return step.init_state(
    params,
    optimizer,
    average=stage.optim.average is not None,
    ema_and_snapshots=ema_and_snapshots(stage),
  )
