"""Devices of a target that need not be here, and their meshes.

A target is a chip and a number of devices, such as h100:64. `layout` places a
mesh on it by the code of a run (`sharding.arrange`), from hosts and coordinates
that the compilers' topologies have as well.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator

from experiments.scale import ceilings, links
from posttrain import schema, sharding

MESH = tuple[int, int, int]
# Chips of a TPU slice in two dimensions.
SLICES = {
  4: (2, 2),
  8: (2, 4),
  16: (4, 4),
  32: (4, 8),
  64: (8, 8),
  128: (8, 16),
  256: (16, 16),
}
KINDS = {'v5e': 'TPU v5 lite', 'v6e': 'TPU v6 lite'}


@dataclasses.dataclass(frozen=True)
class Target:
  """Devices of one kind."""

  chip: str  # one of `ceilings.CHIPS`
  devices: int

  def __str__(self):
    return f'{self.chip}:{self.devices}'

  @property
  def tpu(self) -> bool:
    """Returns whether the chip is a TPU."""
    return self.chip in KINDS

  @property
  def platform(self) -> str:
    """Returns the platform of plans."""
    return 'tpu' if self.tpu else 'gpu'

  def host(self, per_host: int) -> 'Target':
    """Returns the devices of one host."""
    return Target(self.chip, min(self.devices, per_host))


@dataclasses.dataclass(frozen=True)
class _Device:
  """What `sharding.arrange` reads of a device."""

  id: int
  process_index: int
  slice_index: int
  platform: str
  device_kind: str
  coords: tuple[int, int, int] | None = None
  core_on_chip: int = 0


def parse(text: str) -> Target:
  """Returns a target.

  Args:
    text: CHIP:DEVICES.

  Raises:
    ValueError: no such chip, or no such number of devices.
  """
  chip, _, number = text.partition(':')
  count = int(number) if number.isdecimal() else 0
  if chip not in ceilings.CHIPS or not count:
    raise ValueError(
      f'target must be CHIP:DEVICES: got {text!r}, expected a chip of '
      f'{", ".join(ceilings.CHIPS)}'
    )
  if chip in KINDS and count not in SLICES:
    raise ValueError(
      f'{chip} must have the chips of a slice: got {count}, expected one of '
      f'{", ".join(map(str, SLICES))}'
    )
  if chip not in KINDS and count > 8 and count % 8:
    raise ValueError(
      f'{chip} must have whole hosts of 8 devices: got {count}; use '
      f'{count // 8 * 8} or {count // 8 * 8 + 8}'
    )
  return Target(chip, count)


def layout(target: Target, mesh: MESH) -> links.Layout:
  """Returns hosts and coordinates of the devices of a mesh."""
  return links.of_devices(sharding.arrange(mesh, _devices(target)))


@functools.cache
def _devices(target: Target) -> list[_Device]:
  if not target.tpu:
    return [
      _Device(i, i // 8, i // 8, 'gpu', target.chip)
      for i in range(target.devices)
    ]
  width, height = SLICES[target.devices]
  return [
    _Device(
      y * width + x,
      y // 2 * (width // 2) + x // 2,
      0,
      'tpu',
      KINDS[target.chip],
      (x, y, 0),
    )
    for y in range(height)
    for x in range(width)
  ]


def topology(target: Target) -> str:
  """Returns the compiler's name of a target's devices."""
  if target.tpu:
    return f'{target.chip}:' + 'x'.join(map(str, SLICES[target.devices]))
  hosts = max(target.devices // 8, 1)
  return f'{hosts}x1x{target.devices // hosts}'


def candidates(target: Target, per_host: int) -> Iterator[MESH]:
  """Yields all meshes of a target, the one with the largest `data` first."""
  count = target.devices
  for data in (x for x in range(count, 0, -1) if count % x == 0):
    rest = count // data
    for tensor in (x for x in range(1, rest + 1) if rest % x == 0):
      if tensor <= per_host and math.gcd(tensor, per_host) == tensor:
        yield data, rest // tensor, tensor


def local_mesh(mesh: MESH, per_host: int) -> MESH:
  """Returns the mesh that a host decodes on, as `sharding.local_mesh` does."""
  tensor = math.gcd(mesh[2], per_host)
  return per_host // tensor, 1, tensor


def abstract(mesh: MESH):
  """Returns an abstract mesh of the given sizes."""
  return sharding.abstract_mesh(schema.Mesh(*mesh), math.prod(mesh))
