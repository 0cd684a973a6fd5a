"""The train step, and the state of a stage that it updates.

Without LoRA the state's parameters are the model's, with the head of a reward
model. With LoRA they are the adapter's; the model's weights are frozen and lie
in the compute dtype, outside of the state and its checkpoints.

One update from a batch: loop over micro-batches with tokens, then optimize.

    grads = sum over micro-batches of d objective / d params
    params, opt_state = optimizer(grads)

An update is skipped if a gradient is not finite, or if the batch has no
member token: momentum and weight decay would still move the weights.

The number of micro-batches with tokens is traced, so a shorter batch does not
recompile. The objective divides by the whole batch's counts, so the result
does not depend on the number of micro-batches.

With `updates` > 1 several updates follow each other, each on the whole batch
(TRL's num_iterations, verl's ppo_epochs).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from posttrain import compilation, schema, sharding, tree
from posttrain.losses import combine
from posttrain.models import lora, transformer
from posttrain.training import arrays, objectives, optim

Batch = arrays.Batch | arrays.PairBatch


def state_shapes(
  stage: schema.Stage,
  model: schema.Model,
  optimizer: optim.Optimizer,
  mesh: Mesh | AbstractMesh,
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
    whole = jax.eval_shape(
      lambda x: lora.cast_matrices(
        lora.quantize(x, stage.lora.base), model.dtype
      ),
      whole,
    )
    params = lora.shapes(stage.lora, params)
  make = functools.partial(_make, stage, optimizer)
  state = jax.eval_shape(make, params, whole)
  rules = transformer.SHARDING_RULES
  return (
    sharding.placed(state, rules, mesh),
    sharding.placed(whole, rules, mesh),
  )


def fresh_state(
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
    like: the state's shapes and shardings, from `state_shapes`.
    base: the frozen weights, with LoRA.
    load: returns the stage's initial weights, which are donated.
    key: PRNG key of the adapter's initial values.
  """
  places = jax.tree.map(lambda x: x.sharding, like)
  make = functools.partial(_make, stage, optimizer)
  if base is not None:
    return jax.jit(
      lambda whole: make(lora.init(key, stage.lora, whole), whole),
      out_shardings=places,
    )(base.params)
  return jax.jit(
    lambda whole: make(whole, whole), out_shardings=places, donate_argnums=0
  )(load())


def _make(
  stage: schema.Stage, optimizer: optim.Optimizer, params: Any, whole: Any
) -> arrays.TrainState:
  """Returns the state of parameters, with the heads that the stage trains."""
  params = objectives.TYPES[stage.kind].init_params(params, stage.loss)
  params = transformer.add_critic(params, whole, stage.critic.kind)
  # The references of the stage that some algorithm reads.
  names = {
    getattr(entry.algorithm, 'reference', 'init')
    for entry in stage.envs.values()
    if getattr(entry.algorithm, 'kl_beta', True)
  }
  return init_state(
    params,
    optimizer,
    average=stage.optim.average is not None,
    ema_and_snapshots=sorted(filter(schema.ema_or_snapshot, names)),
  )


def init_state(
  params: Any,
  optimizer: optim.Optimizer | optax.GradientTransformation,
  *,
  average: bool,
  ema_and_snapshots: Sequence[str] = (),
) -> arrays.TrainState:
  """Returns the state before the first batch.

  Args:
    params: the parameters that train.
    optimizer: from `optim`.
    average: whether to keep a moving average of them.
    ema_and_snapshots: names of the references to keep, see
      `update_ema_and_snapshots`.
  """
  policy, _ = transformer.split_critic(params)
  return arrays.TrainState(
    step=jnp.zeros((), jnp.int32),
    params=params,
    opt_state=optimizer.init(params),
    average=jax.tree.map(jnp.copy, policy) if average else None,
    ema_and_snapshots={
      x: jax.tree.map(jnp.copy, policy) for x in ema_and_snapshots
    }
    or None,
    skipped=jnp.zeros((), jnp.int32),
    skipped_in_row=jnp.zeros((), jnp.int32),
  )


