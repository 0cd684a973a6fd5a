"""One update from one batch: loop over live micro-batches, then optimize.

    grads = sum over micro-batches of d objective / d params
    params, opt_state = optimizer(grads)      unless a gradient is not finite

The number of live micro-batches is traced, so a shorter batch does not
recompile. The objective divides by the whole batch's counts, so the result
does not depend on how it is cut.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain import arrays, instrument, optim, sharding
from posttrain.losses import combine


def init_state(
    params, optimizer: optax.GradientTransformation, *, average: bool
) -> arrays.TrainState:
  """Returns the state before the first batch; `average` keeps a mean of it."""
  return arrays.TrainState(
      step=jnp.zeros((), jnp.int32),
      params=params,
      opt_state=optimizer.init(params),
      average=jax.tree.map(jnp.copy, params) if average else None,
      skipped=jnp.zeros((), jnp.int32),
      skipped_in_row=jnp.zeros((), jnp.int32),
  )


class TrainStep:
  """`step(state, batch) -> (state, metrics)`; the given state is donated.

  Metrics are f32 scalars: the objective's means, `optim/grad_norm` (before
  clipping), `optim/lr`, `optim/skipped` and `optim/skipped_in_row`.
  """

  def __init__(self, update: Callable, batch_shardings: arrays.Batch):
    self.compiles = 0  # programs that calls have compiled (or loaded)
    self._batch_shardings = batch_shardings
    self._update = jax.jit(update, donate_argnums=0)

  def __call__(self, state: arrays.TrainState, batch: arrays.Batch):
    batch = self.place(batch)
    with instrument.CompileCounter() as compiling:
      result = self._update(state, batch)
    self.compiles += compiling.count
    return result

  def place(self, batch: arrays.Batch) -> arrays.Batch:
    """Moves a host batch to the devices that will read it."""
    return jax.device_put(batch, self._batch_shardings)


def make_train_step(
    objective: Callable,
    optimizer: optax.GradientTransformation,
    *,
    mesh: Mesh,
    rules: sharding.Rules,
    average: float | None = None,
) -> TrainStep:
  """Builds the jitted update.

  Args:
    objective: `(params, micro) -> (loss, {name: (sum, count)})`.
    optimizer: from `optim.make`.
    mesh: where batch and state live.
    rules: sharding of the parameters and all that mirrors them.
    average: decay of the moving average of the weights; None = none kept.
  """

  def update(state: arrays.TrainState, batch: arrays.Batch):
    grads, sums, loss = accumulate(objective, state.params, batch)
    norm = optax.tree.norm(grads)
    ok = jnp.isfinite(norm) & jnp.isfinite(loss)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    new = arrays.TrainState(
        step=state.step + 1,
        params=_select(ok, params, state.params),
        opt_state=_select(ok, opt_state, state.opt_state),
        average=_average(state.average, params, ok, average),
        skipped=state.skipped + ~ok,
        skipped_in_row=jnp.where(ok, 0, state.skipped_in_row + 1),
    )
    new = jax.lax.with_sharding_constraint(
        new, sharding.shardings(new, rules, mesh)
    )
    metrics = {
        **combine.means(sums),
        'optim/grad_norm': norm,
        'optim/lr': optim.learning_rate(opt_state),
        'optim/skipped': new.skipped,
        'optim/skipped_in_row': new.skipped_in_row,
    }
    return new, metrics

  return TrainStep(update, _batch_shardings(mesh))


def accumulate(objective, params, batch: arrays.Batch):
  """Sums gradients, metric pairs and loss over the live micro-batches."""
  grad_fn = jax.value_and_grad(objective, has_aux=True)

  def one(i):
    micro = jax.tree.map(lambda x: x[i] if x.ndim else x, batch)
    (loss, metrics), grads = grad_fn(params, micro)
    return grads, metrics, loss

  zeros = jax.tree.map(
      lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(one, 0)
  )
  return jax.lax.fori_loop(
      0, batch.live, lambda i, acc: jax.tree.map(jnp.add, acc, one(i)), zeros
  )


def _select(ok, new, old):
  return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)


def _average(average, params, ok, decay):
  """a <- decay a + (1 - decay) p, on good updates."""
  if average is None:
    return None
  return jax.tree.map(
      lambda a, p: jnp.where(ok, decay * a + (1 - decay) * p, a),
      average, params,
  )  # fmt: skip


def _batch_shardings(mesh: Mesh) -> arrays.Batch:
  tokens = NamedSharding(mesh, sharding.BATCH)
  scalar = NamedSharding(mesh, PartitionSpec())
  scalars = ('rl_count', 'ce_count', 'ref_kl_count', 'live')
  fields = arrays.Batch.__dataclass_fields__
  return arrays.Batch(
      **{name: scalar if name in scalars else tokens for name in fields}
  )

