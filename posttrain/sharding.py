"""Mesh and sharding rules: where every array lives.

Mesh axes: `data` splits the batch, `fsdp` splits the batch and the weights,
`tensor` splits heads and MLP width. Rules are an ordered list of
`(regex, axes)` resolved against tree paths; the first match wins.
"""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from posttrain import schema, tree

AXES = ('data', 'fsdp', 'tensor')
# A batch is [micro_batches, rows, tokens]: the rows are split.
BATCH = PartitionSpec(None, ('data', 'fsdp'))

Rules = tuple[tuple[str, tuple[str | None, ...]], ...]


def make_mesh(cfg: schema.Mesh, devices=None) -> Mesh:
  """Lays the devices out on the three axes.

  Raises:
    ValueError: the axis sizes do not multiply to the number of devices.
  """
  devices = jax.devices() if devices is None else devices
  sizes = [cfg.data, cfg.fsdp, cfg.tensor]
  known = math.prod(size for size in sizes if size != -1)
  sizes = [len(devices) // known if size == -1 else size for size in sizes]
  if math.prod(sizes) != len(devices):
    raise ValueError(
        f'config.mesh must multiply to the {len(devices)} devices: got '
        f'data={cfg.data}, fsdp={cfg.fsdp}, tensor={cfg.tensor}'
    )
  types = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.make_mesh(sizes, AXES, axis_types=types, devices=devices)


def check_batch(mesh: Mesh, rows: int, key: str) -> None:
  """Raises ValueError unless `rows` divide over the batch's mesh axes."""
  ways = mesh.shape['data'] * mesh.shape['fsdp']
  if rows % ways:
    raise ValueError(
        f'{key}.micro_batch_tokens must hold a multiple of data x fsdp = '
        f'{ways} rows: got {rows} rows of {key}.row_tokens'
    )


def shardings(like: Any, rules: Rules, mesh: Mesh) -> Any:
  """Resolves `rules` for a tree of arrays or shapes.

  Optimizer state resolves like the parameters it mirrors, because its paths
  end in theirs. Scalars are replicated.

  Raises:
    ValueError: a dimension does not divide over its mesh axis.
  """
  specs = [(regex, PartitionSpec(*axes)) for regex, axes in rules]
  specs = tree.match_rules([*specs, ('', PartitionSpec())], like)

  def place(path: str, leaf, spec) -> NamedSharding:
    if leaf.ndim == 0:
      spec = PartitionSpec()
    for size, axis in zip(leaf.shape, spec, strict=False):
      if axis is not None and size % mesh.shape[axis]:
        raise ValueError(
            f'{path} must divide over config.mesh.{axis}='
            f'{mesh.shape[axis]}: got shape {leaf.shape}; choose a divisor'
        )
    return NamedSharding(mesh, spec)

  return tree.map_with_path(place, like, specs)
