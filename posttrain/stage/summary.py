"""The end of a run on the terminal: results, report, next commands."""

import dataclasses
import glob
import json
import os
import shlex
from typing import Any

from posttrain import schema
from posttrain.config import checks
from posttrain.metrics import estimates, statistics, writers
from posttrain.training import objectives

_NONE = '-'
_LONGEST = 100  # characters of a prompt in a command


def lines(run: schema.Run, workdir: str) -> list[str]:
  """Returns the last lines of a finished run.

  Args:
    run: its options.
    workdir: its folder.
  """
  path = os.path.join(workdir, 'metrics.jsonl')
  rows = writers.read_metrics(path)
  printed = table(run, rows)
  report = os.path.join(workdir, 'report.html')
  if os.path.exists(report):
    printed.append(f'report: {report}')
  return [*printed, 'next:', *(f'  {x}' for x in commands(run, workdir, rows))]


def table(run: schema.Run, rows: list[writers.Row]) -> list[str]:
  """Returns a table of the main evaluated numbers; [] without any.

  A column for the first evaluation, and one for the weights that each stage
  hands on.

  Args:
    run: the run's options.
    rows: the rows of its metrics.jsonl.
  """
  evaluated = [row for row in rows if any(x.startswith('eval/') for x in row)]
  if not evaluated:
    return []
  columns = {'start': evaluated[0]}
  for name in run.stages:
    if own := [row for row in evaluated if row['stage'] == name]:
      end = writers.end(own)
      early = '' if end is own[-1] else f' (step {end["step"]})'
      columns[name + early] = end
  cells = [['held-out evaluation', *columns]]
  names = _names(columns)
  cells += [
    [name, *(_cell(row, f'eval/{name}') for row in columns.values())]
    for name in names
  ]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  printed = [
    '  '.join(
      [first.ljust(widths[0])]
      + [x.rjust(n) for x, n in zip(rest, widths[1:], strict=True)]
    )
    for first, *rest in cells
  ]
  has_intervals = any('[' in x for row in cells for x in row)
  told = '(in brackets: 95 % intervals, over tasks or pairs)'
  note = [told] if has_intervals else []
  return printed + note if names else []


def commands(
  run: schema.Run, workdir: str, rows: list[writers.Row]
) -> list[str]:
  """Returns the commands that fit the result of a run, three at most.

  Args:
    run: its options.
    workdir: its folder.
    rows: the rows of its metrics.jsonl.
  """
  name, stage = list(run.stages.items())[-1]
  checkpoint = f'--checkpoint={shlex.quote(workdir)}'
  if not objectives.TYPES[stage.kind].generates_text:
    recipe = f'grpo:DIR,PROMPTS.jsonl,reward={os.path.abspath(workdir)}'
    return [
      f'python -m posttrain.main --config={shlex.quote(recipe)} --workdir=WORK'
    ]
  prompt = shlex.quote(_question(stage, name, workdir))
  printed = [f'python -m posttrain.generate {checkpoint} --prompt={prompt}']
  if _has_tasks(run, name, rows):
    against = _start(run, name, workdir)
    unlogged = dataclasses.replace(run, metrics=schema.Metrics())
    foreign = checks.untrusted(unlogged)
    trusted = ' --trust_config' if foreign else ''
    printed.append(
      f'python -m posttrain.evaluate {checkpoint}{against}{trusted}'
    )
  folder = shlex.quote(os.path.join(workdir, 'exported'))
  return [
    *printed,
    f'python -m posttrain.export {checkpoint} --folder={folder}',
  ]


def _question(stage: schema.Stage, name: str, workdir: str) -> str:
  """Returns a held-out prompt of the last evaluation, if it is one short line.

  Else it is the first of the suite.
  """
  pattern = os.path.join(
    glob.escape(workdir), 'rollouts', f'{name}_eval_[0-9]*.jsonl'
  )
  for path in sorted(glob.glob(pattern))[-1:]:
    with open(path) as file:
      line = file.readline()
    prompt = json.loads(line)['prompt'] if line else ''
    if prompt.isprintable() and 0 < len(prompt) <= _LONGEST:
      return prompt
  return stage.eval.suite[0] if stage.eval.suite else 'Hello'


def _has_tasks(run: schema.Run, name: str, rows: list[writers.Row]) -> bool:
  """Returns whether held-out tasks of a stage's environments were measured.

  Every stage is evaluated at its end. `evaluate` compares those tasks with the
  start. On held-out pairs a start that is the reference ranks nothing, and the
  suite's answers are not graded.
  """
  keys = {key for row in rows if row['stage'] == name for key in row}
  # The metrics of an environment: eval/METRIC/ENV, eval/reward/NAME/ENV.
  return any(
    key.startswith('eval/') and key.rpartition('/')[2] in run.stages[name].envs
    for key in keys
    if not key.startswith(('eval/pairs/', 'eval/suite/'))
  )


def _start(run: schema.Run, name: str, workdir: str) -> str:
  """Returns the flag that compares a stage with the weights it began with."""
  kind, _, stage = (init := run.stages[name].init).partition(':')
  if init == 'random':
    return ''
  if kind == 'stage':
    init = os.path.join(workdir, 'checkpoints', stage)
  return f' --against={shlex.quote(init)}'


def _names(columns: dict[str, writers.Row]) -> list[str]:
  """Returns the main metrics of any column, without `eval/`, in their order."""
  known = {
    key: None
    for row in columns.values()
    for key in row
    if not estimates.is_bound(key, row)
  }
  return [key.removeprefix('eval/') for key in statistics.held_out(known)]


def _cell(row: writers.Row, key: str) -> str:
  """Returns a value and its interval."""
  if not isinstance(row.get(key), int | float):
    return _NONE
  name, _, env = key.rpartition('/')
  bounds: list[Any] = [row.get(f'{name}{x}/{env}') for x in estimates.BOUNDS]
  text = f'{row[key]:.3f}'
  return text if None in bounds else '{} [{:.3f}, {:.3f}]'.format(text, *bounds)
