"""Bytes that the devices of a mesh exchange, read from compiled programs.

    python -m experiments.planner.census --model=qwen3_8b --mesh=1,8,1

XLA's CPU backend compiles the programs of `experiments.planner.programs` for as
many forced devices as the mesh has; nothing runs, and no weights exist. It
inserts the same collectives as on other platforms, with three differences: most
of them move float32 instead of bfloat16, a reduce-scatter is an all-reduce and
a slice, and the scatter into the cache gathers.

--mesh has the devices over data, fsdp, tensor and, by option, expert and
sequence, --rows the rows of a micro-batch, --capacity the tokens of a slot,
--programs names, with commas.

Prints an object per program:

    collective_gib    GiB per device that collectives move: the larger of
                      operand and result, times the number of runs; for the
                      train step, one update of one micro-batch
    kinds             the same by kind
    largest           the largest collectives
    peak_gib          GiB per device of arguments, temporaries and results that
                      do not replace arguments
    layers            of the model that was compiled
    weights_gib       train_step: GiB that gathering weights and reducing
                      gradients takes, in float32: `weight_bytes`
    seconds           train_step: predicted on --chip, from communication that
                      is hidden behind compute to none that is, see `CHIPS`
    violations        train_step and score, under fsdp or tensor: bytes of all
                      collectives beyond SLACK times what weights and gradients
                      need, see `weight_bytes`, and under tensor REDUCTIONS sums
                      of the residual stream per layer and EDGES more, under
                      expert EXCHANGES of the axis's tokens per layer, under
                      sequence GATHERS of a row's keys and values
"""

import dataclasses
import json
import math
import os
import sys

from experiments.benchmarks import timing

PROGRAMS = ('train_step', 'prefill', 'decode', 'score')
DECODE = ('prefill', 'decode', 'view', 'state')
DECODE_LAYERS = 4  # their layers are not in a loop: the text grows with them
GIB = 2**30
SHOWN = 8  # collectives of a program that are printed
SLACK = 1.2
# Attention and MLP each end with one; the backward pass computes them again,
# and has one for the gradient of each product that reads the stream: q, k and
# v, gate and up. Embedding and head have three more together.
REDUCTIONS, EDGES = 9, 3
# A layer's experts gather the axis's tokens, again to compute gradients, and
# the gradients of their results; two reduce-scatters return as many.
EXCHANGES = 5
# Keys and values are gathered, again to compute gradients, and reduced.
GATHERS = 3
# FLOP/s of bfloat16 that large products reach, and bytes/s of one device's
# fastest link. From data sheets, times 0.72 and 0.78: judged, not measured.
CHIPS = {'h100': (712e12, 350e9), 'v5e': (138e12, 45e9), 'v6e': (643e12, 90e9)}


def main() -> None:
  """Runs the command."""
  from posttrain import schema

  parser = timing.parser(
    __doc__,
    mesh='1,8,1',
    programs=','.join(PROGRAMS),
    rows=8,
    row_tokens=4096,
    slots=schema.Rollout.slots,
    capacity=4096,
    prefill_rows=schema.Rollout.prefill_rows,
    prefill_tokens=schema.Rollout.prefill_tokens,
  )
  add = parser.add_argument
  add('--model', choices=schema.PRESETS, default='qwen3_0p6b')
  add('--layers', type=int, help="instead of the model's; 4 for decoding")
  add('--chip', choices=CHIPS, default='h100', help='of the predicted seconds')
  args = parser.parse_args()
  try:
    shape = tuple(map(int, args.mesh.split(',')))
    prepare(math.prod(shape))
    from experiments.planner import programs
    from posttrain import sharding
    from posttrain.chat import tokenizers

    mesh = sharding.abstract_mesh(schema.Mesh(*shape), math.prod(shape))
    sharding.check_batch(mesh, args.rows, '--rows', axes=sharding.ROW_AXES)
    sharding.check_batch(mesh, args.slots, '--slots')
    sizes = programs.Sizes(
      **{
        x.name: getattr(args, x.name)
        for x in dataclasses.fields(programs.Sizes)
      }
    )
    rows = {}
    for name in args.programs.split(','):
      model = schema.PRESETS[args.model]
      depth = DECODE_LAYERS if name in DECODE else model.layers
      model = dataclasses.replace(
        first_layers(model, args.layers or depth),
        vocab_size=model.vocab_size or tokenizers.Bytes().vocab_size,
      )
      rows[name], _ = measure(name, model, shape, sizes, args.chip)
    print(json.dumps(rows, indent=2), flush=True)
  except ValueError as error:  # no mesh, or a size does not divide over it
    print(f'error: {str(error).splitlines()[0]}', file=sys.stderr)
    sys.exit(2)


def prepare(devices: int) -> None:
  """Forces CPU devices and quick compilation; call before jax is imported."""
  flags = os.environ.get('XLA_FLAGS', '')
  own = f'--xla_force_host_platform_device_count={devices}'
  if 'xla_backend_optimization_level' not in flags:
    own += ' --xla_backend_optimization_level=0'
  os.environ['XLA_FLAGS'] = f'{flags} {own}'.strip()
  os.environ['JAX_PLATFORMS'] = 'cpu'


