"""Memory, traffic and predicted speed of runs on devices that are not here.

    python -m experiments.scale --models=qwen3_8b --targets=h100:8,h100:512

1. The mesh of each model on each target is chosen (`experiments.choices`), or
   given by --mesh.
2. The train step is one update of one micro-batch on all devices, with so many
   rows per device whatever the mesh. Prefill and decoding run on the devices of
   one host, as in a run of several processes; hosts only multiply them.
3. Where the compiler of a target is here (`experiments/aot/run.sh with cuda
   python -m experiments.scale ...`) programs are compiled, and kept in the file
   of --compiled. Others are scaled (`experiments.estimates`). Each row says
   which, and the scaled and the compiled are compared where both exist.
4. Seconds follow from ceilings (`experiments.ceilings`) by `experiments.
   roofline`, and traffic from `experiments.links`. --assume=h100.hbm_share=0.8
   replaces a ceiling.

It prints the Markdown of `experiments.scale.page`, or with --json an object:

    rows       of programs: their bytes, traffic, seconds
    refused    models that fit no mesh of a target, and why
    errors     of scaled programs against compiled ones
    ceilings   that were assumed
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import census, hlo, programs
from experiments.aot import targets
from experiments.scale import (
  ceilings,
  choices,
  estimates,
  fleets,
  links,
  plans,
  roofline,
)
from experiments.scale import page as scale_page
from posttrain import schema

COMPILED = pathlib.Path(__file__).parents[1] / 'results' / 'scale.jsonl'
PROGRAMS = ('train_step', 'prefill', 'decode')


def main(argv: Sequence[str] | None = None) -> None:
  """Runs the command."""
  try:
    args = parse(argv)
    report = run(args)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
  if args.json:
    print(json.dumps(report))
  else:
    print('\n'.join(scale_page.lines(report)))
  if not report['rows']:
    sys.exit(1)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
  """Reads the command line."""
  parser = argparse.ArgumentParser(prog='python -m experiments.scale')
  add = parser.add_argument
  add('--models', type=_models, default=('qwen3_8b',), help='comma-separated')
  add('--targets', type=_targets, default='h100:8,h100:512,v5e:256,v6e:256')
  add('--programs', type=_programs, default=PROGRAMS, help='comma-separated')
  add(
    '--mesh',
    type=census.parse_mesh,
    action='append',
    help='data,fsdp,tensor, may be repeated; else chosen',
  )
  add('--device_rows', type=int, default=1, help='rows per device')
  add('--row_tokens', type=int, default=4096)
  add('--device_slots', type=int, default=16, help='slots per device, at most')
  add('--capacity', type=int, default=4096, help='tokens of a slot')
  add('--context', type=int, help='tokens that a step reads; half of them')
  add('--prefill_rows', type=int, default=schema.Rollout.prefill_rows)
  add('--prefill_tokens', type=int, default=schema.Rollout.prefill_tokens)
  add('--assume', action='append', default=[], help='CHIP.NAME=NUMBER')
  add(
    '--compiled',
    default=str(COMPILED),
    help="file of compiled programs; new ones are added; '' = none",
  )
  add('--depths', type=_depths, default=(2, 4), help='of unrolled programs')
  add('--full', action='store_true', help='compile all layers of these too')
  add('--json', action='store_true', help='print one line of JSON')
  return parser.parse_args(argv)


def _models(text: str) -> tuple[str, ...]:
  known = [x for x, model in schema.PRESETS.items() if model.vocab_size]
  return _names(text, known)


def _programs(text: str) -> tuple[str, ...]:
  return _names(text, PROGRAMS)


def _names(text: str, known: Sequence[str]) -> tuple[str, ...]:
  names = tuple(text.split(','))
  if unknown := set(names) - set(known):
    raise argparse.ArgumentTypeError(
      f'must be of {sorted(known)}: got {sorted(unknown)}'
    )
  return names


def _targets(text: str) -> tuple[fleets.Target, ...]:
  try:
    return tuple(map(fleets.parse, text.split(',')))
  except ValueError as error:
    raise argparse.ArgumentTypeError(str(error)) from error


def _depths(text: str) -> tuple[int, int]:
  first, _, second = text.partition(',')
  if not (first.isdecimal() and second.isdecimal()) or not (
    0 < int(first) < int(second)
  ):
    raise argparse.ArgumentTypeError(f'must be A,B with A < B: got {text!r}')
  return int(first), int(second)


def run(args: argparse.Namespace) -> dict[str, Any]:
  """Returns the report of all models on all targets."""
  tables = ceilings.override(ceilings.CHIPS, args.assume)
  measured = estimates.read(args.compiled)
  rows, refused = [], []
  cases = itertools.product(args.targets, args.models, args.mesh or [None])
  for target, preset, mesh in cases:
    limits = ceilings.values(tables[target.chip])
    try:
      choice = choose(args, preset, mesh, target, limits)
    except ValueError as error:
      refused.append(
        {'model': preset, 'target': str(target), 'reason': str(error)}
      )
      continue
    if choice.local is None and set(args.programs) - {'train_step'}:
      refused.append(_no_host(preset, target, choice))
    for program in programs_of(args, preset, target, choice, limits):
      measure(args, program, measured)
      rows.append(row(args, program, measured, choice, limits, target))
  chips = sorted({x.chip for x in args.targets})
  return {
    'rows': rows,
    'refused': refused,
    'errors': estimates.errors(measured, args.depths),
    'ceilings': {
      chip: {k: dataclasses.asdict(x) for k, x in tables[chip].items()}
      for chip in chips
    },
    'compiled': [
      {'program': x.program.key, 'cpu_seconds': x.cpu_seconds}
      for x in measured.values()
    ],
    'sizes': _sizes(args),
  }


def _no_host(
  preset: str, target: fleets.Target, choice: choices.Choice
) -> dict[str, str]:
  size = 2 * roofline.product_weights(schema.PRESETS[preset]) / hlo.GIB
  return {
    'model': preset,
    'target': str(target),
    'reason': (
      f'prefill and decoding must fit the devices of a host beside the train '
      f'state: got {size:.0f} GiB of weights in bfloat16, and '
      f'{choice.limit / hlo.GIB:.1f} GiB per device; sample on other devices'
    ),
  }


def _sizes(args: argparse.Namespace) -> dict[str, int]:
  names = (
    'device_rows row_tokens device_slots capacity prefill_rows prefill_tokens'
  )
  sizes = {name: getattr(args, name) for name in names.split()}
  return {**sizes, 'context': _context(args)}


def _context(args: argparse.Namespace) -> int:
  return args.context or args.capacity // 2


def choose(
  args: argparse.Namespace,
  preset: str,
  mesh: fleets.MESH | None,
  target: fleets.Target,
  limits: Mapping[str, float],
) -> choices.Choice:
  """Returns the mesh and sizes of a model on a target.

  Raises:
    ValueError: the train step does not fit, or --mesh not the target.
  """
  model = schema.PRESETS[preset]
  per_host = min(int(limits['devices_per_host']), target.devices)
  sizes = programs.Sizes(
    rows=args.device_rows * target.devices,
    row_tokens=args.row_tokens,
    slots=args.device_slots * per_host,
    capacity=args.capacity,
    prefill_rows=args.prefill_rows,
    prefill_tokens=args.prefill_tokens,
  )

  def seconds(mesh: fleets.MESH, sizes: programs.Sizes) -> float:
    exchanges = plans.exchanges('train_step', model, mesh, sizes)
    layout = fleets.layout(target, mesh)
    work = roofline.work('train_step', model, mesh, sizes, 0)
    traffic = links.traffic(layout, exchanges, limits)
    compute = roofline.seconds('train_step', work, limits)
    return (compute + traffic.seconds) / work.tokens

  samples = bool(set(args.programs) - {'train_step'})
  return choices.choose(model, target, sizes, limits, seconds, mesh, samples)


def programs_of(
  args: argparse.Namespace,
  preset: str,
  target: fleets.Target,
  choice: choices.Choice,
  limits: Mapping[str, float],
) -> list[estimates.Program]:
  """Returns the programs of a run: training on all devices, others on a host.

  Host programs are left out if they do not fit.
  """
  host = target.host(int(limits['devices_per_host']))
  layers = schema.PRESETS[preset].layers
  made = []
  for name in args.programs:
    where, mesh = target, choice.mesh
    if name in plans.UNROLLED:
      if choice.local is None:
        continue
      where, mesh = host, choice.local
    made.append(
      estimates.Program(name, preset, where, mesh, choice.sizes, layers)
    )
  return made


def measure(
  args: argparse.Namespace,
  program: estimates.Program,
  measured: dict[str, estimates.Measurement],
) -> None:
  """Compiles a program if its compiler is here and it was not compiled yet."""
  if targets.missing(program.target.chip):
    return
  unrolled = program.name in plans.UNROLLED
  depths = args.depths if unrolled else ()
  if not unrolled or args.full:
    depths = (*depths, program.layers)
  for layers in depths:
    deep = program.deep(layers)
    if deep.key in measured:
      continue
    measured[deep.key] = found = estimates.compile(deep)
    print(f'{deep.key}: {found.cpu_seconds:.0f} CPU seconds', file=sys.stderr)
    if args.compiled:
      with pathlib.Path(args.compiled).open('a') as file:
        file.write(json.dumps(found.to_json()) + '\n')


def row(
  args: argparse.Namespace,
  program: estimates.Program,
  measured: Mapping[str, estimates.Measurement],
  choice: choices.Choice,
  limits: Mapping[str, float],
  target: fleets.Target,
) -> dict[str, Any]:
  """Returns the figures of a program."""
  name, mesh, model = program.name, program.mesh, program.model
  found = estimates.estimate(program, measured, args.depths)
  layout = fleets.layout(program.target, mesh)
  traffic = links.traffic(layout, found.exchanges, limits)
  work = roofline.work(name, model, mesh, choice.sizes, _context(args))
  compute = roofline.seconds(name, work, limits)
  bounds = [max(compute, traffic.seconds), compute + traffic.seconds]
  devices = program.target.devices
  hosts = target.devices // devices
  peak = found.arguments + found.temporaries
  return {
    'program': name,
    'model': program.preset,
    'target': str(target),
    'mesh': list(mesh),
    'hosts': hosts,
    'kind': found.kind,
    'source': found.source,
    'rows': choice.sizes.rows,
    'slots': 0 if name == 'train_step' else choice.sizes.slots,
    'arguments_gib': found.arguments / hlo.GIB,
    'temporaries_gib': found.temporaries / hlo.GIB,
    'held_gib': max(choice.held, peak) / hlo.GIB,
    'limit_gib': choice.limit / hlo.GIB,
    'fits': peak <= choice.limit,
    'sent_gib': {k: v / hlo.GIB for k, v in traffic.kinds.items()},
    'inner_gib': traffic.inner / hlo.GIB,
    'outer_gib': traffic.outer / hlo.GIB,
    'hosts_gib': traffic.hosts / hlo.GIB,
    'collectives': traffic.times,
    'model_flops': work.model_flops,
    'compute_s': compute,
    'communication_s': traffic.seconds,
    'step_s': bounds,
    'tokens_per_s': [hosts * work.tokens / x for x in bounds],
    'mfu': [
      roofline.mfu(work, x, devices, limits['peak_flops']) for x in bounds
    ],
  }


if __name__ == '__main__':
  main()
