"""Optax chains from options: clip, AdamW with a schedule and a decay mask."""

import re
from typing import Any

import jax
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

  adamw = optax.inject_hyperparams(
    optax.adamw, static_args=('b1', 'b2', 'eps', 'weight_decay', 'mask')
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


def learning_rate(opt_state: Any) -> jax.Array:
  """Returns the learning rate of the last update, f32[]."""
  return opt_state[1].hyperparams['learning_rate']
