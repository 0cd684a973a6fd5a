"""The table of results: Markdown of the rows that `pytest -m aot` writes.

python -m experiments.aot.table ROWS > experiments/results/aot.md
"""

import datetime
import importlib.metadata
import json
import pathlib
import platform
import sys
from collections.abc import Iterable, Sequence
from typing import Any

VERSIONS = ('jax', 'jaxlib')
INTRO = """# Compiled for absent devices

Every kernel, and the programs of training and decoding, compiled by the
compilers of GPUs and TPUs on a machine that has neither
(`experiments/aot/run.sh`). Nothing ran: these are properties of programs, not
measurements of speed. Sizes are GiB per device.
"""
PROGRAMS = """
## Programs

A micro-batch has 8 rows of 4,096 tokens; decoding has 128 slots of 4,096
tokens, and prefill 32 rows of 32. *Weights* is what gathering weights and
reducing gradients takes at least, in bfloat16
(`experiments.budgets.weight_bytes`). A loop whose length is not known when it
is compiled counts once: decoding moves so much for one token of every slot.
"""


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the table of a file of JSON rows."""
  (path,) = sys.argv[1:] if argv is None else argv
  lines = pathlib.Path(path).read_text().splitlines()
  print(markdown([json.loads(line) for line in lines]), end='')


def markdown(rows: Sequence[dict[str, Any]]) -> str:
  """Returns the page; sections without rows are left out."""
  kernels = [x for x in rows if x['kind'] == 'kernel']
  gpu = [x for x in kernels if 'registers' in x]
  tpu = [x for x in kernels if 'registers' not in x]
  programs = [x for x in rows if x['kind'] == 'program']
  parts = [INTRO, f'\n{_made()}\n']
  if gpu:
    parts += ['\n## Kernels for GPUs\n\n', _gpu_kernels(gpu)]
  if tpu:
    parts += ['\n## Kernels for TPUs\n\n', _tpu_kernels(tpu)]
  if programs:
    parts += [PROGRAMS, '\n', _programs(programs)]
  return ''.join(parts)


def _made() -> str:
  names = [f'{x} {importlib.metadata.version(x)}' for x in VERSIONS]
  date = datetime.date.today().isoformat()
  return f'{date}, Python {platform.python_version()}, {", ".join(names)}.'


def _gpu_kernels(rows) -> str:
  head = (
    'call',
    'kernel',
    'target',
    'registers',
    'stack B',
    'spills B',
    'wgmma',
    'mma',
    'CPU s',
  )
  return _table(
    head,
    3,
    (
      (
        x['case'],
        x['name'],
        x['target'],
        x['registers'],
        x['stack'],
        x['spill_stores'] + x['spill_loads'],
        x['wgmma'],
        x['mma'],
        f'{x["seconds"]:.1f}',
      )
      for x in rows
    ),
  )


def _tpu_kernels(rows) -> str:
  return _table(
    ('call', 'kernel', 'target', 'calls', 'CPU s'),
    3,
    (
      (x['case'], x['name'], x['target'], x['calls'], f'{x["seconds"]:.1f}')
      for x in rows
    ),
  )


def _programs(rows) -> str:
  head = (
    'program',
    'model',
    'target',
    'mesh',
    'attention kernels',
    'collectives',
    'weights',
    'arguments',
    'temporaries',
    'aliased',
    'peak',
    'CPU s',
  )
  return _table(head, 5, map(_program, rows))


def _program(row) -> tuple[str, ...]:
  kinds = sorted(row['collectives_gib'].items(), key=lambda x: -x[1])
  shown = ', '.join(f'{kind} {size:.2f}' for kind, size in kinds if size > 5e-3)
  total = sum(row['collectives_gib'].values())
  kernels = ', '.join(f'{v} {k}' for k, v in row['kernels'].items())
  weights = row.get('weights_gib')
  return (
    row['name'],
    f'{row["preset"]}, {row["layers"]} layers',
    row['target'],
    ','.join(map(str, row['mesh'])),
    kernels,
    f'{total:.3g}' + (f' ({shown})' if len(kinds) > 1 and shown else ''),
    '' if weights is None else f'{weights:.3g}',
    f'{row["arguments_gib"]:.2f}',
    f'{row["temporaries_gib"]:.2f}',
    f'{row["aliased_gib"]:.2f}',
    f'{row["peak_gib"]:.2f}',
    f'{row["seconds"]:.0f}',
  )


def _table(head: Sequence[str], texts: int, rows: Iterable[Sequence]) -> str:
  """Returns a Markdown table; columns after the first `texts` hold numbers."""
  rule = ['---'] * texts + ['---:'] * (len(head) - texts)
  lines = [head, rule, *rows]
  return ''.join(f'| {" | ".join(map(str, line))} |\n' for line in lines)


if __name__ == '__main__':
  main()