class TrainStep:
  """`step(state, batch) -> (state, metrics)`; the given state is donated.

  Metrics are scalars: the objective's, `optim/grad_norm` (before clipping),
  `optim/lr`, `optim/empty` (1 for a batch without a member token),
  `optim/skipped` and `optim/skipped_in_row` (updates whose gradient or loss was
  not finite). With several updates per batch they are means over the passes,
  except `mismatch/*`, from the first pass, whose parameters are those that
  sampled, and `optim/*` other than the norm, from the last pass.
  """

  def __init__(
    self, update: Callable, mesh: Mesh, base: Any, numbers: optim.Numbers
  ):
    self.compiles = 0  # programs compiled, or loaded from the cache
    self.mesh = mesh
    self._rows = NamedSharding(mesh, sharding.BATCH)
    self._whole = NamedSharding(mesh, PartitionSpec())
    self._base = base
    self._numbers = numbers
    self._update = jax.jit(update, donate_argnums=0)

  def __call__(
    self, state: arrays.TrainState, batch: Batch
  ) -> tuple[arrays.TrainState, dict[str, jax.Array]]:
    """Updates with a batch of host or device arrays."""
    batch = self.place(batch)
    with compilation.CompileCounter() as compiling:
      result = self._update(state, batch, self._base, self._numbers)
    self.compiles += compiling.count
    return result

  def place(self, batch: Batch) -> Batch:
    """Moves a host batch to the devices that read it."""
    return sharding.put(
      batch,
      jax.tree.map(lambda x: self._rows if x.ndim else self._whole, batch),
    )


def make_train_step(
  objective: arrays.Objective,
  optimizer: optim.Optimizer,
  *,
  mesh: Mesh,
  rules: sharding.Rules,
  average: float | None = None,
  updates: int = 1,
  base: Any = None,
  reduce: str = 'micro_batch',
) -> TrainStep:
  """Builds the jitted update.

  Args:
    objective: one of `objectives`.
    optimizer: from `optim.make`.
    mesh: devices that hold batch and state.
    rules: sharding of the parameters and of all trees with their paths.
    average: decay per update of the moving average of the weights; None = no
      average.
    updates: optimizer updates per batch; the gradient is compiled once for all
      of them.
    base: a pytree that does not train; the objective gets
      `base.attach(params)`. None = it gets the parameters that train.
    reduce: 'micro_batch' or 'update', how often the devices add up their
      gradients, see `accumulate_once`.
  """

  def loss(params: Any, base: Any, micro: Batch):
    return objective(lora.whole(params, base), micro)

  def gradients(params: Any, base: Any, batch: Batch):
    batch = objective.prepare(lora.whole(params, base), batch)
    if reduce == 'update' and sharding.current() is not None:
      places = sharding.shardings(params, rules, mesh)
      return accumulate_once(loss, params, base, batch, places, objective.dtype)
    return accumulate(lambda p, micro: loss(p, base, micro), params, batch)

  def place(state: arrays.TrainState) -> arrays.TrainState:
    return jax.lax.with_sharding_constraint(
      state, sharding.shardings(state, rules, mesh)
    )

  def passes(
    state: arrays.TrainState, batch: Batch, base: Any, numbers: optim.Numbers
  ):
    def once(state: arrays.TrainState, batch: Batch):
      """Returns the state after one optimizer update, and its metrics."""
      grads, sums, loss = gradients(state.params, base, batch)
      norm = optax.tree.norm(grads)
      bad = ~(jnp.isfinite(norm) & jnp.isfinite(loss))
      empty = batch.members == 0
      ok = ~bad & ~empty
      change = functools.partial(optimizer.update, numbers=numbers)
      new, opt_state = optimize(change, state, grads, ok, average)
      new = dataclasses.replace(
        new,
        skipped=state.skipped + bad,
        skipped_in_row=(state.skipped_in_row + bad) * ~ok,
      )
      new = place(new)
      return new, {
        **combine.means(sums),
        'optim/grad_norm': norm,
        'optim/lr': optim.learning_rate(opt_state),
        'optim/empty': empty.astype(jnp.float32),
        'optim/skipped': new.skipped,
        'optim/skipped_in_row': new.skipped_in_row,
      }

    state = dataclasses.replace(state, step=state.step + 1)
    before = {}
    if updates > 1 or getattr(batch, 'rewards', None) is not None:
      whole = lora.whole(state.params, base)
      batch, before = objective.before_updates(whole, batch)
    if updates == 1:
      state, metrics = once(state, batch)
    else:
      state, metrics = jax.lax.scan(
        lambda s, _: once(s, batch), state, length=updates
      )
      metrics = _over_passes(metrics)
    policy, _ = transformer.split_critic(state.params)
    state = dataclasses.replace(
      state,
      ema_and_snapshots=update_ema_and_snapshots(
        state.ema_and_snapshots, policy, state.step
      ),
    )
    # A scan may choose a layout of its own, and the next call would compile.
    return place(state), metrics | before

  def update(
    state: arrays.TrainState, batch: Batch, base: Any, numbers: optim.Numbers
  ):
    with sharding.use(mesh):
      return passes(state, batch, base, numbers)

  return TrainStep(update, mesh, base, optimizer.numbers)


