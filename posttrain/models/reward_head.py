"""A reward model: a transformer that ends in a number instead of tokens.

    reward/kernel    [D]

beside what `transformer` has, but for a head that is not tied and not needed.
It begins at 0, so that every answer is worth the same.
"""

from typing import Any

import jax
import jax.numpy as jnp

from posttrain import schema
from posttrain.models import transformer

Params = Any


def add(params: Params, speaks: bool = False) -> Params:
  """Returns a transformer's parameters with a new head.

  Args:
    params: of `transformer.init`.
    speaks: it is to predict tokens as well, so that their head stays.
  """
  (width,) = params['final_norm']['scale'].shape
  trunk = {k: x for k, x in params.items() if speaks or k != 'head'}
  return {**trunk, 'reward': {'kernel': jnp.zeros(width, jnp.float32)}}


def shapes(cfg: schema.Model, speaks: bool = False) -> Params:
  """The parameters as `jax.ShapeDtypeStruct`s: nothing is made."""
  return jax.eval_shape(lambda p: add(p, speaks), transformer.shapes(cfg))


def rewards(params: Params, hidden: jax.Array) -> jax.Array:
  """Returns what a sequence would be worth if it ended at each token.

  Args:
    params: of `add`.
    hidden: [B, T, D] of `transformer.trunk`.

  Returns:
    f32[B, T]; an answer's reward is that of its last token.
  """
  kernel = params['reward']['kernel'][None, None]
  return jnp.sum(hidden.astype(jnp.float32) * kernel, axis=-1)
