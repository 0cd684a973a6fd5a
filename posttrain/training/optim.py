"""Optax chains from options: clip, AdamW with a schedule and a decay mask."""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import optax

from posttrain import schema, tree


def schedule(cfg: schema.Optim, steps: int) -> optax.Schedule:
  """Returns the learning rate by update: linear warm-up, then the decay."""
  final = cfg.lr * cfg.final_lr_fraction
  span = max(steps - cfg.warmup_steps, 1)
  decay = {
    'constant': optax.constant_schedule(cfg.lr),
    'linear': optax.linear_schedule(cfg.lr, final, span),
    'cosine': optax.cosine_decay_schedule(cfg.lr, span, cfg.final_lr_fraction),
  }[cfg.schedule]
  if not cfg.warmup_steps:
    return decay
  # The first update is not empty: lr/warmup, 2 lr/warmup, ..., lr.
  warmup = optax.linear_schedule(
    cfg.lr / cfg.warmup_steps, cfg.lr, max(cfg.warmup_steps - 1, 1)
  )
  return optax.join_schedules([warmup, decay], [cfg.warmup_steps])


def make(cfg: schema.Optim, steps: int) -> optax.GradientTransformation:
  """Builds clipping by global norm, then AdamW.

  Args:
    cfg: the options.
    steps: updates of the stage, after which the schedule ends.
  """

  def decayed(params):
    return tree.map_with_path(
      lambda path, _: re.search(cfg.no_decay, path) is None, params
    )

  @functools.wraps(optax.adamw)  # whose arguments are the hyperparameters
  def stored_adamw(*args, **options):
    return stored(optax.adamw(*args, **options), cfg.moments_dtype)

  adamw = optax.inject_hyperparams(
    stored_adamw, static_args=('b1', 'b2', 'eps', 'weight_decay', 'mask')
  )
  return optax.chain(
    optax.clip_by_global_norm(cfg.clip_norm),
    adamw(
      learning_rate=schedule(cfg, steps),
      b1=cfg.beta1,
      b2=cfg.beta2,
      eps=cfg.eps,
      weight_decay=cfg.weight_decay,
      mask=decayed,
    ),
  )


def stored(
  adamw: optax.GradientTransformation, dtype: str
) -> optax.GradientTransformation:
  """Stores both moments of `optax.adamw` in a dtype.

  An update is computed in float32 from the stored moments, and the new ones are
  rounded to the nearest number of the dtype. (optax's `mu_dtype` casts the
  first moment alone.)

  bfloat16 has 8 significant bits. With a constant x, m <- b m + (1 - b) x stops
  where the change is below half a unit in the last place: at most
  2^-8 / (1 - b) from x, relative to m, which is 4 % for b = 0.9, 8 % for 0.95
  and 39 % for 0.99. Gradients that vary from update to update average much of
  it out. A moment decays to 0 only if b < 1 - 2^-8.

  Args:
    adamw: the transformation, whose first state is `optax.ScaleByAdamState`.
    dtype: 'float32' or 'bfloat16'.
  """
  if dtype == 'float32':
    return adamw

  def cast(state: Any, dtype: Any) -> Any:
    adam, *others = state
    mu, nu = (optax.tree.cast(x, dtype) for x in (adam.mu, adam.nu))
    return optax.ScaleByAdamState(adam.count, mu, nu), *others

  def update(updates, state, params=None):
    updates, state = adamw.update(updates, cast(state, jnp.float32), params)
    return updates, cast(state, dtype)

  return optax.GradientTransformation(
    lambda params: cast(adamw.init(params), dtype), update
  )


def learning_rate(opt_state: Any) -> jax.Array:
  """Returns the learning rate of the last update, f32[]."""
  return opt_state[1].hyperparams['learning_rate']