def first_layers(model, count: int):
  """Returns the options of a model's first layers."""
  delta = tuple(i for i in model.delta_layers if i < count)
  return dataclasses.replace(model, layers=count, delta_layers=delta)


def measure(name: str, model, mesh: tuple[int, ...], sizes, chip: str = 'h100'):
  """Compiles a program; returns its row of figures and its `hlo.Module`."""
  import jax

  from experiments.planner import hlo, programs
  from posttrain import schema, sharding

  devices = jax.devices()[: math.prod(mesh)]
  lowered = programs.lower(
    name, model, sharding.make_mesh(schema.Mesh(*mesh), devices), sizes
  )
  compiled = lowered.compile()
  module = hlo.parse(compiled.as_text())
  total = sum(module.bytes().values())
  row = {
    'collective_gib': total / GIB,
    'kinds': {kind: size / GIB for kind, size in module.bytes().items()},
    'largest': [
      f'{x}: {x.bytes / GIB:.3g} GiB, {x.op_name}'
      for x in module.collectives[:SHOWN]
    ],
    'peak_gib': peak(compiled) / GIB,
    'layers': model.layers,
  }
  if name == 'train_step':
    row['weights_gib'] = weight_bytes(model, mesh) / GIB
    row['seconds'] = seconds(model, mesh, sizes, total, chip)
  if name in ('train_step', 'score'):
    row['violations'] = violations(module, model, mesh, sizes)
  return row, module


def peak(compiled) -> int:
  """Returns the bytes that a program needs on a device, by XLA's plan."""
  memory = compiled.memory_analysis()
  return (
    memory.argument_size_in_bytes
    + memory.temp_size_in_bytes
    + memory.output_size_in_bytes
    - memory.alias_size_in_bytes
  )


def violations(
  module, model, mesh: tuple[int, ...], sizes, width: int = 4
) -> list[str]:
  """Returns what a train step or a scoring pass does beyond the limits.

  Args:
    module: the compiled program.
    model: model options, with the vocabulary resolved.
    mesh: devices over data, fsdp, tensor and, by option, expert and
      sequence.
    sizes: the program's sizes.
    width: bytes of a number that travels.
  """
  data, fsdp, tensor, expert, sequence = (*mesh, 1, 1)[:5]
  moved = sum(module.bytes().values())
  limit = SLACK * weight_bytes(model, mesh, width)
  tokens = sizes.rows * sizes.row_tokens // (data * fsdp)
  stream = tokens * model.embed_dim // sequence
  if tensor > 1:
    sums = REDUCTIONS * model.layers + EDGES
    limit += sums * stream * width // expert
  if expert > 1:
    limit += EXCHANGES * model.layers * stream * width
  if sequence > 1:
    keys = 2 * model.kv_heads * model.head_dim // tensor
    limit += GATHERS * model.layers * tokens // expert * keys * width
  if fsdp * tensor * expert * sequence == 1 or moved <= limit:
    return []
  return [
    f'collectives: {moved / GIB:.2f} GiB, expected at most {limit / GIB:.2f}'
  ]


def weight_bytes(model, mesh: tuple[int, ...], width: int = 4) -> int:
  """Returns the bytes per device by which weights and gradients must move.

  Under fsdp every layer is gathered twice, forward and backward, and head and
  embedding once; all gradients are reduced once. Under data and sequence the
  gradients that a device then has are reduced again. `tensor` divides all of
  them, `expert` the experts', and the others' are reduced over it.

  Args:
    model: model options, with the vocabulary resolved.
    mesh: devices over data, fsdp, tensor and, by option, expert and
      sequence.
    width: bytes of a number that travels.
  """
  data, fsdp, tensor, expert, sequence = (*mesh, 1, 1)[:5]
  data *= sequence  # both reduce the gradients
  from posttrain.models import transformer

  count = model.layers - len(model.dense_layers)
  count *= 3 * model.experts.count * model.experts.mlp_dim * model.embed_dim
  shared = (transformer.num_params(model) - count) // tensor
  total = shared + count // (tensor * expert)
  table = model.vocab_size * model.embed_dim // tensor
  layers = total - table * (1 if model.tied_head else 2)
  numbers = 2 * layers + 2 * table + total if fsdp > 1 else 0
  numbers += total // fsdp if data > 1 else 0
  numbers += shared // fsdp if data == 1 < expert else 0
  return width * numbers


def seconds(
  model, mesh: tuple[int, ...], sizes, moved: int, chip: str
) -> tuple[float, float]:
  """Returns the least and the most seconds of an update of a micro-batch.

  Args:
    model: model options, with the vocabulary resolved.
    mesh: devices over data, fsdp, tensor and, by option, expert and
      sequence.
    sizes: the program's sizes.
    moved: bytes of collectives, of which bfloat16 travels in half.
    chip: one of CHIPS.
  """
  from posttrain.models import transformer

  flops, bandwidth = CHIPS[chip]
  passes = 6 if model.remat == 'none' else 8  # forward, backward, again
  work = passes * transformer.num_params(model) * sizes.rows * sizes.row_tokens
  compute, communication = work / math.prod(mesh) / flops, moved / 2 / bandwidth
  return max(compute, communication), compute + communication


if __name__ == '__main__':
  main()
