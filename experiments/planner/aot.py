"""Programs and kernels compiled for GPUs and TPUs that are not here.

The compilers are plugins of jax, which `run.sh` puts on the path of a process
of its own; it names the platform in POSTTRAIN_AOT. `program` and `kernel`
compile, and return a row of figures and the lines of what is wrong:

    kernels    every layer calls its attention kernels
    cache      decoding writes its cache in place, and copies none of it
    memory     the program fits the device
    traffic    the limit of `census.violations`

python -m experiments.planner.aot ROWS > experiments/results/aot.md

prints the table of the rows that `pytest -m aot` writes.
"""

import dataclasses
import datetime
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from experiments.launch import results
from experiments.planner import census, hlo, kernels, programs
from kernels import decode_tpu
from posttrain import schema, sharding
from posttrain.stage import learner, plan

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Target:
  """Eight devices of one kind, in one host."""

  platform: str  # that programs are lowered for: 'cuda' or 'tpu'
  topology: str
  memory: int  # bytes of a device
  kernels: str  # the backend of `kernels`
  kind: str = ''  # GPUs: the name that the driver gives
  bandwidth: int = 0  # GPUs: of memory, bytes/s


TARGETS = {
  'h100': Target(
    'cuda',
    '1x1x8',
    84_978_434_048,
    'triton',
    'NVIDIA H100 80GB HBM3',
    3_352_320_000_000,
  ),
  'h200': Target(
    'cuda', '1x1x8', 151_397_597_184, 'triton', 'NVIDIA H200', 4_800_000_000_000
  ),
  'v5e': Target('tpu', 'v5e:2x4', 16 * GIB, 'mosaic_tpu'),
  'v6e': Target('tpu', 'v6e:2x4', 32 * GIB, 'mosaic_tpu'),
}

