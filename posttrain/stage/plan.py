"""The plan of a stage: batch sizes, parameters, memory and communication.

Printed by `--dry_run` and, in short, at the start of a run, below a head with
devices, host, versions and seed; quoted when the device runs out of memory.
Bytes are per device.
"""

import dataclasses
import math
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from posttrain import machine, schema, sharding
from posttrain.models import transformer
from posttrain.stage import adapter as adapter_lib
from posttrain.stage import communication, program_bytes, tensors
from posttrain.training import arrays, objectives, optim
from posttrain.training import state as train_state


@dataclasses.dataclass(frozen=True)
class Plan:
  """The resolved sizes of one stage. Bytes are per device."""

  stage: str
  steps: int
  mesh: dict[str, int]  # devices per axis
  hosts: int  # processes, each of which decodes with the whole model
  prompts_per_step: int
  group_size: dict[str, int]
  samples_per_step: int
  micro_batch_tokens: int
  rows_per_micro_batch: int
  row_tokens: int
  parameters: int
  trained: int  # those that train; with LoRA the adapter's
  # Weights, moments, average, EMA and snapshots, frozen weights.
  state_bytes: int
  slots: int  # sequences decoded at a time; 0 = the stage decodes nothing
  slot_tokens: int  # capacity of a slot
  decode_bytes: int  # KV cache of the slots, and the decode view
  sleep_bytes: int  # those of them that are freed during an update
  reference_bytes: int  # weights of references held beside the policy
  # Temporary arrays of an update: batch, gradients, activations.
  update_bytes: int
  # Temporary arrays of prefill, decoding or scoring, the largest; 0 without
  # slots.
  rollout_bytes: int
  programs: dict[str, program_bytes.Program]
  weights: Sequence[tensors.Tensor]  # those that train, and frozen ones
  transfers: Sequence[communication.Transfer]  # of one micro-batch
  # Tasks to train on and held-out ones, by environment.
  tasks: Mapping[str, tuple[int, int]]

  @property
  def total_bytes(self) -> int:
    """Returns the largest number of bytes at a time.

    Decode view and references stay during an update, and so does the cache
    unless `rollout.sleep` frees it.
    """
    held = self.state_bytes + self.decode_bytes + self.reference_bytes
    update = self.update_bytes - self.sleep_bytes
    return held + max(update, self.rollout_bytes)

  def sizes(self) -> dict[str, Any]:
    """Returns the sizes without the tables, for an error."""
    tables = ('programs', 'weights', 'transfers', 'tasks')
    return {k: v for k, v in vars(self).items() if k not in tables}

  def lines(self) -> list[str]:
    """Returns the lines of a readable table."""
    groups = ', '.join(f'{k}: {v}' for k, v in self.group_size.items())
    decodes = self.slots > 0
    tasks = '; '.join(
      f'{name}: {train:,}, and {held_out:,} held out'
      for name, (train, held_out) in self.tasks.items()
    )
    rows = (
      *([('tasks', tasks)] if tasks else []),
      ('prompts_per_step', f'{self.prompts_per_step}'),
      ('group_size', groups),
      ('  samples per step', f'{self.samples_per_step}'),
      ('micro_batch_tokens', f'{self.micro_batch_tokens}'),
      ('  rows x tokens', f'{self.rows_per_micro_batch} x {self.row_tokens}'),
      *self._slots(),
      ('steps', f'{self.steps}'),
      ('mesh', ', '.join(f'{k} {v}' for k, v in self.mesh.items())),
      *self._hosts(),
      ('parameters', f'{self.parameters:,}'),
      ('  that train', f'{self.trained:,}'),
      ('memory per device', f'{tensors.size(self.total_bytes)}, the sum of'),
      ('  training state', tensors.size(self.state_bytes)),
      *([('  decoding', tensors.size(self.decode_bytes))] * decodes),
      ('  references', tensors.size(self.reference_bytes)),
      *self._temporaries(),
    )
    return [f'stage {self.stage}', *map(_row, rows)]

  def _slots(self) -> list[tuple[str, str]]:
    """Returns the rows on the slots of a stage that decodes."""
    if not self.slots:
      return []
    return [
      ('rollout.slots', f'{self.slots}'),
      ('  tokens each', f'{self.slot_tokens}'),
    ]

  def _temporaries(self) -> list[tuple[str, str]]:
    """Returns the rows on temporary arrays."""
    update = tensors.size(self.update_bytes)
    if not self.slots:
      return [('  temporary arrays', update)]
    if self.sleep_bytes:
      freed = tensors.size(self.sleep_bytes)
      update += f', less {freed} of cache that rollout.sleep frees'
    rollout = self.rollout_bytes
    largest = max(self.update_bytes - self.sleep_bytes, rollout)
    return [
      ('  temporary arrays', f'{tensors.size(largest)}, the larger of'),
      ('    update', update),
      ('    rollout', tensors.size(rollout)),
    ]

  def _hosts(self) -> list[tuple[str, str]]:
    """Returns the row of a run of several processes."""
    if self.hosts == 1:
      return []
    if not self.slots:
      return [('processes', f'{self.hosts}')]
    slots = self.slots // self.hosts
    devices = math.prod(self.mesh.values()) // self.hosts
    text = f'{self.hosts}, each of which decodes {slots} slots on {devices} '
    text += 'devices, which must hold the model'
    return [('processes', text)]

  def details(self) -> list[str]:
    """Returns the lines of the tables: weights, and what is communicated."""
    lines = [
      f'weights of stage {self.stage}: shape, splitting axes, size per device',
      *tensors.lines(self.weights),
    ]
    lines.append('communication of one update of one micro-batch, per device')
    if not self.transfers:
      return [*lines, '  none: one device']
    return [*lines, *communication.lines(self.transfers)]


