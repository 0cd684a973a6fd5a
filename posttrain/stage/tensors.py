"""Arrays on a mesh: their specs and bytes per device, as a table."""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any

import jax

from posttrain import tree


@dataclasses.dataclass(frozen=True)
class Tensor:
  """One array; layers are stacked along its first dimension."""

  path: str
  shape: tuple[int, ...]
  dtype: str
  spec: jax.sharding.PartitionSpec
  device_bytes: int


def of(like: Any) -> list[Tensor]:
  """Returns the arrays of a tree of ShapeDtypeStructs with shardings."""
  return [
    Tensor(path, x.shape, str(x.dtype), x.sharding.spec, _device_bytes(x))
    for path, x in tree.flat(like).items()
  ]


def device_bytes(like: Any) -> int:
  """Returns the bytes per device of such a tree."""
  return sum(_device_bytes(x) for x in jax.tree.leaves(like))


def size(count: float) -> str:
  """Returns a number of bytes with its unit."""
  for unit in ('B', 'KiB', 'MiB'):
    if count < 1024:
      return f'{count:.0f} {unit}'
    count /= 1024
  return f'{count:.1f} GiB'


def _device_bytes(x: jax.ShapeDtypeStruct) -> int:
  assert x.sharding is not None
  return math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize


def lines(tensors: Iterable[Tensor]) -> list[str]:
  """Returns the lines of a table: path, dtype, shape, spec, size per device."""
  rows = [
    (
      x.path,
      f'{_DTYPES.get(x.dtype, x.dtype)}[{", ".join(map(str, x.shape))}]',
      _spec(x.spec),
      size(x.device_bytes),
    )
    for x in tensors
  ]
  widths = [max(len(row[i]) for row in rows) for i in range(4)]
  return [
    f'  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}'
    for a, b, c, d in rows
  ]


_DTYPES = {'float32': 'f32', 'bfloat16': 'bf16', 'int32': 'i32'}


def _spec(spec: jax.sharding.PartitionSpec) -> str:
  """Returns a spec in one word per dimension; '-' = not split."""
  names = ['-' if axis is None else str(axis) for axis in spec]
  return f'({", ".join(names)})'
