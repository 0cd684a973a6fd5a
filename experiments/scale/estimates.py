"""Bytes and collectives of programs: compiled, or scaled from compiled ones.

A `Measurement` is what the compiler says about one program; a file of JSON
lines keeps them, so that no program is compiled twice. `estimate` returns the
best there is for a program:

    compiled    the program itself
    depth       prefill and decoding repeat their layers in the text: from two
                depths a < b, every number X of L layers is
                    X(L) = X(a) + (X(b) - X(a)) (L - a) / (b - a)
    scaled      from a compiled program of the same chip, the same model on
                another number of devices or the nearest other model:
                    X = plan(program) X(compiled) / plan(compiled)
                where plan is the memory plan (`stage.program_bytes`) for bytes
                held. The collectives are those of the placement (`plans.
                exchanges`), times the same ratio of bytes sent, and of number,
                for each set of mesh axes over which devices exchange
    planned     the plan alone: nothing of the chip is compiled

`errors` predicts each compiled program as if it were not, and compares.
"""

import dataclasses
import json
import math
import pathlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from experiments import census, hlo, programs
from experiments.aot import targets
from experiments.scale import fleets, links, plans, roofline
from posttrain import schema, sharding


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of a model on a mesh of a target."""

  name: str
  preset: str
  target: fleets.Target
  mesh: fleets.MESH
  sizes: programs.Sizes
  layers: int

  @property
  def model(self) -> schema.Model:
    """Returns the model's options, with so many layers."""
    return dataclasses.replace(schema.PRESETS[self.preset], layers=self.layers)

  @property
  def key(self) -> str:
    """Returns the text that identifies the compiled program."""
    sizes = [f'{x}={getattr(self.sizes, x)}' for x in plans.SIZES[self.name]]
    mesh = ','.join(map(str, self.mesh))
    words = (self.name, self.preset, str(self.target), mesh, *sizes)
    return ' '.join((*words, f'layers={self.layers}'))

  def deep(self, layers: int) -> 'Program':
    """Returns the program of another number of layers."""
    return dataclasses.replace(self, layers=layers)

  def plan(self) -> tuple[int, int]:
    """Returns planned bytes of arguments and temporaries."""
    memory = plans.plan(
      self.name, self.model, self.mesh, self.sizes, self.target.platform
    )
    return memory.arguments, memory.temporaries

  def exchanges(self) -> list[links.Exchange]:
    """Returns the collectives of its placement."""
    return plans.exchanges(self.name, self.model, self.mesh, self.sizes)


