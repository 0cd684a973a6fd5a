"""A reward model: a transformer that ends in a number instead of tokens.

    reward/kernel    [D]

in place of the head that `transformer` has where it is not tied. It begins at
0, so that every answer is worth the same.
"""

from typing import Any

import jax
import jax.numpy as jnp

from posttrain import schema
from posttrain.models import transformer

Params = Any


def add(params: Params) -> Params:
  """Returns a transformer's parameters with a new head."""
  (width,) = params['final_norm']['scale'].shape
  trunk = {name: x for name, x in params.items() if name != 'head'}
  return {**trunk, 'reward': {'kernel': jnp.zeros(width, jnp.float32)}}


def shapes(cfg: schema.Model) -> Params:
  """The parameters as `jax.ShapeDtypeStruct`s: nothing is made."""
  return jax.eval_shape(add, transformer.shapes(cfg))


def rewards(
    params: Params, cfg: schema.Model, ids: jax.Array, positions: jax.Array,
    segment_ids: jax.Array,
) -> jax.Array:  # fmt: skip
  """Returns what a sequence would be worth if it ended at each token.

  Args:
    params: of `add`.
    cfg: model options.
    ids: i32[B, T], packed rows.
    positions: i32[B, T], RoPE index, restarting at 0 in every segment.
    segment_ids: i32[B, T], packed example id; 0 = pad.

  Returns:
    f32[B, T]; a sequence's reward is that of its last token.
  """
  hidden, _ = transformer.trunk(params, cfg, ids, positions, segment_ids)
  kernel = params['reward']['kernel'][None, None]
  return jnp.sum(hidden.astype(jnp.float32) * kernel, axis=-1)
