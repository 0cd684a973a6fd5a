"""Component sums to one loss, and the arithmetic of metrics.

A metric is a pair (sum, count). Pairs of micro-batches (or devices) add, entry
by entry; afterwards the metric's value is `sum / max(count, 1)`, see `means`.
So a count of 0 marks a sum that is no mean of anything: it is only added up.
What is not a mean but a largest value is a `Max`; see `merge`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Max(NamedTuple):
  """A largest value: merged by maximum, from 0 on, so never of negatives."""

  value: jax.Array  # f32[]


Metrics = dict[str, tuple[jax.Array, jax.Array] | Max]


def pair(
    values: jax.Array, where: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The metric `mean of values over where`; other values may be inf or NaN."""
  values = jnp.where(where, jax.lax.stop_gradient(values), 0.0)
  return jnp.sum(values), jnp.sum(where, dtype=jnp.float32)


def largest(values: jax.Array, where: jax.Array) -> Max:
  """The metric `max of values (>= 0) over where`; 0 if there is none."""
  return Max(jnp.max(jnp.where(where, jax.lax.stop_gradient(values), 0.0)))


def merge(a: Metrics, b: Metrics) -> Metrics:
  """Metrics of two micro-batches -> of both; zeros are the neutral ones."""
  return {
      name: jax.tree.map(
          jnp.maximum if isinstance(x, Max) else jnp.add, x, b[name]
      )
      for name, x in a.items()
  }


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
  """Turns merged metrics into values; nothing counted is 0."""
  return {
      name: x.value if isinstance(x, Max) else x[0] / jnp.maximum(x[1], 1.0)
      for name, x in metrics.items()
  }
