"""Device groups of a collective, read from the attributes of its HLO.

XLA writes them in three ways:

    {{0,1},{2,3}}                     lists of devices
    [4,2]<=[2,4]T(1,0)                4 groups of 2, of all devices counted in
                                      the order of a transposed array
    mesh['a'=2,'b'=4] {'b'}           the groups along some axes of a mesh; its
                                      device_ids=([..]T(..)) reorder the devices
                                      and 'b':(2)2 is a part of an axis
    source_target_pairs={{0,1}}       of a permutation: pairs
"""

import math
import re

import numpy as np

Groups = tuple[tuple[int, ...], ...]

_LISTS = re.compile(
  r'(?:replica_groups|source_target_pairs)=\{(\{[\d,]*\}(?:,\s*\{[\d,]*\})*)\}'
)
_IOTA = r'\[([\d,]+)\](?:T\(([\d,]+)\))?'
_COUNTED = re.compile(rf'replica_groups=\[(\d+),(\d+)\]<={_IOTA}')
_MESH = re.compile(
  rf'replica_groups=mesh\[([^\]]*)\](?:,\s*device_ids=\({_IOTA}\))?'
  r'\s*\{([^}]*)\}'
)
_SIZE = re.compile(r"'(\w+)'=(\d+)")
_AXIS = re.compile(r"'(\w+)'(?::\((\d+)\)(\d+))?")


def parse(attributes: str) -> Groups:
  """Returns the groups of devices, as indices of the program's devices.

  Args:
    attributes: text after the operands of an instruction.

  Returns:
    Groups; () if the text has none, which means all devices together.
  """
  if match := _LISTS.search(attributes):
    lists = re.findall(r'\{([\d,]*)\}', match[1])
    return tuple(_numbers(x) for x in lists if x)
  if match := _COUNTED.search(attributes):
    order = _ordered(match[3], match[4])
    return _rows(order.reshape(int(match[1]), int(match[2])))
  if match := _MESH.search(attributes):
    return _along(*match.groups())
  return ()


def _numbers(text: str) -> tuple[int, ...]:
  return tuple(int(x) for x in text.split(','))


def _rows(array: np.ndarray) -> Groups:
  return tuple(tuple(map(int, row)) for row in array)


def _ordered(shape: str, axes: str | None) -> np.ndarray:
  """Returns 0, 1, 2, ... in the order of a transposed array."""
  sizes = _numbers(shape)
  devices = np.arange(math.prod(sizes)).reshape(sizes)
  return (devices.transpose(_numbers(axes)) if axes else devices).reshape(-1)


def _along(
  axes: str, shape: str | None, transposed: str | None, chosen: str
) -> Groups:
  """Returns the groups of devices that differ only along the chosen axes."""
  sizes = {name: int(size) for name, size in _SIZE.findall(axes)}
  count = math.prod(sizes.values())
  devices = _ordered(shape, transposed) if shape else np.arange(count)
  parts = {name: [(size, False)] for name, size in sizes.items()}
  for name, before, part in _AXIS.findall(chosen):
    if part:  # a part of the axis: before x part x after
      whole = before, part, sizes[name] // int(before) // int(part)
      parts[name] = [(int(size), i == 1) for i, size in enumerate(whole)]
    else:
      parts[name] = [(sizes[name], True)]
  flat = [part for name in sizes for part in parts[name]]
  devices = devices.reshape([size for size, _ in flat])
  inner = [i for i, (_, within) in enumerate(flat) if within]
  outer = [i for i, (_, within) in enumerate(flat) if not within]
  members = math.prod(flat[i][0] for i in inner)
  return _rows(devices.transpose(outer + inner).reshape(-1, members))
