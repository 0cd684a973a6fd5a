"""What the devices of a mesh exchange in one update, from the rules alone.

Bytes are per device, of a collective's operand or result, the larger of both,
in the dtype that travels. XLA may fuse, split or reorder collectives; what they
move follows from the placement:

    weights     of a layer are gathered over `fsdp` in the compute dtype, in
                the forward pass and again in the backward pass
    head        gathered over `fsdp` once: XLA merges the gathers of both passes
    gradients   reduce-scattered over `fsdp`: the layers' in the compute dtype,
                the head's in float32; then all-reduced over `data`
    embedding   is not gathered: each device looks up its columns for the
                tokens of all devices of `fsdp`, and then gives each its tokens
    activations summed over `tensor`: after attention and MLP in the forward
                pass, after attention where it is recomputed, and at the input
                of five matrices in the backward pass

With LoRA only the adapter has gradients. The part of it that `fsdp` splits
travels with its layer; the gradients of the rest are all-reduced over `fsdp`
and `data` together. Over `tensor` the products with A are summed as well.
"""

import dataclasses
from collections.abc import Sequence

from posttrain import schema, sharding
from posttrain.stage import adapter as adapter_lib
from posttrain.stage import program_bytes, tensors


@dataclasses.dataclass(frozen=True)
class Transfer:
  """A kind of collective in one update of one micro-batch."""

  what: str
  kind: str
  axis: str
  count: int  # collectives
  device_bytes: int  # of all of them


def of(
  device: program_bytes.Device,
  batch: schema.Batch,
  adapter: adapter_lib.Adapter | None = None,
) -> list[Transfer]:
  """Returns the transfers of one update of one micro-batch.

  Args:
    device: the model on a device of a mesh.
    batch: sizes of the batch.
    adapter: the adapter that trains beside frozen weights; None = all weights
      train.
  """
  local = batch.tokens_per_micro_batch // device.rows
  data = device.mesh.shape[sharding.DATA]
  if batch.reduce_gradients == 'update':
    return _once(device, adapter) if device.rows > 1 else []
  transfers = []
  if device.fsdp > 1:
    transfers += _weights(device, adapter)
    transfers += _embedding(device, local, passes=1 if adapter else 2)
  if adapter:
    transfers += _adapter_gradients(device, adapter, device.width)
  elif data > 1:
    transfers += _reduced(device)
  if device.tensor > 1:
    transfers += _activations(device, local)
    transfers += _low_rank(device, local, adapter) if adapter else []
  return transfers


def _once(
  device: program_bytes.Device, adapter: adapter_lib.Adapter | None
) -> list[Transfer]:
  """Returns the transfers of an update, however many micro-batches it has."""
  tables, layers = device.tables, device.model.layers * device.layer
  transfers = []
  if device.fsdp > 1:
    gathered = device.width * layers + 4 * tables
    if adapter:  # frozen tables have the compute dtype
      gathered = device.width * (layers + tables + adapter.split)
    transfers.append(
      Transfer('weights, per update', 'all-gather', 'fsdp', 1, gathered)
    )
  if adapter:
    return transfers + _adapter_gradients(device, adapter, 4, once=True)
  what, size = 'gradients, per update', 4 * (layers + tables)
  if device.fsdp > 1:
    transfers.append(Transfer(what, 'reduce-scatter', 'fsdp', 1, size))
  if device.mesh.shape[sharding.DATA] > 1:
    part = size // device.fsdp
    transfers.append(Transfer(what, 'all-reduce', 'data', 1, part))
  return transfers


def _weights(
  device: program_bytes.Device, adapter: adapter_lib.Adapter | None
) -> list[Transfer]:
  """Returns gathers of weights and reduce-scatters of their gradients."""
  layers, width = device.model.layers, device.width
  each = layers * device.layer * width
  each += adapter.split * width if adapter else 0
  head = device.table
  gathers = [
    Transfer('layers, forward', 'all-gather', 'fsdp', layers, each),
    Transfer('layers, backward', 'all-gather', 'fsdp', layers, each),
    Transfer('head', 'all-gather', 'fsdp', 1, width * head),
  ]
  if adapter:
    return gathers
  return [
    *gathers,
    Transfer('layers, gradient', 'reduce-scatter', 'fsdp', layers, each),
    Transfer('head, gradient', 'reduce-scatter', 'fsdp', 1, 4 * head),
  ]


