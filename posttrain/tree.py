"""Trees by path: names of leaves, `(regex, value)` rules, checksums.

A path joins the keys from the root with slashes: `params/block/attn/query`.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def path_str(path: Sequence[Any]) -> str:
  """Joins a key path of `jax.tree_util` into 'a/b/c' ('' for the root)."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator='/')


def flat(tree: Any) -> dict[str, Any]:
  """Returns {path: leaf}, in the order of `jax.tree.leaves`."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {path_str(path): leaf for path, leaf in leaves}


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
  """Maps `fn(path, leaf, *leaves of rest)` over the leaves."""
  return jax.tree_util.tree_map_with_path(
    lambda path, *leaves: fn(path_str(path), *leaves), tree, *rest
  )


def match(rules: Sequence[tuple[str, Any]], path: str) -> Any:
  """Returns the value of the first rule whose regex is found in `path`.

  Args:
    rules: `(regex, value)` pairs, searched (not full-matched) in order.
    path: the leaf's path.

  Raises:
    ValueError: no rule matches.
  """
  for regex, value in rules:
    if re.search(regex, path):
      return value
  raise ValueError(
    f'rules must match every leaf: got none for {path!r}, expected one of '
    f"{[regex for regex, _ in rules]}; end the list with ('.*', value)"
  )


def not_finite(tree: Any) -> list[str]:
  """Returns the paths of the leaves with a number that is not finite."""
  by_path = flat(tree)
  flags = jax.device_get(_are_finite(list(by_path.values())))
  return [x for x, finite in zip(by_path, flags, strict=True) if not finite]


@jax.jit  # one program for all leaves
def _are_finite(leaves):
  # NaN and infinity times 0 are NaN, and so is a sum with it. (On CPUs, XLA
  # stores the result of `isfinite`, and its maximum leaves NaN out.)
  return jnp.stack([jnp.isfinite(jnp.sum(x * 0)) for x in leaves])


def checksums(tree: Any) -> dict[str, int]:
  """Returns {path: sum of mixed words, each times an odd weight, mod 2^32}.

  Mixing maps words one to one, and an odd factor is invertible mod 2^32, so
  one changed element always changes the sum. Weights depend on the position,
  so two swapped elements change it as well. Without mixing, every constant
  bfloat16 vector of 2^n elements would sum to 0. Integer sums do not depend
  on their order, so every sharding gives the same value.
  """
  by_path = flat(tree)
  sums = jax.device_get([_sum_leaf(leaf) for leaf in by_path.values()])
  return {path: int(total) for path, total in zip(by_path, sums, strict=True)}


@jax.jit  # per leaf: leaves of equal shapes share one program
def _sum_leaf(x):
  if x.dtype == jnp.bool_:
    x = x.astype(jnp.uint8)
  words = {1: jnp.uint8, 2: jnp.uint16}.get(x.dtype.itemsize, jnp.uint32)
  x = jax.lax.bitcast_convert_type(x, words).astype(jnp.uint32)
  x ^= x >> 16  # the finalizer of MurmurHash3 (Appleby)
  x *= jnp.uint32(0x85EBCA6B)
  x ^= x >> 13
  x *= jnp.uint32(0xC2B2AE35)
  x ^= x >> 16
  weight = jnp.zeros(x.shape, jnp.uint32)
  for axis in range(x.ndim):
    index = jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    weight = weight * jnp.uint32(0x9E3779B1) + index
  return jnp.sum(x * (2 * weight + 1), dtype=jnp.uint32)
