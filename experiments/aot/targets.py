"""Accelerators to compile for, without one: their topologies.

The compilers are plugins of jax, which `run.sh` puts on the path of a process
of its own; it names the platform in POSTTRAIN_AOT.
"""

import dataclasses
import os
from collections.abc import Sequence

import jax
from jax.experimental import topologies
from jax.sharding import Mesh

from posttrain import schema, sharding

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
  return f'needs its compiler: experiments/aot/run.sh {platform}'


def devices(name: str, topology: str | None = None) -> Sequence[jax.Device]:
  """Returns the devices of a target, which can only be compiled for.

  Args:
    name: one of TARGETS.
    topology: slices x hosts x GPUs, or a TPU slice; None = the target's eight
      devices.
  """
  target = TARGETS[name]
  if target.platform == 'tpu':
    found = topologies.get_topology_desc(topology or target.topology, 'tpu')
  else:
    found = topologies.get_topology_desc(
      '',
      'cuda',
      topology=topology or target.topology,
      target_config=_GPU.format(**dataclasses.asdict(target)),
    )
  return found.devices


def mesh(name: str, sizes: tuple[int, int, int]) -> Mesh:
  """Returns a mesh of the first devices of a target.

  Args:
    name: one of TARGETS.
    sizes: devices over data, fsdp and tensor.
  """
  data, fsdp, tensor = sizes
  return sharding.make_mesh(
    schema.Mesh(*sizes), devices(name)[: data * fsdp * tensor]
  )
