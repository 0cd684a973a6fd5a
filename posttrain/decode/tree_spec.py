"""Comparison of parameter trees by the shapes of their leaves.

Shape, dtype and sharding are compared, never values.
"""

from typing import Any

import jax

from posttrain import tree


def describe(params: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Returns the leaves' shapes by path; keeps no array alive."""

  def spec(x):
    sharding = getattr(x, 'sharding', None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return {path: spec(x) for path, x in tree.flat(params).items()}


def check_same(
  old: dict[str, jax.ShapeDtypeStruct], new: dict[str, jax.ShapeDtypeStruct]
) -> None:
  """Checks that two trees have equal specs.

  Raises:
    ValueError: with the first leaf that differs.
  """
  for path in [*old, *(path for path in new if path not in old)]:
    a, b = old.get(path), new.get(path)
    same = a is not None and b is not None and _same(a, b)
    if not same:
      raise ValueError(
        f'weights must keep their shapes: got {path} = {b}, expected {a}; make '
        'an engine for other weights'
      )


def _same(a: jax.ShapeDtypeStruct, b: jax.ShapeDtypeStruct) -> bool:
  if (a.shape, a.dtype) != (b.shape, b.dtype):
    return False
  if a.sharding is None or b.sharding is None:
    return True
  return a.sharding.is_equivalent_to(b.sharding, len(a.shape))
