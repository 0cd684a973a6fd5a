"""What the devices of a mesh exchange in one update, from the rules alone.

Bytes are per device, of a collective's operand or result, the larger of both,
in the dtype that travels. XLA may fuse, split or reorder collectives; what they
move follows from the placement:

    weights     of a layer are gathered over `fsdp` in the compute dtype, in
                the forward pass and again in the backward pass
    head        gathered over `fsdp` once in each of both passes
    gradients   reduce-scattered over `fsdp`: the layers' in the compute dtype,
                the head's in float32; then all-reduced over `data`
    embedding   is not gathered: each device looks up its columns for the
                tokens of all devices of `fsdp`, and then gives each its tokens
    stream      summed over `tensor`: after attention and MLP in the forward
                pass, after attention where it is recomputed, and at the input
                of five matrices in the backward pass
"""

import dataclasses
from collections.abc import Sequence

from posttrain import schema, sharding
from posttrain.stage import program_bytes

GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A kind of collective in one update of one micro-batch."""

  what: str
  kind: str
  axis: str
  count: int  # collectives
  device_bytes: int  # of all of them


def of(device: program_bytes.Device, batch: schema.Batch) -> list[Transfer]:
  """Returns the transfers of one update of one micro-batch.

  Args:
    device: the model on a device of a mesh.
    batch: sizes of the batch.
  """
  local = batch.micro_batch_tokens // device.rows
  data = device.mesh.shape[sharding.DATA]
  if batch.reduce_gradients == 'update':
    return _once(device) if device.rows > 1 else []
  return [
    *(_weights(device) if device.fsdp > 1 else ()),
    *(_embedding(device, local) if device.fsdp > 1 else ()),
    *(_reduced(device) if data > 1 else ()),
    *(_stream(device, local) if device.tensor > 1 else ()),
  ]


def _once(device: program_bytes.Device) -> list[Transfer]:
  """Returns the transfers of an update, however many micro-batches it has."""
  tables = device.table * (1 if device.model.tied_head else 2)
  layers, transfers = device.model.layers * device.layer, []
  if device.fsdp > 1:
    gathered = device.width * layers + 4 * tables
    transfers = [
      Transfer('weights, per update', 'all-gather', 'fsdp', 1, gathered),
      Transfer(
        'gradients, per update',
        'reduce-scatter',
        'fsdp',
        1,
        4 * (layers + tables),
      ),
    ]
  if device.mesh.shape[sharding.DATA] > 1:
    part = 4 * (layers + tables) // device.fsdp
    transfers.append(
      Transfer('gradients, per update', 'all-reduce', 'data', 1, part)
    )
  return transfers


def _weights(device: program_bytes.Device) -> list[Transfer]:
  """Returns gathers of weights and reduce-scatters of gradients."""
  layers, width = device.model.layers, device.width
  each = layers * device.layer * width
  head = device.table
  return [
    Transfer('layers, forward', 'all-gather', 'fsdp', layers, each),
    Transfer('layers, backward', 'all-gather', 'fsdp', layers, each),
    Transfer('layers, gradient', 'reduce-scatter', 'fsdp', layers, each),
    Transfer('head, both passes', 'all-gather', 'fsdp', 2, 2 * width * head),
    Transfer('head, gradient', 'reduce-scatter', 'fsdp', 1, 4 * head),
  ]


def _embedding(device: program_bytes.Device, tokens: int) -> list[Transfer]:
  """Returns the exchange of embedded tokens and of their gradient."""
  size = tokens * device.model.embed_dim * device.width
  return [Transfer('embedded tokens', 'all-to-all', 'fsdp', 2, 2 * size)]


def _reduced(device: program_bytes.Device) -> list[Transfer]:
  """Returns the reduction of gradients over `data`."""
  model, layers = device.model, device.model.layers * device.layer
  parts = layers * device.width
  parts += 4 * device.table * (1 if model.tied_head else 2)
  size = parts // device.fsdp
  return [Transfer('gradients', 'all-reduce', 'data', model.layers + 2, size)]


def _stream(device: program_bytes.Device, tokens: int) -> list[Transfer]:
  """Returns the sums over `tensor`."""
  model, size = device.model, tokens * device.model.embed_dim
  # The MLP's sum is not needed again where a layer is recomputed.
  forward = 2 * model.layers + (model.remat != 'none') * model.layers
  backward = 5 * model.layers  # of the inputs of q, k, v, gate and up
  sums = 'all-reduce', 'tensor'
  return [
    Transfer('embedded tokens', *sums, 1, 4 * size),
    Transfer('stream, forward', *sums, forward, forward * device.width * size),
    Transfer(
      'stream, backward', *sums, backward, backward * device.width * size
    ),
    Transfer('hidden states, gradient', *sums, 1, 4 * size),
    Transfer('logits, sums of a token', *sums, 2, 4 * 4 * tokens),
  ]


def lines(transfers: Sequence[Transfer]) -> list[str]:
  """Returns the lines of a table, with the sum."""
  total = sum(x.device_bytes for x in transfers)
  rows = [
    (x.what, f'{x.count} x {x.kind}', x.axis, f'{x.device_bytes / GIB:.3f} GiB')
    for x in transfers
  ]
  rows.append(('together', '', '', f'{total / GIB:.3f} GiB'))
  widths = [max(len(row[i]) for row in rows) for i in range(4)]
  return [
    f'  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}'
    for a, b, c, d in rows
  ]
