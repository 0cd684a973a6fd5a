"""Whether other weights can take the place of those that were: by their leaves.

Shape, dtype and sharding are compared, never numbers.
"""

from typing import Any

import jax

from posttrain import tree


def describe(params: Any) -> dict[str, jax.ShapeDtypeStruct]:
  """Leaves by path, without their numbers: those may be donated later."""

  def of(x):
    sharding = getattr(x, 'sharding', None)
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

  return {path: of(x) for path, x in tree.flat(params).items()}


def check_same(
  old: dict[str, jax.ShapeDtypeStruct], new: dict[str, jax.ShapeDtypeStruct]
) -> None:
  """Raises ValueError for the first leaf that is not described alike."""
  for path in [*old, *(path for path in new if path not in old)]:
    a, b = old.get(path), new.get(path)
    same = None not in (a, b) and (a.shape, a.dtype) == (b.shape, b.dtype)
    if same and None not in (a.sharding, b.sharding):
      same = a.sharding.is_equivalent_to(b.sharding, len(a.shape))
    if not same:
      raise ValueError(
        f'weights must stay alike: got {path} = {b}, expected {a}; make an '
        'engine for other weights'
      )
