"""Bytes that the compiled programs of a stage need on one device.

Arguments are exact: they follow from shapes and rules. Temporaries are those
of XLA for a GPU, by phase of a program, of which the largest counts: compiled
for H100, the programs need as much or up to a sixth less (measurements in
`tests/stage/test_program_bytes.py`). XLA for a CPU needs more: it stores
bfloat16 as float32. Only XLA's attention stores scores, those of a block.
"""

import dataclasses
import functools

import jax

from posttrain import schema, sharding
from posttrain.decode import admission, loop
from posttrain.losses import logprobs
from posttrain.models import transformer
from posttrain.ops import attention
from posttrain.stage import adapter as adapter_lib
from posttrain.stage import tensors

# The per-token arrays of `types.Batch`: ten of the sample, three of packing.
BATCH_TOKEN_BYTES = 12 * 4 + 1
_MARGIN = 1.05  # on temporaries, which depend on the compiler's schedule
_LOGITS = 4  # copies of the logits while a token is drawn
_BLOCKS = 3  # of logits: themselves, their gradient, and both in other dtypes


@dataclasses.dataclass(frozen=True)
class Program:
  """Bytes of a compiled program on a device."""

  arguments: int
  temporaries: int  # and results that replace no argument

  @property
  def total(self) -> int:
    """Returns the bytes of both."""
    return self.arguments + self.temporaries


@dataclasses.dataclass(frozen=True)
class Device:
  """A model on one device of a mesh."""

  model: schema.Model
  mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh
  platform: str

  @property
  def width(self) -> int:
    """Returns the bytes of a number in the compute dtype."""
    return 2 if self.model.dtype == 'bfloat16' else 4

  @property
  def fsdp(self) -> int:
    """Returns the devices that share a weight's other dimension."""
    return self.mesh.shape[sharding.FSDP]

  @property
  def tensor(self) -> int:
    """Returns the devices that share heads and MLP columns."""
    return self.mesh.shape[sharding.TENSOR]

  @property
  def rows(self) -> int:
    """Returns the parts of a batch's rows."""
    return sharding.batch_ways(self.mesh)

  @property
  def table(self) -> int:
    """Returns the numbers of the head's columns, whole in D."""
    assert self.model.vocab_size is not None, 'the vocabulary must be resolved'
    return _split(self.model.vocab_size, self.tensor) * self.model.embed_dim

  @property
  def tables(self) -> int:
    """Returns the numbers of head and embedding, whole in D."""
    return self.table * (1 if self.model.tied_head else 2)

  @functools.cached_property
  def layer(self) -> int:
    """Returns the numbers of a layer's matrices, whole over `fsdp`."""
    model = self.model
    heads = 2 * (model.heads + model.kv_heads) * model.head_dim
    return model.embed_dim * (heads + 3 * model.mlp_dim) // self.tensor


def _split(size: int, ways: int) -> int:
  return size // ways if size % ways == 0 else size


def train_step(
  device: Device,
  stage: schema.Stage,
  state: int,
  trained: int,
  micro_batches: int,
  adapter: adapter_lib.Adapter | None = None,
) -> Program:
  """Returns the bytes of one update.

  Args:
    device: the model on a device.
    stage: the stage's options.
    state: bytes of the state, and of frozen weights.
    trained: bytes of the weights that train; their gradients have as many.
    micro_batches: micro-batches of a step.
    adapter: the adapter that trains beside frozen weights; None = all weights
      train.
  """
  batch, frozen = stage.batch, adapter is not None
  local = batch.tokens_per_micro_batch // device.rows
  once = batch.reduce_gradients == 'update' and device.mesh.size > 1
  # Accumulated gradients, those of the micro-batch, and what layers keep.
  held = _once_bytes(device, adapter) if once else 2 * trained
  held += _kept_bytes(device, local, batch.packed_tokens)
  head = _head_bytes(device, local, gradient=not frozen)
  layers = _layer_work(device, local, batch.packed_tokens)
  if not frozen and device.mesh.size == 1:
    # The gradients of head and embedding are added in place.
    layers -= 4 * device.tables
  elif device.fsdp > 1 and not once:
    if frozen:
      held += device.width * _transposed(device)
    else:
      layers += 4 * _transposed(device)
  arguments = state + BATCH_TOKEN_BYTES * micro_batches * local
  return Program(arguments, int(_MARGIN * (held + max(head, layers))))