# What XLA's GPU compiler reads about a Hopper device, as a text proto: limits
# of CUDA's compute capability 9.0, and the SXM board's 132 multiprocessors.
_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  cuda_compute_capability {{ major: 9 }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
runtime_version {{ major: 13 }}
device_description_str: "{kind}"
"""


def missing(name: str) -> str | None:
  """Returns why a target's compiler is not here, None if it is."""
  platform = TARGETS[name].platform
  if os.environ.get('POSTTRAIN_AOT') == platform:
    return None
  return f'needs its compiler: experiments/planner/run.sh {platform}'


def devices(name: str) -> Sequence[jax.Device]:
  """Returns the devices of a target, which can only be compiled for.

  Args:
    name: one of TARGETS.
  """
  target = TARGETS[name]
  if target.platform == 'tpu':
    found = topologies.get_topology_desc(target.topology, 'tpu')
  else:
    found = topologies.get_topology_desc(
      '',
      'cuda',
      topology=target.topology,
      target_config=_GPU.format(**dataclasses.asdict(target)),
    )
  return found.devices


# Kernels that a layer of a program calls.
KERNELS = {
  'train_step': ('flash_forward', 'flash_dq', 'flash_dkv'),
  'score': ('flash_forward',),
  'prefill': ('flash_forward',),
  'decode': ('decode',),
}
CALLS = ('__gpu$xla.gpu.triton', 'tpu_custom_call')


def cache_faults(
  module: hlo.Module,
  compiled,
  model: schema.Model,
  mesh: tuple[int, ...],
  sizes: programs.Sizes,
) -> list[str]:
  """Checks that prefill and decode update the cache in place."""
  layer = layer_cache_bytes(model, mesh, sizes)
  lines, whole = [], 2 * (model.layers - len(model.delta_layers)) * layer
  aliased = compiled.memory_analysis().alias_size_in_bytes
  if aliased < whole:
    lines.append(
      f'the cache of {whole:,} bytes must replace the one '
      f'given: {aliased:,} bytes do'
    )
  copies = module.copies(layer)
  if copies:
    lines.append(
      f'{len(copies)} copies of a layer of the cache at every step: '
      f'{copies[0].name}, {copies[0].op_name}'
    )
  return lines


def layer_cache_bytes(
  model: schema.Model, mesh: tuple[int, ...], sizes: programs.Sizes
) -> int:
  """Returns the bytes of a layer's keys on one device; values take as many."""
  devices = sharding.abstract_mesh(schema.Mesh(*mesh), math.prod(mesh))
  slots = sizes.slots // sharding.batch_ways(devices)
  token = plan.cached_token_bytes(model, devices)
  return slots * sizes.capacity * token // 2


TRAVELS = 2  # bytes of a number between devices: bfloat16, unlike on CPUs


@dataclasses.dataclass(frozen=True)
class Program:
  """A program of a model on a mesh of a target."""

  target: str  # one of `TARGETS`
  name: str  # one of `programs.PROGRAMS`
  preset: str
  mesh: tuple[int, ...]  # over data, fsdp, tensor and expert
  layers: int | None = None  # None = the preset's
  sampler: tuple[int, int, int] = (1, 1, 1)  # its own mesh, for hand_over
  trees: bool = False  # whether rows are prefix trees

  def __str__(self):
    return f'{self.target}-{self.title}-{self.preset}-{self.meshes}'

  @property
  def title(self) -> str:
    """The program's name, and whether rows are prefix trees."""
    return f'{self.name}, trees' if self.trees else self.name

  @property
  def meshes(self) -> str:
    """The mesh as text; of hand_over both."""
    mesh, sampler = (','.join(map(str, x)) for x in (self.mesh, self.sampler))
    return f'{mesh} to {sampler}' if self.name == 'hand_over' else mesh

  @property
  def model(self) -> schema.Model:
    """The model's options."""
    model = schema.PRESETS[self.preset]
    return census.first_layers(model, self.layers or model.layers)


def program(
  case: Program, sizes: programs.Sizes
) -> tuple[dict[str, Any], list[str]]:
  """Compiles a program; returns its row, and what is wrong."""
  start = time.process_time()
  target, model = TARGETS[case.target], case.model
  chips = devices(case.target)[: math.prod(case.mesh)]
  mesh = sharding.make_mesh(schema.Mesh(*case.mesh), chips)
  sizes = dataclasses.replace(sizes, sampler=case.sampler)
  batch = dataclasses.replace(programs.STAGE.batch, trees=case.trees)
  stage = dataclasses.replace(programs.STAGE, batch=batch)
  compiled = programs.lower(
    case.name, model, mesh, sizes, target.platform, stage
  ).compile()
  seconds = time.process_time() - start
  module = hlo.parse(compiled.as_text())
  depth = model.layers - len(model.delta_layers)
  # How often it runs each of its attention kernels.
  counts = dict.fromkeys(KERNELS.get(case.name, ()), 0)
  for call, times in module.custom_calls():
    if any(x in call.attributes for x in CALLS):
      for kernel in counts:
        counts[kernel] += times * (kernel in call.op_name)
  wrong = [
    f'{kernel}: {count} calls, expected one in each of {depth} layers'
    for kernel, count in counts.items()
    if count < depth
  ]
  peak = census.peak(compiled)
  if peak > target.memory:
    wrong.append(
      f'{peak / GIB:.1f} GiB must fit a device of {target.memory / GIB:.1f} GiB'
    )
  if case.name in ('prefill', 'decode'):
    wrong += cache_faults(module, compiled, model, case.mesh, sizes)
  memory = compiled.memory_analysis()
  row = {
    'program': case.title,
    'model': f'{case.preset}, {model.layers} layers',
    'target': case.target,
    'mesh': case.meshes,
    'attention kernels': counts,
    'collectives': {k: v / GIB for k, v in module.bytes().items()},
    'weights': '',
    'plan': '',
    'arguments': memory.argument_size_in_bytes / GIB,
    'temporaries': memory.temp_size_in_bytes / GIB,
    'aliased': memory.alias_size_in_bytes / GIB,
    'peak': peak / GIB,
    'CPU s': seconds,
  }
  if case.name in ('train_step', 'score'):
    wrong += census.violations(module, model, case.mesh, sizes, TRAVELS)
    row['weights'] = census.weight_bytes(model, case.mesh, TRAVELS) / GIB
  if case.name == 'train_step':
    row['plan'] = planned(model, case.mesh, stage, sizes) / GIB
  if case.name == 'hand_over':
    row['weights'] = memory.output_size_in_bytes / GIB
  return row, wrong


def planned(
  model: schema.Model,
  mesh: tuple[int, ...],
  stage: schema.Stage,
  sizes: programs.Sizes,
) -> int:
  """Returns the bytes that the plan of a run says of a train step."""
  batch = schema.Batch(
    row_tokens=sizes.row_tokens,
    micro_batch_tokens=sizes.rows * sizes.row_tokens,
  )
  stage = dataclasses.replace(stage, batch=batch)
  devices = sharding.abstract_mesh(schema.Mesh(*mesh), math.prod(mesh))
  spec = learner.make_spec('stage', stage, model, devices)
  made = plan.make(spec, model, sizes.capacity, plan.Load({'tokens': 1}))
  return made.state_bytes + made.update_bytes


def kernel(name: str, target: str, folder: str) -> list[dict[str, Any]]:
  """Compiles a case of `kernels`; returns a row per kernel.

  Args:
    name: one of `kernels.CASES`.
    target: one of `TARGETS`.
    folder: an empty folder for the compiler's dumps.
  """
  start = time.process_time()
  case, chip = kernels.CASES[name], TARGETS[target]
  gpu = chip.platform == 'cuda'
  compiled = kernels.compile(
    case,
    devices(target)[0],
    chip.kernels,
    chip.platform,
    folder if gpu else None,
  )
  row = {'call': name, 'target': target, 'CPU s': time.process_time() - start}
  if gpu:
    return [{**row, **x} for x in kernels.assemble(folder, case.kernels)]
  calls = [
    call.op_name
    for call, _ in hlo.parse(compiled.as_text()).custom_calls()
    if CALLS[1] in call.attributes
  ]
  return [
    {**row, 'kernel': x, 'calls': sum(x in call for call in calls)}
    for x in case.kernels
  ]


def decode_steps() -> list[dict[str, Any]]:
  """Returns the steps of decoding on a TPU, of some lengths of slots."""
  slots, block, rows = 128, decode_tpu.BLOCK, []
  ragged = jnp.linspace(1, 2048, slots).astype(jnp.int32)
  for capacity, used, lengths in (
    (8192, '1024', jnp.full(slots, 1024, jnp.int32)),
    (8192, '1 to 2048', ragged),
    (8192, '8192', jnp.full(slots, 8192, jnp.int32)),
  ):
    most = capacity // block
    steps, *_ = decode_tpu.steps(jnp.zeros_like(lengths), lengths, block, most)
    every = slots * most
    rows.append(
      {
        'capacity': capacity,
        'used': used,
        'all': every,
        'steps': int(steps),
        'ms': 28 * 0.35e-3 * (every - int(steps)),
      }
    )
  return rows


INTRO = """# Compiled for absent devices

Every kernel, and the programs of training and decoding, compiled by the
compilers of GPUs and TPUs on a machine that has neither
(`experiments/planner/run.sh`). Nothing ran: these are properties of programs,
not measurements of speed. Sizes are GiB per device.

With prompts that are stored once, a layer of decoding calls two kernels:
*decode* over the slots, and *flash_forward* over the prompts of groups, whose
queries are the slots of a group and the query heads of a kv head together. XLA
merges their results.
"""
PROGRAMS = """
## Programs

A micro-batch has 8 rows of 4,096 tokens; decoding has 128 slots of 4,096
tokens, and prefill 32 rows of 32. *Weights* is what gathering weights and
reducing gradients takes at least, in bfloat16
(`experiments.planner.census.weight_bytes`); of *hand_over*, what is then copied
to each of a sampler's own devices (`mesh.sampler`). A loop whose length is not
known when it is compiled counts once: decoding moves so much for one token of
every slot.
"""
STEPS = """
## Steps of decoding on a TPU

A step of the kernel's grid is a block of 512 keys of a slot: 128 slots, 8 kv
heads of 128. *All* has a step for each block of the capacity. A step that
computes nothing costs about 0.35 us; *ms* is the cost of these, of a token of
28 layers, that the kernel does not have.
"""


def main() -> None:
  """Prints the table of a file of JSON rows."""
  (path,) = sys.argv[1:]
  lines = pathlib.Path(path).read_text().splitlines()
  print(markdown([json.loads(line) for line in lines]))


def markdown(rows: Sequence[dict[str, Any]]) -> str:
  """Returns the page, with a table of the rows that have the same columns."""

  def cell(value: Any) -> str:
    if isinstance(value, dict):
      return ', '.join(f'{cell(x)} {name}' for name, x in value.items())
    return f'{value:.3g}' if isinstance(value, float) else str(value)

  names = [f'{x} {importlib.metadata.version(x)}' for x in ('jax', 'jaxlib')]
  date, python = datetime.date.today().isoformat(), platform.python_version()
  parts = [INTRO, f'{date}, Python {python}, {", ".join(names)}.']
  for columns in dict.fromkeys(tuple(row) for row in rows):
    cells = [
      list(map(cell, row.values())) for row in rows if tuple(row) == columns
    ]
    title = PROGRAMS if columns[0] == 'program' else '\n## Kernels\n'
    parts += [title, *results.markdown(columns, cells)]
  cells = [list(map(cell, row.values())) for row in decode_steps()]
  parts += [STEPS, *results.markdown(tuple(decode_steps()[0]), cells)]
  return '\n'.join(parts)


if __name__ == '__main__':
  main()
