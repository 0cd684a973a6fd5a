"""Types of TPU slices, as Cloud TPU names them: v5litepod-16, v6e-32, v5p-64.

From the tables of "TPU versions" and "TPUs in GKE" of the Google Cloud
documentation. Hosts of a slice have four chips; a v5e or v6e slice of one host
may have one, four or eight.
"""

import re
from typing import NamedTuple

from posttrain.util import errors

# Prefix -> label of GKE's nodes, runtime of TPU VMs.
_KINDS = {
  'v5litepod': ('tpu-v5-lite-podslice', 'v2-alpha-tpuv5-lite'),
  'v6e': ('tpu-v6e-slice', 'v2-alpha-tpuv6e'),
  'v5p': ('tpu-v5p-slice', 'v2-alpha-tpuv5'),
}
# Chips -> topology.
_FLAT = {
  1: '1x1',
  4: '2x2',
  8: '2x4',
  16: '4x4',
  32: '4x8',
  64: '8x8',
  128: '8x16',
  256: '16x16',
}
_CUBIC = {
  4: '2x2x1',
  8: '2x2x2',
  16: '2x2x4',
  32: '2x4x4',
  64: '4x4x4',
  128: '4x4x8',
  256: '4x8x8',
  512: '8x8x8',
}


class Slice(NamedTuple):
  """A slice: what the clusters call it, and its hosts."""

  label: str  # value of cloud.google.com/gke-tpu-accelerator
  topology: str  # value of cloud.google.com/gke-tpu-topology
  runtime: str  # version of the software of a TPU VM
  hosts: int
  chips_per_host: int


def find(name: str) -> Slice:
  """Returns the slice of an accelerator type.

  Raises:
    ValueError: the type is not in the tables; lists the known types.
  """
  parts = re.fullmatch(r'(\w+)-(\d{1,5})', name, re.ASCII)
  kind, number = (parts[1], int(parts[2])) if parts else ('', 0)
  # The number of v5p counts cores, two to a chip.
  chips = number // 2 if kind == 'v5p' and number % 2 == 0 else number
  topologies = _CUBIC if kind == 'v5p' else _FLAT
  if kind not in _KINDS or chips not in topologies:
    raise ValueError(
      f'--tpu must be an accelerator type: got {errors.quote(name)}, expected '
      f'v5litepod-N or v6e-N with N chips of {tuple(_FLAT)}, or v5p-N with N '
      f'cores of {tuple(2 * chips for chips in _CUBIC)}'
    )
  hosts = 1 if chips <= 8 and kind != 'v5p' else max(chips // 4, 1)
  label, runtime = _KINDS[kind]
  return Slice(label, topologies[chips], runtime, hosts, chips // hosts)
