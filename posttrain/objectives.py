"""What a train step minimizes: functions (params, micro-batch) -> loss.

An objective returns `(loss, metrics)`: `loss` is this micro-batch's share of
the step's loss, so micro-batches add up to it; metrics are
`{name: (sum, count)}` pairs, which add up too.

Axes: B rows, T tokens of one micro-batch.
"""

import jax
import jax.numpy as jnp

from posttrain import arrays, schema, scoring
from posttrain.losses import ce, combine

Metrics = dict[str, tuple[jax.Array, jax.Array]]


class TokenComponents:
  """Sum of the token components, each over its own global member count."""

  def __init__(self, model: schema.Model, envs: tuple[str, ...]):
    """`model` with its vocabulary resolved; `envs` in `env_ids` order."""
    self._model = model
    self._envs = envs

  def __call__(
      self, params, micro: arrays.Batch
  ) -> tuple[jax.Array, Metrics]:
    """Scores the micro-batch once and applies the components to it.

    Args:
      params: f32 master weights.
      micro: a Batch whose per-token arrays are [B, T].
    """
    logprobs, entropy = scoring.score(
        params, self._model, micro.ids, micro.positions, micro.segment_ids,
        micro.temperatures,
    )  # fmt: skip
    loss, metrics = combine.total(
        {'ce': ce.loss(logprobs, micro.ce_weights)},
        {'ce': micro.ce_count},
    )
    return loss, {
        **metrics,
        **self._diagnostics(micro, logprobs, jax.lax.stop_gradient(entropy)),
    }

  def _diagnostics(self, micro, logprobs, entropy) -> Metrics:
    """Means over completion tokens; per environment where there are more."""
    mask = micro.mask & (micro.positions > 0)
    metrics = {'entropy': _mean(entropy, mask)}
    if len(self._envs) > 1:
      for i, name in enumerate(self._envs):
        here = mask & (micro.env_ids == i)
        metrics[f'entropy/{name}'] = _mean(entropy, here)
        metrics[f'nll/{name}'] = _mean(-logprobs, here)
    return metrics


def _mean(values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
  total = jnp.sum(jnp.where(where, jax.lax.stop_gradient(values), 0.0))
  return total, jnp.sum(where.astype(jnp.float32))


KINDS = {'tokens': TokenComponents}