def _once_bytes(device: Device, adapter: adapter_lib.Adapter | None) -> int:
  """Returns the bytes of weights and gradients if an update reduces once.

  The sum of the gradients is whole, in float32, and so are the weights that
  train and a micro-batch's gradients: those of the layers in the compute dtype,
  the tables in float32, whose gradients are added in place. Frozen weights are
  whole in the compute dtype, beside the device's part of them, which is an
  argument.
  """
  layers = device.model.layers * device.layer
  if adapter is None:
    return (4 + 2 * device.width) * layers + 2 * 4 * device.tables
  size = (4 + 2 * device.width) * adapter.numbers
  if device.fsdp > 1:
    size += device.width * (layers + device.tables)
  return size


def _transposed(device: Device) -> int:
  """Returns the numbers of `o` and `down`, which XLA transposes.

  They are gathered and reduce-scattered over their last dimension: gradients
  are transposed before the update, and frozen weights before the first layer.
  """
  model = device.model
  numbers = model.heads * model.head_dim + model.mlp_dim
  numbers *= model.layers * model.embed_dim
  return numbers // device.fsdp // device.tensor


def score(
  device: Device, weights: int, tokens: int, row_tokens: int
) -> Program:
  """Returns the bytes of the logprobs of packed rows.

  Args:
    device: the model on a device.
    weights: bytes of the model's weights.
    tokens: tokens of the rows, over all devices.
    row_tokens: tokens of a row.
  """
  local = tokens // device.rows
  layers = _forward_work(device, local, row_tokens, row_tokens)
  layers += 2 * _block(device, local)
  if device.fsdp > 1:  # all layers are cast before the first is gathered
    numbers = device.model.layers * device.layer // device.fsdp
    layers += device.width * numbers
  head = _head_bytes(device, local, gradient=False)
  work = int(_MARGIN * max(head, layers))
  return Program(weights + 16 * local, work + 4 * tokens)


def decode(device: Device, slots: int, capacity: int) -> Program:
  """Returns the bytes of the decode loop.

  Args:
    device: the model on a device.
    slots: sequences decoded at a time, over all devices.
    capacity: tokens of a slot.
  """
  arguments = view_bytes(device) + cache_bytes(device, slots, capacity)
  scores = part = 0
  if _is_xla(device, decodes=True):
    scores = 8 * _split(device.model.heads, device.tensor) * capacity
    # The copy of a part of the cache, which is read until it is full.
    *parts, _ = (0, *loop.lengths(capacity))
    part = cache_bytes(device, slots, parts[-1])
  draw = _LOGITS * 4 * device.table // device.model.embed_dim
  work = slots // device.rows * (draw + scores)
  return Program(arguments, int(_MARGIN * work) + part)


def prefill(
  device: Device, slots: int, capacity: int, rows: int, width: int
) -> Program:
  """Returns the bytes of the largest prefill call.

  Args:
    device: the model on a device.
    slots: sequences decoded at a time, over all devices.
    capacity: tokens of a slot.
    rows: prompts prefilled at a time, over all devices.
    width: tokens of a chunk.
  """
  arguments = view_bytes(device) + cache_bytes(device, slots, capacity)
  rows = min(rows, slots)
  shapes = admission.Shapes(slots, rows, width, ways=device.rows)
  # Keys and values of one layer, read from the slots, and the last logits.
  prefix = cached_token_bytes(device)
  calls = (
    count * length * prefix
    + _forward_work(device, count * width, width, length, fused=True)
    for count, length in shapes.calls(capacity)
  )
  work = max(calls, default=0)  # a stage may have nothing to decode
  most = shapes.row_counts[-1]
  logits = 2 * 4 * most * device.table // device.model.embed_dim
  return Program(arguments, int(_MARGIN * (work + logits)))


def view_bytes(device: Device) -> int:
  """Returns the bytes of the decode view: whole but for `tensor`."""
  params = transformer.shapes(device.model)
  # Layers are alike: the view of the first is enough.
  params['layers'] = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct((1, *x.shape[1:]), x.dtype), params['layers']
  )
  one = dataclasses.replace(
    device.model, layers=1, local_layers=(), window=None
  )
  like = jax.eval_shape(
    functools.partial(transformer.decode_view, cfg=one), params
  )
  view = sharding.placed(like, transformer.VIEW_RULES, device.mesh)
  others = (device.model.layers - 1) * tensors.device_bytes(view['layers'])
  return tensors.device_bytes(view) + others


def cache_bytes(device: Device, slots: int, capacity: int) -> int:
  """Returns the bytes of the slots: cache, drawn ids and their logprobs."""
  token = device.model.layers * cached_token_bytes(device) + 4 + 4
  return slots // device.rows * capacity * token