def _adapter_gradients(
  device: program_bytes.Device,
  adapter: adapter_lib.Adapter,
  width: int,
  once: bool = False,
) -> list[Transfer]:
  """Returns the reduction of an adapter's gradients over the rows' devices.

  Args:
    device: the model on a device.
    adapter: the adapter's sizes.
    width: bytes of a number that travels.
    once: per update, not per layer.
  """
  axes = [x for x in sharding.BATCH_AXES if device.mesh.shape[x] > 1]
  end = ', per update' if once else ''
  what, others = f'adapter, gradient{end}', f'adapter, other gradients{end}'
  count = 1 if once else device.model.layers
  split, whole = width * adapter.split, width * adapter.whole
  if not axes:
    return []
  if device.fsdp == 1:
    return [Transfer(what, 'all-reduce', 'data', count, split + whole)]
  transfers = [
    Transfer(what, 'reduce-scatter', 'fsdp', count, split),
    Transfer(others, 'all-reduce', ' and '.join(axes), count, whole),
  ]
  if sharding.DATA in axes:
    part = split // device.fsdp
    transfers.append(Transfer(what, 'all-reduce', 'data', count, part))
  return transfers


def _embedding(
  device: program_bytes.Device, tokens: int, passes: int
) -> list[Transfer]:
  """Returns the exchange of embedded tokens, and in 2 passes its gradient."""
  size = passes * tokens * device.model.embed_dim * device.width
  return [Transfer('embedded tokens', 'all-to-all', 'fsdp', passes, size)]


def _reduced(device: program_bytes.Device) -> list[Transfer]:
  """Returns the reduction of gradients over `data`."""
  model, layers = device.model, device.model.layers * device.layer
  size = (layers * device.width + 4 * device.tables) // device.fsdp
  return [Transfer('gradients', 'all-reduce', 'data', model.layers + 2, size)]


def _activations(device: program_bytes.Device, tokens: int) -> list[Transfer]:
  """Returns the sums over `tensor`."""
  model, size = device.model, tokens * device.model.embed_dim
  # The MLP's sum is not needed again where a layer is recomputed.
  forward = 2 * model.layers + (model.remat != 'none') * model.layers
  backward = 5 * model.layers  # of the inputs of q, k, v, gate and up
  sums = 'all-reduce', 'tensor'
  return [
    Transfer('embedded tokens', *sums, 1, 4 * size),
    Transfer(
      'activations, forward', *sums, forward, forward * device.width * size
    ),
    Transfer(
      'activations, backward', *sums, backward, backward * device.width * size
    ),
    Transfer('hidden states, gradient', *sums, 1, 4 * size),
    Transfer('logits, sums of a token', *sums, 2, 4 * 4 * tokens),
  ]


def _low_rank(
  device: program_bytes.Device, tokens: int, adapter: adapter_lib.Adapter
) -> list[Transfer]:
  """Returns the sums of x A and its gradient, summed with the activations."""
  size = tokens * device.width * adapter.summed
  count = device.model.layers
  return [Transfer('products with A', 'all-reduce', 'tensor', count, size)]


def lines(transfers: Sequence[Transfer]) -> list[str]:
  """Returns the lines of a table, with the sum."""
  total = sum(x.device_bytes for x in transfers)
  rows = [
    (x.what, f'{x.count} x {x.kind}', x.axis, tensors.size(x.device_bytes))
    for x in transfers
  ]
  rows.append(('total', '', '', tensors.size(total)))
  widths = [max(len(row[i]) for row in rows) for i in range(4)]
  return [
    f'  {a:<{widths[0]}}  {b:<{widths[1]}}  {c:<{widths[2]}}  {d:>{widths[3]}}'
    for a, b, c, d in rows
  ]