def head(
  seed: int, devices: tuple[str | None, int, int] | None = None
) -> list[str]:
  """Returns the first lines of a run's plan: where it runs, and with what.

  Args:
    seed: the run's seed.
    devices: the planned ones, see `components.preflight`; None = those here.
  """
  versions = machine.versions('posttrain', 'jax', 'python')
  kind, count, hosts = devices or (None, None, None)
  planned = ' (planned)' if devices else ''
  rows = (
    ('device', machine.devices(kind, count, hosts) + planned),
    ('host', socket.gethostname()),
    ('versions', ', '.join(map(' '.join, versions.items()))),
    ('seed', f'{seed}'),
  )
  return ['run', *map(_row, rows)]


def _row(row: tuple[str, str]) -> str:
  return f'  {row[0]:<20} {row[1]}'


def slot_tokens(longest: int, backend: str) -> int:
  """Returns a slot's capacity: whole tiles of a backend's decode kernel.

  A cache of another length would be padded, and copied, at every token.
  """
  tile = 128 if backend == 'tpu' else 16
  return -(-longest // tile) * tile


def make(
  name: str,
  stage: schema.Stage,
  model: schema.Model,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
  platform: str,
  slot_tokens: int,
  micro_batches: int = 1,
  references: int = 0,
  players: int = 0,
  group_sizes: Mapping[str, int] | None = None,
  hosts: int = 1,
  tasks: Mapping[str, tuple[int, int]] | None = None,
) -> Plan:
  """Resolves the sizes of a stage; allocates nothing.

  Args:
    name: the stage's name.
    stage: its options.
    model: the model's options with the vocabulary resolved.
    mesh: the devices, which need not exist.
    platform: their kind, 'cpu', 'gpu' or 'tpu'.
    slot_tokens: tokens that a slot holds.
    micro_batches: micro-batches of a step, at most.
    references: parameters of the models held beside the policy.
    players: number of frozen models that sample, assumed to be of the policy's
      shape.
    group_sizes: samples per task, by environment; None = the stage's options.
    hosts: the processes of the run, one per host.
    tasks: tasks to train on and held-out ones, by environment.

  Raises:
    ValueError: a weight does not divide over the mesh.
    FieldError: LoRA does not fit the model.
  """
  batch, rollout = stage.batch, stage.rollout
  device = program_bytes.Device(model, mesh, platform)
  state = _state(stage, model, mesh)
  train_step = _train_step(device, stage, micro_batches, state)
  rollout_programs: dict[str, program_bytes.Program] = {}
  cache = view = 0
  decodes = _decodes(stage)
  if decodes:
    decoding = _decoding(device, hosts)
    slots = rollout.slot_count // hosts
    rollout_programs = {
      'score': _score(device, stage, state),
      **_slot_programs(decoding, rollout, slots, slot_tokens),
    }
    cache = program_bytes.cache_bytes(decoding, slots, slot_tokens)
    view = program_bytes.view_bytes(decoding)
  weight_ways = mesh.shape[sharding.FSDP] * mesh.shape[sharding.TENSOR]
  group_size = dict(group_sizes or _group_sizes(stage))
  return Plan(
    stage=name,
    steps=stage.steps,
    mesh=dict(mesh.shape),
    hosts=hosts,
    prompts_per_step=batch.prompts_per_step,
    group_size=group_size,
    samples_per_step=batch.prompts_per_step * max(group_size.values()),
    micro_batch_tokens=batch.tokens_per_micro_batch,
    rows_per_micro_batch=batch.packed_rows,
    row_tokens=batch.packed_tokens,
    parameters=transformer.num_params(model),
    trained=state.trained,
    state_bytes=state.device_bytes,
    slots=rollout.slot_count if decodes else 0,
    slot_tokens=slot_tokens,
    decode_bytes=(1 + players) * (view + cache),
    sleep_bytes=cache if rollout.sleep else 0,
    reference_bytes=4 * references // weight_ways,
    update_bytes=train_step.total - state.device_bytes,
    rollout_bytes=max(
      (x.temporaries for x in rollout_programs.values()), default=0
    ),
    programs={'train_step': train_step, **rollout_programs},
    weights=tensors.of(state.params) + tensors.of(state.frozen),
    transfers=communication.of(device, batch, state.adapter),
    tasks=tasks or {},
  )


class _State(NamedTuple):
  """What an update reads and writes, as shapes."""

  train: arrays.TrainState
  frozen: Any  # the whole model where an adapter trains, else None
  adapter: adapter_lib.Adapter | None

  @property
  def params(self) -> Any:
    """The weights that train."""
    return self.train.params

  @property
  def trained(self) -> int:
    """The number of parameters that train."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(self.params))

  @property
  def device_bytes(self) -> int:
    """Bytes per device."""
    return tensors.device_bytes((self.train, self.frozen))


def _state(
  stage: schema.Stage,
  model: schema.Model,
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh,
) -> _State:
  """Returns the train state and, with LoRA, the frozen weights."""
  updates = stage.steps * stage.updates_per_rollout
  optimizer = optim.make(stage.optim, updates)
  train, whole = train_state.shapes(stage, model, optimizer, mesh)
  if not stage.lora.rank:
    return _State(train, frozen=None, adapter=None)
  return _State(train, whole, adapter_lib.of(train.params))


def _train_step(
  device: program_bytes.Device,
  stage: schema.Stage,
  micro_batches: int,
  state: _State,
) -> program_bytes.Program:
  """Returns the bytes of one update."""
  return program_bytes.train_step(
    device,
    stage,
    state.device_bytes,
    tensors.device_bytes(state.params),
    micro_batches,
    state.adapter,
  )


def _score(
  device: program_bytes.Device, stage: schema.Stage, state: _State
) -> program_bytes.Program:
  """Returns the bytes of scoring a micro-batch, on all devices together."""
  weights = tensors.device_bytes((state.params, state.frozen))
  batch = stage.batch
  return program_bytes.score(
    device, weights, batch.tokens_per_micro_batch, batch.packed_tokens
  )


def _slot_programs(
  decoding: program_bytes.Device,
  rollout: schema.Rollout,
  slots: int,
  slot_tokens: int,
) -> dict[str, program_bytes.Program]:
  """Returns the bytes of the programs that each host runs on its slots."""
  rows = min(rollout.prefill_rows, slots)
  return {
    'decode': program_bytes.decode(decoding, slots, slot_tokens),
    'prefill': program_bytes.prefill(
      decoding, slots, slot_tokens, rows, rollout.prefill_tokens
    ),
  }


def _decodes(stage: schema.Stage) -> bool:
  """Returns whether a stage decodes: its policy, or the answers of its pairs.

  The cache of an engine that nothing uses is never allocated.
  """
  generates_text = objectives.TYPES[stage.kind].generates_text
  return generates_text or isinstance(stage.pairs, schema.MadePairs)


def _decoding(device: program_bytes.Device, hosts: int) -> program_bytes.Device:
  """Returns the device as a part of its host alone."""
  if hosts == 1:
    return device
  mesh = device.mesh
  devices = math.prod(mesh.shape.values()) // hosts
  sizes = sharding.host_sizes(mesh.shape[sharding.TENSOR], devices)
  own = sharding.abstract_mesh(schema.Mesh(**sizes), devices)
  return dataclasses.replace(device, mesh=own)


def _group_sizes(stage: schema.Stage) -> dict[str, int]:
  return {name: entry.group_size for name, entry in stage.envs.items()}
