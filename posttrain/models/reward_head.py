"""Reward models: a transformer with a scalar head instead of logits.

    reward/kernel    [D]

is added to the transformer's parameters, and an untied language-model head is
removed unless the objective needs it. The kernel is initialized to 0, so that
every answer starts with the same reward.
"""

from typing import Any

import jax
import jax.numpy as jnp

from posttrain import schema
from posttrain.models import transformer

Params = Any


def add(params: Params, keep_lm_head: bool = False) -> Params:
  """Returns a transformer's parameters with a new reward head.

  Args:
    params: from `transformer.init`.
    keep_lm_head: whether to keep an untied language-model head.
  """
  (width,) = params['final_norm']['scale'].shape
  trunk = {k: x for k, x in params.items() if keep_lm_head or k != 'head'}
  return {**trunk, 'reward': {'kernel': jnp.zeros(width, jnp.float32)}}


def shapes(cfg: schema.Model, keep_lm_head: bool = False) -> Params:
  """Returns the parameters as `jax.ShapeDtypeStruct`s; allocates nothing."""
  return jax.eval_shape(lambda p: add(p, keep_lm_head), transformer.shapes(cfg))


def rewards(params: Params, hidden: jax.Array) -> jax.Array:
  """Computes the reward of each prefix of a sequence.

  Args:
    params: from `add`.
    hidden: float[B, T, D] from `transformer.trunk`.

  Returns:
    f32[B, T], the reward if the sequence ended at token t; an answer's reward
    is that of its last token.
  """
  kernel = params['reward']['kernel'][None, None]
  return jnp.sum(hidden.astype(jnp.float32) * kernel, axis=-1)