@dataclasses.dataclass(frozen=True)
class Measurement:
  """What the compiler says about a program."""

  program: Program
  arguments: float  # bytes of a device
  temporaries: float  # and results that replace no argument
  exchanges: Sequence[links.Exchange]
  cpu_seconds: float

  def to_json(self) -> dict[str, Any]:
    """Returns the JSON object of a line."""
    node = dataclasses.asdict(self)
    node['program']['target'] = str(self.program.target)
    return node

  @classmethod
  def from_json(cls, node: Mapping[str, Any]) -> 'Measurement':
    """Reads the JSON object of a line."""
    program = dict(node['program'])
    program['target'] = fleets.parse(program['target'])
    program['mesh'] = tuple(program['mesh'])
    program['sizes'] = programs.Sizes(**program['sizes'])
    exchanges = [links.Exchange(**x) for x in node['exchanges']]
    fields = {**node, 'program': Program(**program), 'exchanges': exchanges}
    return cls(**fields)


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Bytes and collectives of a program, and where they come from."""

  arguments: float
  temporaries: float
  exchanges: Sequence[links.Exchange]
  kind: str  # compiled, depth, scaled or planned
  source: str  # the compiled programs


def sent(exchanges: Iterable[links.Exchange]) -> float:
  """Returns the bytes that a device sends, over all links."""
  return sum(links.wire(x.kind, x.bytes, len(x.group)) for x in exchanges)


def read(path: str | None) -> dict[str, Measurement]:
  """Returns the measurements of a file by key; none if it is not there."""
  file = pathlib.Path(path) if path else None
  if file is None or not file.exists():
    return {}
  nodes = map(json.loads, file.read_text().splitlines())
  found = [Measurement.from_json(node) for node in nodes]
  return {x.program.key: x for x in found}


def compile(program: Program) -> Measurement:
  """Compiles a program for devices that are not here."""
  start = time.process_time()
  target, name = program.target, program.name
  devices = targets.devices(target.chip, fleets.topology(target))
  mesh = sharding.make_mesh(schema.Mesh(*program.mesh), devices)
  sizes = program.sizes
  if name == 'train_step':  # has no slots, but their number is checked
    sizes = dataclasses.replace(sizes, slots=sizes.rows)
  platform = targets.TARGETS[target.chip].platform
  compiled = programs.lower(
    name, program.model, mesh, sizes, platform
  ).compile()
  layout = links.of_devices(mesh.devices)
  arguments, temporaries, text = _outcome(compiled)
  exchanges = links.compiled(layout, hlo.parse(text))
  seconds = time.process_time() - start
  return Measurement(program, arguments, temporaries, exchanges, seconds)


def _outcome(compiled: Any) -> tuple[int, int, str]:
  """Returns bytes of arguments and of all else, and the HLO of a program."""
  arguments = compiled.memory_analysis().argument_size_in_bytes
  return arguments, census.peak(compiled) - arguments, compiled.as_text()


def estimate(
  program: Program,
  measured: Mapping[str, Measurement],
  depths: tuple[int, int],
  without: Iterable[str] = (),
) -> Estimate:
  """Returns the bytes and collectives of a program, see the module.

  Args:
    program: the program.
    measured: measurements by key.
    depths: layers of the two shallow programs.
    without: kinds of estimates to leave out.
  """
  if 'compiled' not in without and program.key in measured:
    x = measured[program.key]
    return _estimate(x, 'compiled', program)
  if 'depth' not in without and (x := _deeper(program, measured, depths)):
    a, b = depths
    return _estimate(x, 'depth', program, f', {a} and {b} layers')
  bases = _whole(measured, depths)
  bases = [x for x in bases if x.program.key != program.key]
  if base := _base(program, bases, other='model' in without):
    return _scaled(program, base)
  arguments, temporaries = program.plan()
  return Estimate(arguments, temporaries, program.exchanges(), 'planned', '')


def _estimate(
  x: Measurement, kind: str, program: Program, layers: str = ''
) -> Estimate:
  source = f'{program.target}{layers}'
  return Estimate(x.arguments, x.temporaries, x.exchanges, kind, source)


def _whole(
  measured: Mapping[str, Measurement], depths: tuple[int, int]
) -> list[Measurement]:
  """Returns programs of all layers, compiled or from two depths."""
  found = {}
  for x in measured.values():
    program = x.program.deep(schema.PRESETS[x.program.preset].layers)
    whole = measured.get(program.key) or _deeper(program, measured, depths)
    if whole:
      found[program.key] = whole
  return list(found.values())


def _deeper(
  program: Program, measured: Mapping[str, Measurement], depths: tuple[int, int]
) -> Measurement | None:
  """Returns the linear extrapolation in the number of layers."""
  (a, b), (low, high) = (
    depths,
    (measured.get(program.deep(n).key) for n in depths),
  )
  if low is None or high is None:
    return None
  share = (program.layers - a) / (b - a)

  def line(x: float, y: float) -> float:
    return x + (y - x) * share

  first = _by_group(low.exchanges)
  exchanges = []
  for (kind, group), (size, times) in _by_group(high.exchanges).items():
    before = first.get((kind, group), (0.0, 0))
    exchanges.append(
      links.Exchange(
        kind, line(before[0], size), round(line(before[1], times)), group
      )
    )
  return Measurement(
    program,
    line(low.arguments, high.arguments),
    line(low.temporaries, high.temporaries),
    exchanges,
    low.cpu_seconds + high.cpu_seconds,
  )


def _by_group(
  exchanges: Iterable[links.Exchange],
) -> dict[tuple[str, tuple[int, ...]], tuple[float, int]]:
  return {(x.kind, tuple(x.group)): (x.bytes, x.times) for x in exchanges}


def _base(
  program: Program, measured: Iterable[Measurement], other: bool
) -> Measurement | None:
  """Returns the compiled program to scale from, None if there is none.

  The axes that split weights matter first, then the model, the devices and the
  sizes of the axes.

  Args:
    program: the program.
    measured: candidates.
    other: whether the same model is left out.
  """

  def distance(x: Measurement) -> tuple[int, float, float, float]:
    sizes = [
      roofline.product_weights(schema.PRESETS[y])
      for y in (program.preset, x.program.preset)
    ]
    devices = math.log(x.program.target.devices / program.target.devices)
    axes = [tuple(y > 1 for y in z.mesh[1:]) for z in (x.program, program)]
    others = sum(a != b for a, b in zip(*axes, strict=True))
    ratios = zip(x.program.mesh, program.mesh, strict=True)
    shape = sum(abs(math.log(a / b)) for a, b in ratios)
    return others, abs(math.log(sizes[0] / sizes[1])), abs(devices), shape

  alike = [
    x
    for x in measured
    if x.program.name == program.name
    and x.program.target.chip == program.target.chip
    and not (other and x.program.preset == program.preset)
  ]
  return min(alike, key=distance, default=None)


def _scaled(program: Program, base: Measurement) -> Estimate:
  """Returns the plan times what the compiler needs of a plan elsewhere."""
  arguments, temporaries = program.plan()
  planned = base.program.plan()
  compiled = _by_axes(base.program, base.exchanges)
  expected = _by_axes(base.program, base.program.exchanges())
  exchanges = []
  for x in program.exchanges():
    axes = _axes(program, x)
    size, times = 1.0, 1.0
    if axes in compiled and axes in expected:
      size, times = compiled[axes] / expected[axes]
    exchanges.append(
      dataclasses.replace(
        x, bytes=x.bytes * size, times=max(round(x.times * times), 1)
      )
    )
  mesh = ','.join(map(str, base.program.mesh))
  source = f'{base.program.preset} on {base.program.target}, mesh {mesh}'
  return Estimate(
    arguments * base.arguments / planned[0],
    temporaries * base.temporaries / planned[1],
    exchanges,
    'scaled',
    source,
  )


def _axes(program: Program, x: links.Exchange) -> tuple[int, ...]:
  """Returns the axes of the mesh along which a group's devices differ."""
  places = np.unravel_index(np.array(x.group), program.mesh)
  return tuple(i for i, place in enumerate(places) if len(set(place)) > 1)


