"""Links between devices, and what a collective sends over each of them.

1. A `Layout` has the host and the coordinates of each device of a mesh, in the
   order of the mesh. GPUs of a host have NVLink and hosts have InfiniBand; the
   chips of a TPU slice have ICI, a torus of two dimensions, hosts or not, and
   slices have DCN. A *domain* is a host of GPUs or a slice of TPUs: within it
   the inner link, between domains the outer one.
2. `wire` is what a device of a group of g sends of an array of S bytes, the
   larger of a collective's operand and result, by rings:

       all-gather, reduce-scatter, all-to-all   S (g - 1) / g
       all-reduce                               2 S (g - 1) / g
       permute, broadcast                       S

3. `Layout.route` splits it over the links. A ring through h domains with d
   devices each passes every link between two domains once per ring, and d
   rings share them: the outer link of a device has 1 / d of what the inner one
   has. An all-to-all sends to each device directly: of g - 1 parts, g - d leave
   the domain.
4. The seconds of a collective are those of its slower link, and a latency: of
   a start, and of the steps within and between domains (`Layout.hops`).

A ring over a dimension of a torus sends both ways where the dimension is closed
(16 chips), and one way along a line. Rings of every s-th chip share each link
by s. Groups over two dimensions use the links of both.
"""

import collections
import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from experiments import hlo

CLOSED = 16  # chips of a torus dimension that is a ring
_TWICE = ('all-reduce',)
_WHOLE = ('collective-permute', 'collective-broadcast')
_DIRECT = ('all-to-all', 'ragged-all-to-all')


@dataclasses.dataclass(frozen=True)
class Exchange:
  """A collective of a program, or several alike."""

  kind: str  # one of `hlo.KINDS`
  bytes: float  # of the larger of operand and result, of all runs
  times: int  # how often it runs
  group: Sequence[int]  # indices of devices, of one group of several alike


@dataclasses.dataclass(frozen=True)
class Traffic:
  """What the collectives of a program send per device."""

  kinds: Mapping[str, float]  # bytes sent, by kind
  inner: float  # bytes over the inner link
  outer: float  # bytes over the outer link
  hosts: float  # bytes of groups of several hosts, over either link
  times: int  # collectives
  seconds: float


@dataclasses.dataclass(frozen=True)
class Layout:
  """Devices of a mesh in its order."""

  hosts: np.ndarray  # i[N], process of each device
  domains: np.ndarray  # i[N], host of a GPU, slice of a TPU
  coords: np.ndarray | None = None  # i[N, 2], place in a TPU slice

  def route(self, x: Exchange) -> tuple[float, float, float]:
    """Returns the bytes that a device sends over inner and outer link.

    Args:
      x: the collective.

    Returns:
      Bytes over the inner and the outer link, and the number of ICI links that
      carry the inner ones at a time (1 for GPUs).
    """
    group = np.array(x.group)
    size, count = len(group), len(set(self.domains[group]))
    sent, each = wire(x.kind, x.bytes, size), size / count
    if count == 1:
      return sent, 0.0, self._ways(group)
    if x.kind in _DIRECT:
      inner, outer = sent * (each - 1), sent * (size - each)
      return inner / (size - 1), outer / (size - 1), self._ways(group)
    return sent * (each > 1), sent / each, self._ways(group)

  def hops(self, x: Exchange) -> tuple[int, int]:
    """Returns the steps of a collective within domains and between them.

    An all-reduce of GPUs climbs and descends a tree, the others go round a
    ring; along the dimensions of a torus rings run one after the other.
    """
    group = np.array(x.group)
    count = len(set(self.domains[group]))
    twice = 2 if x.kind in _TWICE else 1
    if self.coords is not None:
      sizes = [len(np.unique(place)) for place in self.coords[group].T]
      return twice * (sum(sizes) - len(sizes)), twice * (count - 1)
    if twice == 2:
      levels = [math.ceil(math.log2(n)) for n in (len(group) / count, count)]
      return twice * levels[0], twice * levels[1]
    return len(group) - count, count - 1

  def spans_hosts(self, x: Exchange) -> bool:
    """Returns whether devices of several hosts take part."""
    return len(set(self.hosts[list(x.group)])) > 1

  def _ways(self, group: np.ndarray) -> float:
    """Returns the ICI links that a group uses at a time."""
    if self.coords is None:
      return 1.0
    ways = 0.0
    for place, extent in zip(
      self.coords[group].T, self.coords.max(0) + 1, strict=True
    ):
      steps = np.diff(np.unique(place))
      if len(steps):
        stride = int(steps.min())
        closed = extent == CLOSED and (len(steps) + 1) * stride == extent
        ways += (2 if closed else 1) / stride
    return ways or 1.0


def wire(kind: str, size: float, members: int) -> float:
  """Returns the bytes that a device sends.

  Args:
    kind: one of `hlo.KINDS`.
    size: bytes of the larger of operand and result.
    members: devices of a group.
  """
  if members == 1:
    return 0.0
  if kind in _WHOLE:
    return size
  return (2 if kind in _TWICE else 1) * size * (members - 1) / members


def traffic(
  layout: Layout, exchanges: Iterable[Exchange], limits: Mapping[str, float]
) -> Traffic:
  """Returns the sums of a program's collectives.

  Args:
    layout: the devices.
    exchanges: the collectives.
    limits: numbers of the chip, `ceilings.values`.
  """
  kinds: dict[str, float] = collections.defaultdict(float)
  total = np.zeros(4)
  times = 0
  for x in exchanges:
    inner, outer, ways = layout.route(x)
    within, between = layout.hops(x)
    latency = limits['start_latency']
    latency += within * limits['inner_latency']
    latency += between * limits['outer_latency']
    seconds = x.times * latency + max(
      inner / limits['inner_bandwidth'] / ways,
      outer / limits['outer_bandwidth'],
    )
    sent = wire(x.kind, x.bytes, len(x.group))
    kinds[x.kind] += sent
    total += (inner, outer, sent * layout.spans_hosts(x), seconds)
    times += x.times
  inner, outer, hosts, seconds = map(float, total)
  return Traffic(dict(kinds), inner, outer, hosts, times, seconds)


def compiled(layout: Layout, module: hlo.Module) -> list[Exchange]:
  """Returns the collectives of a compiled program, equal kinds together.

  Of a permutation's pairs, one that is farthest apart stands for all.

  Args:
    layout: the program's devices.
    module: its optimized HLO.
  """
  sums: dict[tuple[str, tuple[int, ...]], list[int]] = {}
  for x in module.collectives:
    groups = x.groups or (tuple(range(len(layout.hosts))),)
    group = groups[0]
    if x.kind in _WHOLE:
      group = max(groups, key=lambda y: len(set(layout.domains[list(y)])))
    total = sums.setdefault((x.kind, group), [0, 0])
    total[0] += x.bytes
    total[1] += x.times
  return [
    Exchange(kind, size, times, group)
    for (kind, group), (size, times) in sums.items()
  ]


def of_devices(devices: np.ndarray) -> Layout:
  """Returns the layout of the devices of a mesh, real ones or of a topology."""
  flat = list(devices.flat)
  hosts = np.array([x.process_index for x in flat])
  if flat[0].platform != 'tpu':
    return Layout(hosts, hosts)
  slices = np.array([getattr(x, 'slice_index', None) or 0 for x in flat])
  return Layout(hosts, slices, np.array([x.coords[:2] for x in flat]))
