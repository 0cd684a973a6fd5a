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


def pair(values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
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
  """Divides the sum of each component's terms by its count, and adds.

  loss = sum_c (sum_t terms_ct) / max(N_c, 1)

  N_c counts over the whole global batch, so the losses (and gradients) of its
  micro-batches add up to those of the batch. A component without members
  adds 0.

  Args:
    parts: component -> (terms f32[...] of this micro-batch, metrics).
    counts: component -> f32[], of the global batch: member tokens, or what
      else the component is a mean over.

  Returns:
    The loss, f32[], and the metrics: `<component>/<name>` as given, and
    `loss/<component>` with `loss/total` as this micro-batch's shares of the
    mean. A share is already divided by the global count, so its pair is
    (share, 0): shares add up over the micro-batches of one update.
  """
  metrics = {}
  loss = jnp.zeros((), jnp.float32)
  zero = jnp.zeros((), jnp.float32)
  for component, (terms, named) in parts.items():
    share = jnp.sum(terms) / jnp.maximum(counts[component], 1.0)
    loss = loss + share
    metrics |= {f'{component}/{name}': x for name, x in named.items()}
    metrics[f'loss/{component}'] = (jax.lax.stop_gradient(share), zero)
  metrics['loss/total'] = (jax.lax.stop_gradient(loss), zero)
  return loss, metrics


def shares(
  parts: Mapping[str, tuple[jax.Array, Metrics]],
  counts: Mapping[str, jax.Array],
  groups: Mapping[str, jax.Array],
) -> Metrics:
  """Splits every component's loss by groups of tokens.

  Args:
    parts, counts: see `total`.
    groups: name -> bool[...], the terms that are its.

  Returns:
    `loss/<component>/<group>` as (share, 0): those of groups that cover all
    tokens add up to `loss/<component>`.
  """
  zero = jnp.zeros((), jnp.float32)
  metrics = {}
  for component, (terms, _) in parts.items():
    count = jnp.maximum(counts[component], 1.0)
    terms = jax.lax.stop_gradient(terms)
    for name, here in groups.items():
      share = jnp.sum(jnp.where(here, terms, 0.0)) / count
      metrics[f'loss/{component}/{name}'] = (share, zero)
  return metrics


def means(metrics: Metrics) -> dict[str, jax.Array]:
  """Turns merged metrics into values; nothing counted is 0."""
  return {
    name: x.value if isinstance(x, Max) else x[0] / jnp.maximum(x[1], 1.0)
    for name, x in metrics.items()
  }
