"""The one forward that turns tokens into logprobs.

The train step, the engine's scoring and frozen references all call `score`,
so their logprobs agree to rounding; who chooses tokens calls `next_logits`,
whose law is the one that `score` reads.

Axes: B rows, T tokens, D model, V vocab.
"""

from typing import Any

import jax
import jax.numpy as jnp

from posttrain import schema
from posttrain.losses import logprobs as logprobs_lib
from posttrain.models import transformer


def score(
    params: Any,
    cfg: schema.Model,
    ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array,
    temperatures: jax.Array,
) -> tuple[jax.Array, jax.Array]:
  """Log probability of every token given those before it in its segment.

  logprobs[t] = log softmax(logits[t - 1] / temperatures[t])[ids[t]]

  The temperature is that of the token which is predicted. The first token of
  a segment is predicted by nothing: it and pads get exactly 0.

  Args:
    params: the model's parameters.
    cfg: model options, with `vocab_size` resolved.
    ids: i32[B, T], packed rows.
    positions: i32[B, T], RoPE index, restarting at 0 in every segment.
    segment_ids: i32[B, T], packed example id; 0 = pad.
    temperatures: f32[B, T], > 0.

  Returns:
    (logprobs f32[B, T] in nats, entropy f32[B, T] of the law each token was
    drawn from, in nats).
  """
  hidden, _ = transformer.trunk(params, cfg, ids, positions, segment_ids)
  weight, softcap = transformer.head(params, cfg)
  # Each place predicts its right neighbour; the last one's answer is dropped.
  outputs = logprobs_lib.linear(
      hidden, weight, jnp.roll(ids, -1, axis=1),
      jnp.roll(temperatures, -1, axis=1), softcap=softcap,
  )
  predicted = (positions > 0) & (segment_ids != 0)
  return tuple(
      jnp.where(predicted, jnp.roll(x, 1, axis=1), 0.0) for x in outputs
  )


def next_logits(
    params: Any, cfg: schema.Model, hidden: jax.Array
) -> jax.Array:
  """Logits of the token that follows each hidden state.

  Args:
    params: the model's parameters.
    cfg: model options, with `vocab_size` resolved.
    hidden: float[..., D] of `transformer.trunk`, in the compute dtype.

  Returns:
    f32[..., V]; log_softmax(logits / temperature) is what `score` reads.
  """
  weight, softcap = transformer.head(params, cfg)
  return logprobs_lib.logits(hidden, weight, softcap=softcap)
