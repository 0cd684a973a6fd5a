"""What a program must do on several devices, read from its compiled form.

    kernels    every layer calls its attention kernels
    cache      decoding writes its cache in place, and copies none of it
    memory     the program fits the device
    plan       the memory plan of a stage agrees with the compiler's

Each check returns the lines of what is wrong.
"""

import math

from experiments import census, hlo, programs
from posttrain import schema, sharding
from posttrain.stage import program_bytes

# Kernels that a layer of a program calls.
KERNELS = {
  'train_step': ('flash_forward', 'flash_dq', 'flash_dkv'),
  'score': ('flash_forward',),
  'prefill': ('flash_forward',),
  'decode': ('decode',),
}
CALLS = ('__gpu$xla.gpu.triton', 'tpu_custom_call')
# The plan's arguments are exact up to this, its total is never below the
# compiler's and at most this above.
ARGUMENTS, TOTAL = 0.01, 0.2


def kernels(name: str, module: hlo.Module, layers: int) -> list[str]:
  """Checks that every layer calls each kernel of a program."""
  counts = kernel_counts(name, module)
  return [
    f'{kernel}: {count} calls, expected one in each of {layers} layers'
    for kernel, count in counts.items()
    if count < layers
  ]


def kernel_counts(name: str, module: hlo.Module) -> dict[str, int]:
  """Returns how often a program runs each of its attention kernels."""
  counts = dict.fromkeys(KERNELS.get(name, ()), 0)
  for call, times in module.custom_calls():
    if any(target in call.attributes for target in CALLS):
      for kernel in counts:
        counts[kernel] += times * (kernel in call.op_name)
  return counts


def cache(
  module: hlo.Module,
  compiled,
  model: schema.Model,
  mesh: tuple[int, int, int],
  sizes: programs.Sizes,
) -> list[str]:
  """Checks that prefill, decode and share update the cache in place."""
  layer = layer_cache_bytes(model, mesh, sizes)
  lines = []
  aliased = compiled.memory_analysis().alias_size_in_bytes
  if aliased < 2 * model.layers * layer:
    lines.append(
      f'the cache of {2 * model.layers * layer:,} bytes must replace the one '
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
  model: schema.Model, mesh: tuple[int, int, int], sizes: programs.Sizes
) -> int:
  """Returns the bytes of a layer's keys on one device; values take as many."""
  devices = sharding.abstract_mesh(schema.Mesh(*mesh), math.prod(mesh))
  device = program_bytes.Device(model, devices, 'gpu')
  tokens = sizes.slots // device.rows * sizes.capacity
  return tokens * program_bytes.cached_token_bytes(device) // 2


def memory(compiled, limit: int) -> list[str]:
  """Checks that a program fits a device of `limit` bytes."""
  need = census.peak(compiled)
  if need <= limit:
    return []
  return [
    f'{need / hlo.GIB:.1f} GiB must fit a device of {limit / hlo.GIB:.1f} GiB'
  ]


def plan(arguments: float, total: float, compiled) -> list[str]:
  """Checks a memory plan.

  Args:
    arguments: planned bytes per device of a program's arguments.
    total: planned bytes per device of all that it needs.
    compiled: the program.
  """
  actual = compiled.memory_analysis().argument_size_in_bytes
  peak = census.peak(compiled)
  lines = []
  if not math.isclose(arguments, actual, rel_tol=ARGUMENTS):
    lines.append(
      f'arguments: {arguments / hlo.GIB:.2f} GiB planned, '
      f'{actual / hlo.GIB:.2f} compiled'
    )
  if not peak <= total <= (1 + TOTAL) * peak:
    lines.append(
      f'total: {total / hlo.GIB:.2f} GiB planned, {peak / hlo.GIB:.2f} compiled'
    )
  return lines
