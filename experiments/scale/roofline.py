"""Seconds of a program on a device, from its work and the chip's ceilings.

N counts the weights of matrix products: all but the embedding's, which a tied
head uses as its own. Per token of a row of T tokens, L layers and N_h heads of
size H:

    model FLOPs      6 N + 12 L N_h H T       PaLM's, for MFU: neither masks nor
                                              recomputation (arXiv 2204.02311)
    products         8 N                      of a train step whose layers and
                                              logits are computed twice; 6 N in
                                              layers that keep everything
    attention        2 L N_h H T per pass     forward, of a causal row: half of
                                              the scores; 2.5 times as many
                                              backward (arXiv 2307.08691)

    train     products / (peak x matmul_share)
              + attention / (peak x attention_*_share)
              + update: 8 passes over the float32 numbers of a device's weights:
                gradient, weight and two moments are read, three of them and
                zeroed gradients written
    prefill   max(products, reading the weights) + max(attention, reading the
              prefix of the cache)
    decode    max(products, reading the weights) + reading the cache

    step      between max(compute, communication) and their sum

Nothing else takes time here: no host, no pipeline bubbles, no stragglers.
"""

import dataclasses
from collections.abc import Mapping

from experiments import programs
from experiments.scale import fleets, plans
from posttrain import schema
from posttrain.models import transformer
from posttrain.stage import program_bytes

_UPDATE_BYTES = 8 * 4
_BACKWARD = 2.5  # of forward attention


@dataclasses.dataclass(frozen=True)
class Work:
  """What a device does in a call of a program."""

  tokens: float  # of all devices of the mesh
  model_flops: float  # of all devices, for MFU
  products: float  # FLOPs
  forward: float = 0.0  # FLOPs of attention
  backward: float = 0.0
  weights: float = 0.0  # bytes read
  cache: float = 0.0  # bytes read
  update: float = 0.0  # bytes read and written


def product_weights(model: schema.Model) -> int:
  """Returns the number of weights of matrix products."""
  assert model.vocab_size is not None
  table = model.vocab_size * model.embed_dim
  total = transformer.num_params(model)
  return total if model.tied_head else total - table


def attention_flops(model: schema.Model, length: float) -> float:
  """Returns the FLOPs of one token's attention to `length` others, forward."""
  return 4.0 * model.layers * model.heads * model.head_dim * length


def model_flops(model: schema.Model, tokens: int, length: int) -> float:
  """Returns the FLOPs of a train step by PaLM's formula.

  Args:
    model: model options, with the vocabulary resolved.
    tokens: tokens of the batch.
    length: tokens of a row.
  """
  per_token = 6 * product_weights(model) + 3 * attention_flops(model, length)
  return tokens * per_token


def work(
  name: str,
  model: schema.Model,
  mesh: fleets.MESH,
  sizes: programs.Sizes,
  context: int,
) -> Work:
  """Returns the work of a device.

  Args:
    name: train_step, prefill or decode.
    model: model options, with the vocabulary resolved.
    mesh: devices over data, fsdp and tensor.
    sizes: the program's sizes.
    context: tokens of a slot that decoding reads, on average.
  """
  if name == 'train_step':
    return _train(model, mesh, sizes)
  device = program_bytes.Device(model, fleets.abstract(mesh), 'gpu')
  local = plans.local_tokens(name, mesh, sizes)
  if name == 'decode':
    length, read = context, local * context
  else:
    rows, length = plans.prefill_call(mesh, sizes)
    read = rows * length
  tokens = local * mesh[0] * mesh[1]
  flops = 2 * product_weights(model) + attention_flops(model, length)
  return Work(
    tokens=tokens,
    model_flops=tokens * flops,
    products=2.0 * product_weights(model) * local / mesh[2],
    forward=attention_flops(model, length) * local / mesh[2],
    weights=program_bytes.view_bytes(device),
    cache=model.layers * program_bytes.cached_token_bytes(device) * read,
  )


def _train(
  model: schema.Model, mesh: fleets.MESH, sizes: programs.Sizes
) -> Work:
  assert model.vocab_size is not None
  data, fsdp, tensor = mesh
  tokens, length = sizes.rows * sizes.row_tokens, sizes.row_tokens
  each = tokens / (data * fsdp * tensor)
  again = model.remat != 'none'
  head = model.vocab_size * model.embed_dim
  layers = product_weights(model) - head
  causal = attention_flops(model, length / 2)
  return Work(
    tokens=tokens,
    model_flops=model_flops(model, tokens, length),
    products=each * ((8 if again else 6) * layers + 8 * head),
    forward=each * (2 if again else 1) * causal,
    backward=each * _BACKWARD * causal,
    update=_UPDATE_BYTES * transformer.num_params(model) / (fsdp * tensor),
  )


def seconds(name: str, work: Work, limits: Mapping[str, float]) -> float:
  """Returns the seconds of a device's work, without communication.

  Args:
    name: train_step, prefill or decode.
    work: of a device.
    limits: numbers of the chip, `ceilings.values`.
  """
  peak, memory = limits['peak_flops'], limits['hbm_bandwidth']
  products = work.products / (peak * limits['matmul_share'])
  forward = work.forward / (peak * limits['attention_forward_share'])
  if name == 'train_step':
    backward = work.backward / (peak * limits['attention_backward_share'])
    update = work.update / (memory * limits['hbm_share'])
    return products + forward + backward + update
  weights = work.weights / (memory * limits['hbm_share'])
  cache = work.cache / (memory * limits['cache_share'])
  if name == 'decode':  # its attention is bound by memory
    forward = 0.0
  return max(products, weights) + max(forward, cache)


def mfu(work: Work, seconds: float, devices: int, peak: float) -> float:
  """Returns the share of the devices' peak that the model's FLOPs take."""
  return work.model_flops / (seconds * devices * peak)