def _by_axes(
  program: Program, exchanges: Iterable[links.Exchange]
) -> dict[tuple[int, ...], np.ndarray]:
  """Returns bytes sent and number of collectives, by the axes of groups."""
  sums: dict[tuple[int, ...], np.ndarray] = {}
  for x in exchanges:
    axes = _axes(program, x)
    both = np.array([sent([x]), x.times], float)
    sums[axes] = sums.get(axes, np.zeros(2)) + both
  return sums


def errors(
  measured: Mapping[str, Measurement], depths: tuple[int, int]
) -> list[dict[str, Any]]:
  """Returns predictions of compiled programs and their errors.

  Prefill and decoding are predicted from two depths, train steps from the same
  model on another number of devices; and both from another model.
  """
  rows = []
  for x in sorted(measured.values(), key=lambda x: _order(x.program)):
    program = x.program
    if program.layers != schema.PRESETS[program.preset].layers:
      continue
    if program.name in plans.UNROLLED:
      first = estimate(program, measured, depths, ('compiled',))
    else:
      others = {
        key: y
        for key, y in measured.items()
        if (y.program.preset, y.program.target)
        != (program.preset, program.target)
      }
      first = estimate(program, others, depths)
      if program.preset not in first.source.split():
        first = dataclasses.replace(first, kind='')
    second = estimate(program, measured, depths, ('compiled', 'depth', 'model'))
    own = {'depth': 'two depths', 'scaled': 'other devices'}
    for found, way in ((first, own), (second, {'scaled': 'other model'})):
      if found.kind in way:
        rows.append({'way': way[found.kind], **_error(x, found)})
  return rows


def _order(program: Program) -> tuple[str, str, int, int, str]:
  size = roofline.product_weights(schema.PRESETS[program.preset])
  target = program.target
  return target.chip, program.name, size, target.devices, program.key


def _error(x: Measurement, found: Estimate) -> dict[str, Any]:
  peaks = [y.arguments + y.temporaries for y in (found, x)]
  moved = [sent(y.exchanges) for y in (found, x)]
  return {
    'program': x.program.name,
    'model': x.program.preset,
    'target': str(x.program.target),
    'mesh': x.program.mesh,
    'kind': found.kind,
    'source': found.source,
    'peak_gib': [y / hlo.GIB for y in peaks],
    'sent_gib': [y / hlo.GIB for y in moved],
  }
