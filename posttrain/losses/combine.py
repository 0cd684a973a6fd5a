"""The sum of the loss components, and the arithmetic of metrics.

A metric is a pair (sum, count), or arrays of them, which `sums` adds up. Pairs
of micro-batches (or devices) add, entry by entry; afterwards the metric's value
is `sum / max(count, 1)`, see `means`. A count of 0 marks a plain sum, which is
not divided. A maximum is a `Max` instead of a pair; see `merge`.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Max(NamedTuple):
  """A maximum of values >= 0; the neutral element is 0."""

  value: jax.Array  # f32[]


Metrics = dict[str, tuple[jax.Array, jax.Array] | Max]


def pair(values: jax.Array, where: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns the metric mean(values[where]); other values may be inf or NaN."""
  values = jnp.where(where, jax.lax.stop_gradient(values), 0.0)
  return values, jnp.astype(where, jnp.float32)


def largest(values: jax.Array, where: jax.Array | bool) -> Max:
  """Returns the metric max(values[where]) of values >= 0; 0 if all False."""
  return Max(jnp.max(jnp.where(where, jax.lax.stop_gradient(values), 0.0)))


def sums(metrics: Metrics, copies: jax.Array | None = None) -> Metrics:
  """Adds up the arrays of pairs.

  Args:
    metrics: pairs of arrays, or of numbers, which are sums already.
    copies: i32[...], how often each entry of an array counts; None = once.
  """

  def total(x):
    return jnp.sum(x if copies is None or not x.ndim else x * copies)

  return {
    name: x if isinstance(x, Max) else (total(x[0]), total(x[1]))
    for name, x in metrics.items()
  }


def merge(a: Metrics, b: Metrics) -> Metrics:
  """Merges the metrics of two micro-batches; zeros are neutral."""
  return {
    name: jax.tree.map(
      jnp.maximum if isinstance(x, Max) else jnp.add, x, b[name]
    )
    for name, x in a.items()
  }


def over_devices(metrics: Metrics, axes: tuple[str, ...]) -> Metrics:
  """Merges the metrics of the devices of mesh axes, within `jax.shard_map`."""
  return {
    name: (jax.lax.pmax if isinstance(x, Max) else jax.lax.psum)(x, axes)
    for name, x in metrics.items()
  }


def total(
  parts: Mapping[str, tuple[jax.Array, Metrics]],
  counts: Mapping[str, jax.Array],
) -> tuple[jax.Array, Metrics]:
  """Returns the sum over components of their terms' sum by their count.

  loss = sum_c (sum_t terms_ct) / max(N_c, 1)

  N_c counts over the whole global batch, so the losses (and gradients) of its
  micro-batches add up to those of the batch. A component without members
  adds 0.

  Args:
    parts: component -> (terms f32[...] of this micro-batch, metrics).
    counts: component -> f32[], number of members in the global batch:
      tokens, sequences, pairs or answers.

  Returns:
    The loss, f32[], and the metrics: `<component>/<name>` as given,
    `loss/<component>` and `loss/total`, this micro-batch's shares of the
    loss. A share is already divided by the global count, so its pair is
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
  """Splits each component's loss by groups of tokens.

  Args:
    parts, counts: see `total`.
    groups: name -> bool[...], the group's terms.

  Returns:
    `loss/<component>/<group>` as (share, 0). The shares of disjoint groups
    that cover all tokens add up to `loss/<component>`.
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
  """Turns merged metrics into values, f32[]; an empty mean is 0."""
  return {
    name: x.value if isinstance(x, Max) else x[0] / jnp.maximum(x[1], 1.0)
    for name, x in sums(metrics).items()
  }
