"""The final evaluations of the runs of a launch, as one table.

`write` leaves two files in the launch's workdir: results.jsonl, one object per
run with its name, its swept values, every `eval/*` value of its last row of
metrics, and `start/eval/*` of the weights that its last stage began with; and
results.md, the table.
"""

import json
import os
from collections.abc import Iterable, Sequence
from typing import Any

from experiments.launch import jobs as jobs_lib
from posttrain.metrics import estimates, statistics, writers
from posttrain.util import disk

# Columns after the main numbers, `posttrain.metrics.statistics`.
OTHERS = ('eval/reward/', 'eval/entropy/')
Row = dict[str, Any]


def collect(jobs: Sequence[jobs_lib.Job]) -> list[Row]:
  """Returns a row per job that has metrics.

  A row has name, sweep, stage, step, `eval/*`, and `start/eval/*` where the
  last stage was evaluated at step 0.

  Raises:
    ValueError: a metrics.jsonl cannot be read.
  """
  rows = []
  for job in jobs:
    path = os.path.join(job.workdir, 'metrics.jsonl')
    metrics = writers.read_metrics(path)
    if not metrics:
      continue
    last = metrics[-1]
    start = next(x for x in metrics if x['stage'] == last['stage'])
    values = {name: last[name] for name in last if name.startswith('eval/')}
    if start['step'] == 0:
      values |= {f'start/{k}': start[k] for k in values if k in start}
    rows.append(
      {
        'name': job.name,
        'sweep': dict(job.swept),
        **{'stage': last['stage'], 'step': last['step']},
        **values,
      }
    )
  return rows


def table(rows: Sequence[Row]) -> list[str]:
  """Returns the lines of a Markdown table: a row per run, in order.

  A cell is `before -> after`, of the last stage, or `after`.
  """
  keys = list(dict.fromkeys(key for row in rows for key in row['sweep']))
  names = list(
    dict.fromkeys(
      name for row in rows for name in row if not estimates.is_bound(name, row)
    )
  )
  metrics = statistics.held_out(names)
  metrics += [x for x in names if x.startswith(OTHERS) and x not in metrics]
  header = [*(keys or ['run']), 'stage', 'step']
  header += [name.removeprefix('eval/') for name in metrics]
  lines = []
  for row in rows:
    cells = [row['sweep'].get(key, '') for key in keys] or [row['name']]
    cells += [row['stage'], row['step']]
    cells += [_cell(row.get(x), row.get(f'start/{x}')) for x in metrics]
    lines.append(cells)
  return markdown(header, lines)


def markdown(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
  """Returns the lines of a Markdown table."""
  lines = [
    ' | '.join(str(cell).replace('|', '\\|') for cell in row)
    for row in (header, *rows)
  ]
  head, *rest = (f'| {line} |' for line in lines)
  return [head, '|---' * len(header) + '|', *rest]


def write(jobs: Sequence[jobs_lib.Job], folder: str) -> list[str]:
  """Writes results.jsonl and results.md to a folder; returns the table."""
  rows = collect(jobs)
  lines = table(rows)
  os.makedirs(folder, exist_ok=True)
  with disk.replacing(os.path.join(folder, 'results.jsonl')) as file:
    file.writelines(f'{json.dumps(row)}\n' for row in rows)
  with disk.replacing(os.path.join(folder, 'results.md')) as file:
    file.writelines(f'{line}\n' for line in lines)
  return lines


def _cell(value: Any, start: Any = None) -> str:
  """Returns a number with four digits; '' for a missing one."""
  if value is None:
    return ''
  if start is not None:
    return f'{_cell(start)} -> {_cell(value)}'
  return f'{value:.4g}' if isinstance(value, float) else str(value)
