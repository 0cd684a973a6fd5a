"""Component sums to one loss, and the arithmetic of metric pairs.

A metric is a pair (sum, count). Pairs of micro-batches (or devices) add, entry
by entry; afterwards the metric's value is `sum / max(count, 1)`, see `means`.
So a count of 0 marks a sum that is no mean of anything: it is only added up.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp

Metrics = dict[str, tuple[jax.Array, jax.Array]]


def total(
    parts: Mapping[str, tuple[jax.Array, Metrics]],
    counts: Mapping[str, jax.Array],
) -> tuple[jax.Array, Metrics]:
  """Divides each component's sum by its count, and adds.

  loss = sum_c sum_c / max(N_c, 1)

  N_c counts the member tokens of the whole global batch, so the losses (and
  gradients) of its micro-batches add up to those of the batch. A component
  without members adds 0.

  Args:
    parts: component -> (sum over this micro-batch, metrics).
    counts: component -> f32[], member tokens of the global batch.

  Returns:
    The loss, f32[], and the metrics: `<component>/<name>` as given, and
    `loss/<component>` with `loss/total` as this micro-batch's shares of the
    mean. A share is already divided by the global count, so its pair is
    (share, 0): shares add up over the micro-batches of one update.
  """
  metrics = {}
  loss = jnp.zeros((), jnp.float32)
  zero = jnp.zeros((), jnp.float32)
  for component, (value, named) in parts.items():
    share = value / jnp.maximum(counts[component], 1.0)
    loss = loss + share
    metrics |= {f'{component}/{name}': x for name, x in named.items()}
    metrics[f'loss/{component}'] = (jax.lax.stop_gradient(share), zero)
  metrics['loss/total'] = (jax.lax.stop_gradient(loss), zero)
  return loss, metrics


def means(metrics: Metrics) -> dict[str, jax.Array]:
  """Turns accumulated (sum, count) pairs into values; nothing counted is 0."""
  return {
      name: value / jnp.maximum(count, 1.0)
      for name, (value, count) in metrics.items()
  }