def cached_token_bytes(device: Device) -> int:
  """Returns the bytes of a token's key and value in a layer."""
  model = device.model
  heads = _split(model.kv_heads, device.tensor)
  return 2 * device.width * heads * model.head_dim


def _is_xla(device: Device, *, decodes: bool = False) -> bool:
  """Returns whether attention is XLA's."""
  with sharding.use(device.mesh):
    return attention.is_xla(
      device.model, decodes=decodes, platform=device.platform
    )


def _head_bytes(device: Device, tokens: int, gradient: bool) -> int:
  """Returns the bytes of head and logits while logprobs are computed."""
  weight = 0
  if device.fsdp > 1:  # gathered, in the compute dtype
    weight += device.width * device.table
  if device.model.tied_head:  # transposed
    weight += 4 * device.table // device.fsdp
  if gradient:  # of all columns, in float32
    weight += 4 * device.table
  blocks = (_BLOCKS if gradient else 1) * _block(device, tokens)
  # The hidden states twice, and their gradient and its sum in float32.
  hidden = 2 * device.width + (4 + 4 if gradient else 0)
  return weight + blocks + hidden * tokens * device.model.embed_dim


def _block(device: Device, tokens: int) -> int:
  """Returns the bytes of a block of logits."""
  whole = 4 * tokens * device.table // device.model.embed_dim
  return min(whole, logprobs.BLOCK_BYTES)


def _kept_bytes(device: Device, tokens: int, row_tokens: int) -> int:
  """Returns the bytes that all layers keep for the backward pass."""
  model = device.model
  kept = tokens * device.width * model.embed_dim  # the layer's input
  if model.remat == 'none':
    kept += _inside(device, tokens, row_tokens)
  if model.remat == 'attention':
    heads = model.heads * (device.width * model.head_dim + 4)
    kept += tokens * heads // device.tensor
  return model.layers * kept


def _inside(device: Device, tokens: int, row_tokens: int) -> int:
  """Returns the bytes of a layer's matrix products and attention."""
  model = device.model
  heads = (model.heads + model.kv_heads) * model.head_dim
  # q, k and their values before the norm, v, attention's output, gate and up.
  split = (2 if model.qk_norm else 1) * heads + heads + 2 * model.mlp_dim
  split = device.width * split + 4 * model.heads
  stream = device.width * model.embed_dim  # between attention and MLP
  return tokens * (split // device.tensor + stream)


def _layer_work(device: Device, tokens: int, row_tokens: int) -> int:
  """Returns the bytes of a layer's backward pass, recomputation included."""
  model = device.model
  heads = (model.heads + model.kv_heads) * model.head_dim
  # The gradient of the MLP, or that of attention, when the MLP's is done.
  numbers = max(4 * model.mlp_dim, 12 * heads - 2 * model.mlp_dim)
  if model.remat == 'none':
    numbers += 2 * model.mlp_dim
  split = device.width * numbers // device.tensor
  # On `tensor` the parts of the stream's gradient are summed in float32.
  stream = (4 * 4 if device.tensor > 1 else 0) * model.embed_dim
  work = tokens * (split + stream) + _inside(device, tokens, row_tokens)
  if device.fsdp > 1:  # gathered matrices, the next ones, and gradients
    work += 3 * device.width * device.layer
  return work + _score_bytes(device, tokens, row_tokens, row_tokens)


def _forward_work(
  device: Device, tokens: int, queries: int, keys: int, fused: bool = False
) -> int:
  """Returns the bytes of a layer's forward pass; `fused` = of a decode view."""
  model = device.model
  heads = (model.heads + model.kv_heads) * model.head_dim
  mlp = (4 if fused else 2) * model.mlp_dim
  split = max(mlp, 3 * heads) // device.tensor
  work = tokens * device.width * (split + 2 * model.embed_dim)
  if device.tensor > 1:  # the stream's sum over `tensor`
    work += 4 * tokens * model.embed_dim
  if device.fsdp > 1 and not fused:  # the layer's matrices are gathered
    work += device.width * device.layer
  return work + _score_bytes(device, tokens, queries, keys)


def _score_bytes(device: Device, tokens: int, queries: int, keys: int) -> int:
  """Returns the bytes of scores and their exponentials in float32."""
  if not _is_xla(device):
    return 0
  sizes = attention.xla_blocks(device.platform)
  if queries > sizes.single:  # one block of every row at a time
    tokens, keys = tokens * sizes.queries // queries, sizes.queries
  elif keys > sizes.single:
    keys = sizes.keys
  return 8 * tokens * keys * _split(device.model.heads, device.tensor)