def optimize(
  change: Callable[..., tuple[Any, Any]],
  state: arrays.TrainState,
  grads: Any,
  ok: jax.Array,
  average: float | None = None,
) -> tuple[arrays.TrainState, Any]:
  """Returns the state after an update, and the optimizer's new state.

  Args:
    change: the `update` of an optimizer.
    state: the state before the update.
    grads: the gradients, like the parameters.
    ok: bool[]; if False, the state stays as it is.
    average: as in `make_train_step`.
  """
  changes, opt_state = change(grads, state.opt_state, state.params)
  params = optax.apply_updates(state.params, changes)
  averaged = state.average
  if averaged is not None and average is not None:
    # a <- decay a + (1 - decay) p, on good updates
    policy, decay = transformer.split_critic(params)[0], average
    averaged = jax.tree.map(
      lambda a, p: jnp.where(ok, decay * a + (1 - decay) * p, a),
      averaged,
      policy,
    )
  new = dataclasses.replace(
    state,
    params=_select(ok, params, state.params),
    opt_state=_select(ok, opt_state, state.opt_state),
    average=averaged,
  )
  return new, opt_state


def _over_passes(metrics: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """Returns one value per metric from those of all passes, see `TrainStep`."""

  def merge(name: str, values: jax.Array) -> jax.Array:
    if name.startswith('mismatch/'):
      return values[0]
    if name.startswith('optim/') and name != 'optim/grad_norm':
      return values[-1]
    return jnp.mean(values)

  return {name: merge(name, values) for name, values in metrics.items()}


def accumulate(
  objective: Callable, params: Any, batch: Batch, like: Any = None
) -> tuple[Any, combine.Metrics, jax.Array]:
  """Returns gradients, metrics and loss, summed over the micro-batches.

  Args:
    objective: a function (params, micro-batch) -> (loss, metrics).
    params: the parameters that train.
    batch: the batch.
    like: a tree whose dtypes the sums have; None = the parameters'.
  """
  grad_fn = jax.value_and_grad(objective, has_aux=True)
  like = params if like is None else like

  def micro_batch_grads(micro):
    (loss, metrics), grads = grad_fn(params, micro)
    grads = jax.tree.map(lambda x, y: x.astype(y.dtype), grads, like)
    return (grads, loss), metrics

  (grads, loss), metrics = _sum_over_micro_batches(micro_batch_grads, batch)
  return grads, metrics, loss


def accumulate_once(
  objective: Callable,
  params: Any,
  base: Any,
  batch: Batch,
  places: Any,
  dtype: str,
) -> tuple[Any, combine.Metrics, jax.Array]:
  """Computes `accumulate`, with one communication per update.

  Every device gathers all weights once, those of `base` as well, and adds up
  the gradients of its own rows over all micro-batches; then they are reduced to
  the parts that the devices hold. `accumulate` communicates at each micro-batch
  instead, and holds the weights of one layer at a time and its part of the
  gradients.

  Args:
    objective: a function (params, base, micro-batch) -> (loss, metrics).
    params: the parameters that train.
    base: those that do not, or None; gathered whole, in its dtypes.
    batch: the batch.
    places: the parameters' shardings, on a mesh of `data` and `fsdp` alone.
    dtype: the compute dtype, in which the layers' matrices are gathered.
  """
  whole, rows = PartitionSpec(), sharding.BATCH
  narrow = tree.map_with_path(
    lambda path, x: (
      x.astype(dtype) if path.startswith('layers/') and x.ndim > 2 else x
    ),
    params,
  )

  def local(narrow, base, batch):
    grads, metrics, loss = accumulate(
      lambda params, micro: objective(params, base, micro),
      narrow,
      batch,
      like=params,
    )
    return (
      jax.tree.map(sharding.reduce_to, grads, places),
      combine.over_devices(metrics, sharding.BATCH_AXES),
      jax.lax.psum(loss, sharding.BATCH_AXES),
    )

  return sharding.split(
    local,
    (whole, whole, jax.tree.map(lambda x: rows if x.ndim else whole, batch)),
    (jax.tree.map(lambda x: x.spec, places), whole, whole),
  )(narrow, base, batch)


def make_measure(
  objective: arrays.Objective, mesh: Mesh, base: Any
) -> Callable[[Any, Batch], dict[str, jax.Array]]:
  """Builds the jitted measurement of a batch that does not train.

  Args:
    objective: one of `objectives`.
    mesh: devices that hold batch and parameters.
    base: see `make_train_step`.

  Returns:
    `(params, batch) -> metrics` of the objective.
  """

  def measure(params, batch: Batch, base):
    whole = lora.whole(params, base)
    with sharding.use(mesh):
      batch = objective.prepare(whole, batch)
      _, metrics = _sum_over_micro_batches(
        lambda micro: objective(whole, micro), batch
      )
    return combine.means(metrics)

  compiled = jax.jit(measure)
  return lambda params, batch: compiled(params, batch, base)


def _sum_over_micro_batches(micro_batch_sums: Callable, batch: Batch):
  """Sums `micro_batch_sums(micro) -> (sums, metrics)` where tokens are."""

  def at(i):
    return micro_batch_sums(
      jax.tree.map(lambda x: x[i] if x.ndim else x, batch)
    )

  # Traced once, for its shapes and for the loop.
  jaxpr, shapes = jax.make_jaxpr(at, return_shape=True)(jnp.int32(0))
  shapes, structure = jax.tree.flatten(shapes)
  zeros = structure.unflatten([jnp.zeros(x.shape, x.dtype) for x in shapes])

  def add(i, before):
    flat = core.jaxpr_as_fun(jaxpr)(i)
    sums, metrics = structure.unflatten(flat)
    return (
      jax.tree.map(jnp.add, before[0], sums),
      combine.merge(before[1], metrics),
    )

  return jax.lax.fori_loop(0, batch.num_micro_batches, add, zeros)


def _select(ok, new, old):
  return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def update_ema_and_snapshots(
  old: dict[str, Any] | None, params: Any, step: jax.Array
) -> dict[str, Any] | None:
  """Returns the EMA and snapshot references after a step's updates.

      'ema:D'       r <- D r + (1 - D) params
      'snapshot:N'  r <- params at every N-th step, else r

  Args:
    old: name -> parameters, or None.
    params: the policy's parameters after the step.
    step: i32[], the number of steps done.
  """
  if old is None:
    return None
  references = {}
  for name, before in old.items():
    parsed = schema.ema_or_snapshot(name)
    assert parsed is not None, name
    kind, number = parsed
    keep = number if kind == 'ema' else step % int(number) != 0
    references[name] = jax.tree.map(
      # A select for snapshots: they equal the policy bit for bit.
      lambda r, p, keep=keep: (
        keep * r + (1 - keep) * p
        if isinstance(keep, float)
        else jnp.where(keep, r, p)
      ),
      before,
      params,
    )
  return references
