"""Limits on what a compiled program of several devices may do.

1. No collective runs inside a loop over the vocabulary (`losses.logprobs`).
2. No floating-point result spans all tokens of the batch and a dimension of
   the model or the vocabulary: each device works on its own tokens, except for
   columns of the embedding. Attention is left out: it runs within
   `jax.shard_map` on a device's rows, and the shape of its scores, heads x
   queries x keys, may equal that of all tokens x a dimension.
3. Under fsdp or tensor, collectives move at most SLACK times what weights and
   gradients need, see `weight_bytes`, and under tensor REDUCTIONS sums of the
   residual stream per layer and EDGES more.
"""

from experiments import hlo, programs
from posttrain import schema
from posttrain.models import transformer

VOCABULARY_LOOPS = 'losses/logprobs.py'
ATTENTION = ('posttrain/ops/dense.py', 'posttrain/ops/chunked.py')
SLACK = 1.2
# Attention and MLP each end with one; the backward pass computes them again,
# and has one for the gradient of each product that reads the stream: q, k and
# v, gate and up. Embedding and head have three more together.
REDUCTIONS, EDGES = 9, 3
SHOWN = 3  # results of one program


def violations(
  module: hlo.Module,
  model: schema.Model,
  mesh: tuple[int, int, int],
  sizes: programs.Sizes,
  width: int = 4,
) -> list[str]:
  """Returns what a train step or a scoring pass does beyond the limits.

  Args:
    module: the compiled program.
    model: model options, with the vocabulary resolved.
    mesh: devices over data, fsdp and tensor.
    sizes: the program's sizes.
    width: bytes of a number that travels.
  """
  lines = [
    f'in a loop over the vocabulary: {x}'
    for x in module.in_loops(VOCABULARY_LOOPS)
  ]
  data, fsdp, tensor = mesh
  if data * fsdp > 1:
    tokens = (sizes.rows, sizes.row_tokens)
    whole = list(module.spanning(tokens, _widths(model, mesh), ATTENTION))
    lines += [f'all tokens: {x.name} = {y}' for x, y in whole[:SHOWN]]
  moved = sum(module.bytes().values())
  limit = SLACK * weight_bytes(model, mesh, width)
  if tensor > 1:
    stream = sizes.rows * sizes.row_tokens * model.embed_dim // (data * fsdp)
    limit += (REDUCTIONS * model.layers + EDGES) * stream * width
  if fsdp * tensor > 1 and moved > limit:
    lines.append(
      f'collectives: {moved / hlo.GIB:.2f} GiB, expected at most '
      f'{limit / hlo.GIB:.2f}'
    )
  return lines


def weight_bytes(
  model: schema.Model, mesh: tuple[int, int, int], width: int = 4
) -> int:
  """Returns the bytes per device by which weights and gradients must move.

  Under fsdp every layer is gathered twice, forward and backward, and head and
  embedding once; all gradients are reduced once. Under data the gradients that
  a device then has are reduced again. `tensor` divides all of them.

  Args:
    model: model options, with the vocabulary resolved.
    mesh: devices over data, fsdp and tensor.
    width: bytes of a number that travels.
  """
  data, fsdp, tensor = mesh
  assert model.vocab_size is not None
  total = transformer.num_params(model) // tensor
  table = model.vocab_size * model.embed_dim // tensor
  layers = total - table * (1 if model.tied_head else 2)
  numbers = 2 * layers + 2 * table + total if fsdp > 1 else 0
  numbers += total // fsdp if data > 1 else 0
  return width * numbers


def _widths(model: schema.Model, mesh: tuple[int, int, int]) -> set[int]:
  """Returns the sizes of an activation's last dimension.

  Whole, or split over `tensor`; not over fsdp: a lookup in the columns of the
  embedding that a device has gives no more than its share of the result. The
  size of a head is left out, as some models have as many heads as a batch rows.
  """
  assert model.vocab_size is not None
  whole = {model.embed_dim, model.mlp_dim, model.vocab_size}
  split = {size // mesh[2] for size in whole}
  return (whole | split) - {model.head_dim}
