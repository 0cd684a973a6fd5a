"""The plan of a stage: batch sizes, parameter counts, a memory estimate.

Printed by `--dry_run` and at the start of a run, and quoted when the device
runs out of memory.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import jax

from posttrain import schema, sharding
from posttrain.losses import logprobs
from posttrain.models import lora, transformer


@dataclasses.dataclass(frozen=True)
class Plan:
  """The resolved sizes of one stage. Bytes are per device."""

  stage: str
  steps: int
  prompts_per_step: int
  group_size: dict[str, int]
  samples_per_step: int
  micro_batch_tokens: int
  rows_per_micro_batch: int
  row_tokens: int
  parameters: int
  trained: int  # those that train; with LoRA the adapter's
  state_bytes: int  # weights, gradients, moments, average, EMA and snapshots
  activation_bytes: int  # of one micro-batch, forward and backward
  slots: int  # sequences decoded at a time
  slot_tokens: int  # capacity of a slot
  decode_bytes: int  # KV cache of the slots, and the decode view
  reference_bytes: int  # weights of references held beside the policy

  def lines(self) -> list[str]:
    """Returns the lines of a readable table."""
    groups = ', '.join(f'{k}: {v}' for k, v in self.group_size.items())
    total = self.state_bytes + self.activation_bytes
    total += self.decode_bytes + self.reference_bytes
    rows = (
      ('prompts_per_step', f'{self.prompts_per_step}'),
      ('group_size', groups),
      ('  samples per step', f'{self.samples_per_step}'),
      ('micro_batch_tokens', f'{self.micro_batch_tokens}'),
      ('  rows x tokens', f'{self.rows_per_micro_batch} x {self.row_tokens}'),
      ('rollout.slots', f'{self.slots}'),
      ('  tokens each', f'{self.slot_tokens}'),
      ('steps', f'{self.steps}'),
      ('parameters', f'{self.parameters:,}'),
      ('  that train', f'{self.trained:,}'),
      ('memory estimate', f'{_size(total)} per device'),
      ('  training state', _size(self.state_bytes)),
      ('  activations', _size(self.activation_bytes)),
      ('  decoding', _size(self.decode_bytes)),
      ('  references', _size(self.reference_bytes)),
    )
    return [
      f'stage {self.stage}',
      *(f'  {name:<20} {value}' for name, value in rows),
    ]


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
  sizes: Mapping[str, int],
  slot_tokens: int,
  references: int = 0,
  ema_and_snapshots: Sequence[str] = (),
  players: int = 0,
  group_sizes: Mapping[str, int] | None = None,
) -> Plan:
  """Resolves the sizes of a stage.

  Args:
    name: the stage's name.
    stage: its options.
    model: the model's options with the vocabulary resolved.
    sizes: devices per mesh axis, from `sharding.mesh_sizes`.
    slot_tokens: tokens that a slot holds.
    references: parameters of the models held beside the policy.
    ema_and_snapshots: names of the copies of the trained parameters.
    players: number of frozen models that sample, assumed to be of the policy's
      shape.
    group_sizes: samples per task, by environment; None = the stage's options.
  """
  batch, tokens = stage.batch, stage.batch.micro_batch_tokens
  batch_ways = sharding.batch_ways(sizes)
  weight_ways = sizes['fsdp'] * sizes['tensor']
  parameters = transformer.num_params(model)
  trained, frozen_bytes = _trained(stage, model, parameters)
  # f32 weights, gradients and two moments, and the average where kept.
  copies = 4 + (stage.optim.average is not None) + len(ema_and_snapshots)
  group_size = dict(group_sizes or _group_sizes(stage))
  activation_bytes = _activation_bytes(model, batch, sizes['tensor'])
  cached = stage.rollout.slots * slot_tokens // batch_ways
  return Plan(
    stage=name,
    steps=stage.steps,
    prompts_per_step=batch.prompts_per_step,
    group_size=group_size,
    samples_per_step=batch.prompts_per_step * max(group_size.values()),
    micro_batch_tokens=tokens,
    rows_per_micro_batch=tokens // batch.row_tokens,
    row_tokens=batch.row_tokens,
    parameters=parameters,
    trained=trained,
    state_bytes=(4 * copies * trained + frozen_bytes) // weight_ways,
    activation_bytes=int(activation_bytes / batch_ways),
    slots=stage.rollout.slots,
    slot_tokens=slot_tokens,
    decode_bytes=(1 + players) * _decode_bytes(model, cached, parameters),
    reference_bytes=4 * references // weight_ways,
  )


def _group_sizes(stage: schema.Stage) -> dict[str, int]:
  return {name: entry.group_size for name, entry in stage.envs.items()}


def _vocab(model: schema.Model) -> int:
  assert model.vocab_size is not None, 'the vocabulary must be resolved'
  return model.vocab_size


def _trained(
  stage: schema.Stage, model: schema.Model, parameters: int
) -> tuple[int, int]:
  """Returns (parameters that train, bytes of the frozen ones)."""
  if not stage.lora.rank:
    return parameters, 0
  adapter = lora.shapes(stage.lora, transformer.shapes(model))
  trained = sum(math.prod(x.shape) for x in jax.tree.leaves(adapter))
  return trained, parameters * (2 if model.dtype == 'bfloat16' else 4)


def _activation_bytes(
  model: schema.Model, batch: schema.Batch, tensor: int
) -> float:
  """Returns the activation bytes of a micro-batch, over all devices."""
  tokens = batch.micro_batch_tokens
  # One block of f32 logits and its gradient.
  logits = 2 * min(4 * tokens * _vocab(model), logprobs.BLOCK_BYTES)
  return tokens * _token_bytes(model, batch.row_tokens, tensor) + logits


def _token_bytes(model: schema.Model, row_tokens: int, tensor: int) -> float:
  """Returns activation bytes per token: kept by all layers, used by one.

  The residual stream is whole on every device of the `tensor` axis; heads
  and MLP width are split over it.
  """
  width = 2 if model.dtype == 'bfloat16' else 4
  heads = model.heads + model.kv_heads
  # Attention keeps q, k, v, its output, and the unnormalized weights with
  # their f32 sums; qk_norm keeps q and k from before the norm as well.
  numbers = (3 if model.qk_norm else 2) * heads * model.head_dim
  numbers += model.heads * row_tokens + 2 * model.mlp_dim  # gate and up
  inside = (width * numbers + 4 * model.heads) / tensor
  # The stream between attention and MLP; that before a layer is always kept.
  inside += width * model.embed_dim
  between = width * model.embed_dim
  # Not kept: f32 scores with their exponentials or gradients, or the MLP's
  # product with the gradients of gate and up.
  work = max(8 * model.heads * row_tokens, 3 * width * model.mlp_dim) / tensor
  kept_layers = model.layers if model.remat == 'none' else 1
  if model.remat == 'attention':  # its output, and the log of its f32 sums
    between += model.heads * (width * model.head_dim + 4) / tensor
  return model.layers * between + kept_layers * inside + work


def _decode_bytes(model: schema.Model, tokens: int, parameters: int) -> int:
  """Returns the bytes of the KV cache and of the weights' decode view."""
  width = 2 if model.dtype == 'bfloat16' else 4
  cache = 2 * model.layers * model.kv_heads * model.head_dim * tokens
  head = _vocab(model) * model.embed_dim * model.tied_head
  return width * (cache + parameters + head)


def _size(count: float) -> str:
  for unit in ('B', 'KiB', 'MiB'):
    if count < 1024:
      return f'{count:.0f} {unit}'
    count /= 1024
  return f'{count:.1f} GiB'
