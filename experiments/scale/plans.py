"""What the rules say of a program on a mesh: bytes held, and collectives.

Nothing is compiled: the memory plan is `stage.program_bytes`, the collectives
of a train step `stage.communication`'s.
"""

import dataclasses
import functools
import math
from typing import Any

import numpy as np

from experiments import programs
from experiments.scale import fleets, links
from posttrain import schema, sharding
from posttrain.models import transformer
from posttrain.stage import communication, program_bytes, tensors
from posttrain.training import optim
from posttrain.training import state as train_state

# Sizes that a program depends on.
SIZES = {
  'train_step': ('rows', 'row_tokens'),
  'prefill': ('slots', 'capacity', 'prefill_rows', 'prefill_tokens'),
  'decode': ('slots', 'capacity'),
}
UNROLLED = ('prefill', 'decode')  # their layers are not in a loop


def relevant(name: str, sizes: programs.Sizes) -> programs.Sizes:
  """Returns the sizes that a program depends on; the others are defaults."""
  return programs.Sizes(**{x: getattr(sizes, x) for x in SIZES[name]})


def plan(
  name: str,
  model: schema.Model,
  mesh: fleets.MESH,
  sizes: programs.Sizes,
  platform: str,
) -> program_bytes.Program:
  """Returns the planned bytes of a program.

  Args:
    name: train_step, prefill or decode.
    model: model options, with the vocabulary resolved.
    mesh: devices over data, fsdp and tensor.
    sizes: the program's sizes.
    platform: 'gpu' or 'tpu'.

  Raises:
    ValueError: a weight does not divide over the mesh.
  """
  return _plan(name, model, mesh, relevant(name, sizes), platform)


@functools.cache
def _plan(
  name: str,
  model: schema.Model,
  mesh: fleets.MESH,
  sizes: programs.Sizes,
  platform: str,
) -> program_bytes.Program:
  device = program_bytes.Device(model, fleets.abstract(mesh), platform)
  if name == 'train_step':
    stage = dataclasses.replace(programs.STAGE, batch=batch_of(sizes))
    state = _state_bytes(model, mesh)
    return program_bytes.train_step(device, stage, *state, micro_batches=1)
  slots = device, sizes.slots, sizes.capacity
  if name == 'decode':
    return program_bytes.decode(*slots)
  rows = min(sizes.prefill_rows, sizes.slots)
  return program_bytes.prefill(*slots, rows, sizes.prefill_tokens)


@functools.cache
def _state_bytes(model: schema.Model, mesh: fleets.MESH) -> tuple[int, int]:
  """Returns the bytes of a device of a train state, and of its weights."""
  rules = transformer.SHARDING_RULES
  state = sharding.placed(_state(model), rules, fleets.abstract(mesh))
  return tensors.device_bytes(state), tensors.device_bytes(state.params)


@functools.cache
def _state(model: schema.Model) -> Any:
  """Returns the shapes of a train state."""
  stage = programs.STAGE
  optimizer = optim.make(stage.optim, programs.STEPS)
  return train_state.shapes(
    stage, model, optimizer, fleets.abstract((1, 1, 1))
  )[0]


def batch_of(sizes: programs.Sizes) -> schema.Batch:
  """Returns the batch options of one micro-batch."""
  return schema.Batch(
    row_tokens=sizes.row_tokens,
    micro_batch_tokens=sizes.rows * sizes.row_tokens,
  )


@functools.cache
def divides(model: schema.Model, mesh: fleets.MESH) -> bool:
  """Returns whether all weights divide over a mesh."""
  state = _state(model)
  try:
    sharding.shardings(state, transformer.SHARDING_RULES, fleets.abstract(mesh))
  except ValueError:
    return False
  return True


def exchanges(
  name: str, model: schema.Model, mesh: fleets.MESH, sizes: programs.Sizes
) -> list[links.Exchange]:
  """Returns the collectives of a program by the rules of its placement.

  The train step's are `stage.communication`'s. Prefill and decoding sum the
  residual stream over `tensor` twice per layer, and once after the embedding.

  Args:
    name: train_step, prefill or decode.
    model: model options, with the vocabulary resolved.
    mesh: devices over data, fsdp and tensor.
    sizes: the program's sizes.
  """
  device = program_bytes.Device(model, fleets.abstract(mesh), 'gpu')
  groups = {axis: _groups(mesh, axis) for axis in sharding.AXES}
  if name == 'train_step':
    return [
      links.Exchange(x.kind, x.device_bytes, x.count, groups[x.axis])
      for x in communication.of(device, batch_of(sizes))
    ]
  if device.tensor == 1:
    return []
  tokens, times = local_tokens(name, mesh, sizes), 2 * model.layers + 1
  size = times * tokens * model.embed_dim * device.width
  return [links.Exchange('all-reduce', size, times, groups[sharding.TENSOR])]


def local_tokens(name: str, mesh: fleets.MESH, sizes: programs.Sizes) -> int:
  """Returns the tokens of a call that a device computes, or shares.

  Args:
    name: prefill or decode.
    mesh: the mesh of a host.
    sizes: the program's sizes.
  """
  ways = mesh[0] * mesh[1]
  if name == 'decode':
    return sizes.slots // ways
  return prefill_call(mesh, sizes)[0] * sizes.prefill_tokens


def prefill_call(mesh: fleets.MESH, sizes: programs.Sizes) -> tuple[int, int]:
  """Returns rows per device and prefix length of the compiled prefill call."""
  return programs.largest_call(sizes, mesh[0] * mesh[1])[1]


def _groups(mesh: fleets.MESH, axis: str) -> tuple[int, ...]:
  """Returns the devices that differ from the first one only along an axis."""
  where = sharding.AXES.index(axis)
  devices = np.arange(math.prod(mesh)).reshape(mesh)
  return tuple(map(int, np.moveaxis(devices, where, -1)[0, 0]))
