"""Bytes that the devices of a mesh exchange, read from compiled programs.

    python -m experiments.census --model=qwen3_8b --mesh=1,8,1 --json

XLA's CPU backend compiles the programs of `experiments.programs` for as many
forced devices as the mesh has; nothing runs, and no weights exist. It inserts
the same collectives as on other platforms, with three differences: most of
them move float32 instead of bfloat16, a reduce-scatter is an all-reduce and a
slice, and the scatter into the cache gathers.

The last line with `--json` is an object per program:

    collective_gib    GiB per device that collectives move: the larger of
                      operand and result, times the number of runs; for the
                      train step, one update of one micro-batch
    largest           the largest collective
    peak_gib          GiB per device of arguments, temporaries and results that
                      do not replace arguments
    layers            of the model that was compiled
    weights_gib       train_step: GiB that gathering weights and reducing
                      gradients takes, in float32: `budgets.weight_bytes`
    violations        train_step and score: of `experiments.budgets`
"""

import argparse
import dataclasses
import json
import math
import os
import sys
import time

PROGRAMS = ('train_step', 'prefill', 'decode', 'score')
DECODE = ('prefill', 'decode', 'view', 'state', 'share', 'first')
DECODE_LAYERS = 4  # their layers are not in a loop: the text grows with them
SHOWN = 8  # collectives of a program in the table


def main(argv=None) -> None:
  """Runs the command."""
  args = parse(argv)
  prepare(math.prod(args.mesh))
  try:
    _run(args)
  except ValueError as error:  # a size does not divide over the mesh
    print(f'error: {str(error).splitlines()[0]}', file=sys.stderr)
    sys.exit(2)


def _run(args: argparse.Namespace) -> None:
  """Measures the programs and prints what they do."""
  from posttrain import sharding

  mesh = dict(zip(sharding.AXES, args.mesh, strict=True))
  sharding.check_batch(mesh, args.rows, '--rows')
  sharding.check_batch(mesh, args.slots, '--slots')
  rows, sizes = {}, sizes_of(args)
  for name in args.programs:
    start = time.process_time()
    row, module = measure(name, model_of(name, args), args.mesh, sizes)
    rows[name] = row
    seconds = time.process_time() - start
    if not args.json:
      print('\n'.join(table(name, args, row, module, seconds)), flush=True)
  if args.json:
    print(json.dumps(rows), flush=True)


def parse(argv=None) -> argparse.Namespace:
  """Reads the command line."""
  from posttrain import schema

  parser = argparse.ArgumentParser(prog='python -m experiments.census')
  add = parser.add_argument
  add('--model', choices=schema.PRESETS, default='qwen3_0p6b')
  add('--mesh', type=parse_mesh, default=(1, 8, 1), help='data,fsdp,tensor')
  add('--layers', type=int, help="instead of the model's; 4 for decoding")
  add('--programs', type=_programs, default=PROGRAMS, help='comma-separated')
  add('--rows', type=int, default=8, help='rows of a micro-batch')
  add('--row_tokens', type=int, default=4096)
  add('--slots', type=int, default=schema.Rollout.slots)
  add('--capacity', type=int, default=4096, help='tokens of a slot')
  add('--prefill_rows', type=int, default=schema.Rollout.prefill_rows)
  add('--prefill_tokens', type=int, default=schema.Rollout.prefill_tokens)
  add('--json', action='store_true', help='print one line of JSON')
  return parser.parse_args(argv)


def parse_mesh(text: str) -> tuple[int, ...]:
  """Returns the sizes of a mesh, from data,fsdp,tensor."""
  words = text.split(',')
  sizes = tuple(int(x) for x in words if x.isdecimal())
  if len(words) != 3 or len(sizes) != 3 or min(sizes) < 1:
    raise argparse.ArgumentTypeError(
      f'must be three sizes >= 1, data,fsdp,tensor: got {text!r}'
    )
  return sizes


def _programs(text: str) -> tuple[str, ...]:
  names = tuple(text.split(','))
  known = {*PROGRAMS, *DECODE}
  if unknown := set(names) - known:
    raise argparse.ArgumentTypeError(
      f'must be of {sorted(known)}: got {sorted(unknown)}'
    )
  return names


def prepare(devices: int) -> None:
  """Forces CPU devices and quick compilation; call before jax is imported."""
  flags = os.environ.get('XLA_FLAGS', '')
  own = f'--xla_force_host_platform_device_count={devices}'
  if 'xla_backend_optimization_level' not in flags:
    own += ' --xla_backend_optimization_level=0'
  os.environ['XLA_FLAGS'] = f'{flags} {own}'.strip()
  os.environ['JAX_PLATFORMS'] = 'cpu'


def sizes_of(args):
  """Returns the sizes of the programs' arguments."""
  from experiments import programs

  fields = dataclasses.fields(programs.Sizes)
  return programs.Sizes(**{x.name: getattr(args, x.name) for x in fields})


def model_of(name: str, args):
  """Returns the model of a program; its tokenizer is of bytes if it has none.

  Args:
    name: the program.
    args: the command line.
  """
  from posttrain import schema
  from posttrain.chat import tokenizers

  model = schema.PRESETS[args.model]
  layers = args.layers or (DECODE_LAYERS if name in DECODE else model.layers)
  vocab_size = model.vocab_size or tokenizers.Bytes().vocab_size
  return dataclasses.replace(model, layers=layers, vocab_size=vocab_size)


def measure(name: str, model, mesh: tuple[int, int, int], sizes):
  """Compiles a program; returns its row of figures and its `hlo.Module`."""
  import jax

  from experiments import budgets, hlo, programs
  from posttrain import schema, sharding

  devices = jax.devices()[: math.prod(mesh)]
  lowered = programs.lower(
    name, model, sharding.make_mesh(schema.Mesh(*mesh), devices), sizes
  )
  compiled = lowered.compile()
  module = hlo.parse(compiled.as_text())
  total = sum(module.bytes().values())
  row = {
    'collective_gib': total / hlo.GIB,
    'largest': describe(module.collectives[0]) if total else '',
    'peak_gib': peak(compiled) / hlo.GIB,
    'layers': model.layers,
  }
  if name == 'train_step':
    row['weights_gib'] = budgets.weight_bytes(model, mesh) / hlo.GIB
  if name in ('train_step', 'score'):
    row['violations'] = budgets.violations(module, model, mesh, sizes)
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


def describe(collective) -> str:
  """Returns a collective's kind, shapes, runs, size and operation."""
  size = collective.bytes / 2**30
  return f'{collective}: {size:.3g} GiB, {collective.op_name or "no name"}'


def table(name: str, args, row: dict, module, seconds: float) -> list[str]:
  """Returns the lines that describe a program."""
  mesh = ','.join(map(str, args.mesh))
  weights = ''
  if 'weights_gib' in row:
    weights = f', {row["weights_gib"]:.1f} for weights and gradients'
  kinds = [
    f'  {kind:<20} {size / 2**30:10.3f} GiB'
    for kind, size in module.bytes().items()
  ]
  return [
    f'{name} of {args.model}, {row["layers"]} layers, mesh {mesh}: '
    f'{row["collective_gib"]:.2f} GiB{weights}; peak {row["peak_gib"]:.2f} GiB '
    f'({seconds:.0f} CPU seconds)',
    *kinds,
    *(f'    {describe(x)}' for x in module.collectives[:SHOWN]),
    *(f'  over budget: {line}' for line in row.get('violations', ())),
  ]


if __name__ == '__main__':
  main()
