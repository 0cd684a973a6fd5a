"""Optax chains from options: clip, AdamW with a schedule and a decay mask."""

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from posttrain import schema, tree
from posttrain.models import transformer


class Numbers(NamedTuple):
  """The numbers of a schedule.

  They are arguments of the compiled train step, so that another learning rate
  or another number of steps does not compile anew.
  """

  first_lr: np.float32  # of the warm-up
  lr: np.float32
  final_lr: np.float32  # of the decay
  warmup_steps: np.int32
  decay_steps: np.int32


class Optimizer(NamedTuple):
  """An `optax.GradientTransformation` and the numbers of its schedule.

  `update(grads, state, params, numbers=...)` may get others, traced ones too.
  """

  init: Callable[[Any], Any]
  update: Callable[..., tuple[Any, Any]]
  numbers: Any  # `Numbers`; with a critic a dict of them


def numbers(cfg: schema.Optim, steps: int) -> Numbers:
  """Returns the numbers of a schedule that ends after `steps` updates."""
  return Numbers(
    # The first update is not empty: lr/warmup, 2 lr/warmup, ..., lr.
    first_lr=np.float32(cfg.lr / max(cfg.warmup_steps, 1)),
    lr=np.float32(cfg.lr),
    final_lr=np.float32(cfg.lr * cfg.final_lr_fraction),
    warmup_steps=np.int32(cfg.warmup_steps),
    decay_steps=np.int32(max(steps - cfg.warmup_steps, 1)),
  )


def schedule(kind: str, n: Numbers) -> optax.Schedule:
  """Returns the learning rate by update: linear warm-up, then the decay.

  Args:
    kind: 'constant', 'linear' or 'cosine'.
    n: from `numbers`; may be traced, unlike the arguments of optax's schedules.
  """

  def part(count, steps):
    return jnp.clip(count, 0, steps) / steps

  def rate(count):
    warmup = n.first_lr + (n.lr - n.first_lr) * part(
      count, jnp.maximum(n.warmup_steps - 1, 1)
    )
    done = part(count - n.warmup_steps, n.decay_steps)
    left = {
      'constant': 1.0,
      'linear': 1 - done,
      'cosine': 0.5 * (1 + jnp.cos(jnp.pi * done)),
    }[kind]
    decay = n.final_lr + (n.lr - n.final_lr) * left
    return jnp.where(count < n.warmup_steps, warmup, decay)

  return rate


def make(cfg: schema.Optim, steps: int) -> Optimizer:
  """Builds clipping by global norm, then AdamW.

  Args:
    cfg: the options.
    steps: updates of the stage, after which the schedule ends.
  """
  own = numbers(cfg, steps)

  def update(grads, state, params, numbers=own):
    return _chain(cfg, numbers).update(grads, state, params)

  return Optimizer(_chain(cfg, own).init, update, own)


def make_all(cfg: schema.Optim, critic: schema.Critic, steps: int) -> Optimizer:
  """Builds the optimizer of a policy, or of a policy with its critic.

  In the critic's warm-up neither the policy nor its optimizer's state changes.

  Args:
    cfg: the policy's options, and the critic's where `critic` has none.
    critic: the critic's.
    steps: as in `make`.
  """
  if critic.kind == 'none':
    return make(cfg, steps)
  own = dataclasses.replace(
    cfg,
    lr=critic.lr,
    warmup_steps=critic.lr_warmup_steps,
    clip_norm=critic.clip_norm,
  )
  parts = {
    'policy': make(cfg, steps - critic.warmup_steps),
    'critic': make(own, steps),
  }

  schedules = {name: x.numbers for name, x in parts.items()}

  def split(params):
    return dict(zip(parts, transformer.split_critic(params), strict=True))

  def init(params):
    params = split(params)
    return {name: x.init(params[name]) for name, x in parts.items()}

  def update(grads, state, params, numbers=schedules):
    grads, params = split(grads), split(params)
    policy, values = (
      x.update(grads[name], state[name], params[name], numbers=numbers[name])
      for name, x in parts.items()
    )
    if critic.warmup_steps:
      moves = state['critic'][1].count >= critic.warmup_steps
      still = jax.tree.map(jnp.zeros_like, policy[0]), state['policy']
      policy = jax.tree.map(lambda x, y: jnp.where(moves, x, y), policy, still)
    state = {'policy': policy[1], 'critic': values[1]}
    return {**policy[0], 'critic': values[0]}, state

  return Optimizer(init, update, schedules)


class Adam(NamedTuple):
  """The numbers of one update by `adamw`, which has no schedule."""

  learning_rate: float = 1e-4
  beta1: float = 0.9
  beta2: float = 0.95
  eps: float = 1e-12
  weight_decay: float = 0.0
  grad_clip_norm: float = 0.0  # 0 = gradients are not scaled down


def adamw(n: Adam) -> optax.GradientTransformation:
  """Builds clipping by global norm, then AdamW, with numbers of one update.

  Weights that `schema.Optim.no_decay` matches do not decay.
  """
  return optax.chain(
    optax.clip_by_global_norm(
      jnp.where(n.grad_clip_norm == 0, jnp.inf, n.grad_clip_norm)
    ),
    optax.adamw(
      n.learning_rate,
      n.beta1,
      n.beta2,
      n.eps,
      weight_decay=n.weight_decay,
      mask=functools.partial(_decayed, schema.Optim.no_decay),
    ),
  )


def _decayed(no_decay: str, params: Any) -> Any:
  return tree.map_with_path(
    lambda path, _: re.search(no_decay, path) is None, params
  )


def _chain(cfg: schema.Optim, n: Numbers) -> optax.GradientTransformation:
  @functools.wraps(optax.adamw)  # whose arguments are the hyperparameters
  def stored_adamw(*args, **options):
    return stored(optax.adamw(*args, **options), cfg.moments_dtype)

  adamw = optax.inject_hyperparams(
    stored_adamw, static_args=('b1', 'b2', 'eps', 'weight_decay', 'mask')
  )
  return optax.chain(
    optax.clip_by_global_norm(cfg.clip_norm),
    adamw(
      learning_rate=schedule(cfg.schedule, n),
      b1=cfg.beta1,
      b2=cfg.beta2,
      eps=cfg.eps,
      weight_decay=cfg.weight_decay,
      mask=functools.partial(_decayed, cfg.no_decay),
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
  """Returns the policy's learning rate in the last update, f32[]."""
  if isinstance(opt_state, dict):
    opt_state = opt_state['policy']
  return opt_state[1].hyperparams['learning_rate']
