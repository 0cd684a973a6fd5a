"""A reward model: a transformer that ends in a number instead of tokens.

    reward/kernel    [D]

beside the parameters of `transformer`, whose own head is not read. It begins
at 0, so that every answer is worth the same.
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
  return {**params, 'reward': {'kernel': jnp.zeros(width, jnp.float32)}}


def rewards(
    params: Params, cfg: schema.Model, ids: jax.Array, positions: jax.Array,
    segment_ids: jax.Array, ends: jax.Array,
) -> jax.Array:  # fmt: skip
  """Returns what sequences are worth, by the hidden states at their ends.

  Args:
    params: of `add`.
    cfg: model options.
    ids: i32[B, T], packed rows.
    positions: i32[B, T], RoPE index, restarting at 0 in every segment.
    segment_ids: i32[B, T], packed example id; 0 = pad.
    ends: i32[B, N], where in its row each sequence has its last token.

  Returns:
    f32[B, N].
  """
  hidden, _ = transformer.trunk(params, cfg, ids, positions, segment_ids)
  last = jnp.take_along_axis(hidden, ends[..., None], axis=1)
  return last.astype(jnp.float32) @ params['reward']['kernel']
