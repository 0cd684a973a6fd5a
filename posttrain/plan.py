"""What a run is about to do, before anything is compiled.

The resolved batch words, the parameter count and an estimate of the device
memory, as printed by `--dry_run` and at the start of every stage, and as
quoted when the device runs out of memory.
"""

import dataclasses
import math

from posttrain import schema
from posttrain.models import transformer


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
  state_bytes: int  # weights, gradients, optimizer moments, average
  activation_bytes: int  # of one micro-batch, forward and backward

  def lines(self) -> list[str]:
    """The table that people read."""
    groups = ', '.join(f'{k}: {v}' for k, v in self.group_size.items())
    total = self.state_bytes + self.activation_bytes
    rows = (
        ('prompts_per_step', f'{self.prompts_per_step}'),
        ('group_size', groups),
        ('  samples per step', f'{self.samples_per_step}'),
        ('micro_batch_tokens', f'{self.micro_batch_tokens}'),
        ('  rows x tokens', f'{self.rows_per_micro_batch} x '
                            f'{self.row_tokens}'),
        ('steps', f'{self.steps}'),
        ('parameters', f'{self.parameters:,}'),
        ('memory estimate', f'{_size(total)} per device'),
        ('  training state', _size(self.state_bytes)),
        ('  activations', _size(self.activation_bytes)),
    )  # fmt: skip
    return [
        f'stage {self.stage}',
        *(f'  {name:<20} {value}' for name, value in rows),
    ]


def make(
    name: str, stage: schema.Stage, model: schema.Model, mesh: schema.Mesh,
    devices: int,
) -> Plan:  # fmt: skip
  """Resolves the sizes of a stage.

  Args:
    name: of the stage.
    stage: its options.
    model: the model's options with the vocabulary resolved.
    mesh: the mesh's options.
    devices: how many devices there are.
  """
  batch = stage.batch
  ways = _ways(mesh, devices)
  parameters = transformer.num_params(model)
  # f32 weights, gradients and two moments, and the average where kept.
  copies = 4 + (stage.optim.average is not None)
  group_size = {k: entry.group_size for k, entry in stage.envs.items()}
  tokens = batch.micro_batch_tokens / (ways['data'] * ways['fsdp'])
  return Plan(
      stage=name,
      steps=stage.steps,
      prompts_per_step=batch.prompts_per_step,
      group_size=group_size,
      samples_per_step=batch.prompts_per_step * max(group_size.values()),
      micro_batch_tokens=batch.micro_batch_tokens,
      rows_per_micro_batch=batch.micro_batch_tokens // batch.row_tokens,
      row_tokens=batch.row_tokens,
      parameters=parameters,
      state_bytes=int(
          4 * copies * parameters / (ways['fsdp'] * ways['tensor'])
      ),
      activation_bytes=int(
          tokens * _token_bytes(model, batch.row_tokens) / ways['tensor']
      ),
  )


def _ways(mesh: schema.Mesh, devices: int) -> dict[str, int]:
  sizes = dataclasses.asdict(mesh)
  rest = devices // max(math.prod(v for v in sizes.values() if v > 0), 1)
  return {k: max(rest, 1) if v == -1 else v for k, v in sizes.items()}


def _token_bytes(model: schema.Model, row_tokens: int) -> int:
  """Activations kept per token: what a layer saves, layers, f32 logits."""
  width = 2 if model.dtype == 'bfloat16' else 4
  heads = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
  # Residual stream and norms, projections, gate and up with their product,
  # and the f32 attention matrix (scores and probabilities).
  layer = width * (4 * model.embed_dim + heads + 4 * model.mlp_dim)
  layer += 4 * 2 * model.heads * row_tokens
  kept = layer * model.layers
  if model.remat == 'block':
    kept = width * model.embed_dim * model.layers + layer
  # The chunked logprob keeps at most about 64 MB of logits, not counted.
  return kept


def _size(count: int) -> str:
  for unit in ('B', 'KiB', 'MiB'):
    if count < 1024:
      return f'{count:.0f} {unit}'
    count /= 1024
  return f'{count:.1f} GiB'
