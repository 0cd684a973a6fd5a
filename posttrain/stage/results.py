"""What a run prints at its end: its main evaluated numbers, next commands."""

import dataclasses
import glob
import json
import os
import shlex

from posttrain import schema
from posttrain.config import checks
from posttrain.evaluation import comparison
from posttrain.metrics import estimates, statistics, writers
from posttrain.training import objectives


def lines(run: schema.Run, workdir: str) -> list[str]:
  """Returns the last lines of a finished run.

  Args:
    run: its options.
    workdir: its folder.
  """
  rows = writers.read_metrics(os.path.join(workdir, 'metrics.jsonl'))
  printed = evaluated(run, rows, workdir)
  report = os.path.join(workdir, 'report.html')
  if os.path.exists(report):
    printed.append(f'report: {report}')
  return [*printed, 'next:', *(f'  {x}' for x in commands(run, workdir, rows))]


def evaluated(
  run: schema.Run, rows: list[writers.Row], workdir: str = ''
) -> list[str]:
  """Returns a table of the main evaluated numbers; [] without any.

  And sentences on whether those of the first kind changed in the last stage.

  A column for the first evaluation, and one for the weights that each stage
  hands on.

  Args:
    run: the run's options.
    rows: the rows of its metrics.jsonl.
    workdir: its folder, with the answers.
  """
  rows = [row for row in rows if any(x.startswith('eval/') for x in row)]
  titles, columns = ['start'], rows[:1]
  for name in run.stages:
    if own := [row for row in rows if row['stage'] == name]:
      end = writers.end(own)
      early = '' if end is own[-1] else f' (step {end["step"]})'
      titles.append(name + early)
      columns.append(end)
  known = {
    key: None
    for row in columns
    for key in row
    if not estimates.is_bound(key, row)
  }
  cells, note = [['held-out evaluation', *titles]], []
  gains: dict[str, list[str]] = {}
  if not (keys := statistics.held_out(known)):
    return []
  *_, before, after = columns
  after = after | comparison.within(workdir, after, before)
  for key in keys:
    line = [key.removeprefix('eval/')]
    for row in columns:
      text, interval = estimates.formatted(row, key, '{:.3f}')
      if interval:
        text += f' {interval}'
        note = ['(in brackets: 95 % intervals, over tasks or pairs)']
      line.append(text or '-')
    cells.append(line)
    if gain := estimates.change(before, after, key):
      text = '{}: {} changed by {:+.3f} [{:+.3f}, {:+.3f}], {}'
      text = text.format(titles[-1], line[0], *gain)
      gains.setdefault(key.split('/')[1], []).append(text)
  note += [
    f'every held-out answer of {key.split("/")[-1]} was cut off: see '
    f'config.{after["stage"]}.eval.max_tokens'
    for key in after
    if key.startswith('eval/truncated/') and after[key] == 1
  ]
  return comparison.layout(cells, 1) + note + next(iter(gains.values()), [])


def commands(
  run: schema.Run, workdir: str, rows: list[writers.Row]
) -> list[str]:
  """Returns the commands that fit the result of a run, three at most.

  Args:
    run: its options.
    workdir: its folder.
    rows: the rows of its metrics.jsonl.
  """
  start = 'python -m posttrain.'
  name, stage = list(run.stages.items())[-1]
  checkpoint = f'--checkpoint={shlex.quote(workdir)}'
  if not objectives.TYPES[stage.kind].generates_text:
    recipe = f'grpo:DIR,PROMPTS.jsonl,reward={os.path.abspath(workdir)}'
    return [f'{start}main --config={shlex.quote(recipe)} --workdir=WORK']
  # A question of the last evaluation, if it is one short line, or of the suite.
  answer, (prompt, *_) = {}, (*stage.eval.suite, 'Hello')
  pattern = f'{name}_eval_[0-9]*.jsonl'
  pattern = os.path.join(glob.escape(workdir), 'rollouts', pattern)
  for path in sorted(glob.glob(pattern))[-1:]:
    with open(path) as file:
      answer = json.loads(file.readline() or '{}')
    question = answer.get('question', '')
    if question.isprintable() and 0 < len(question) <= 100:
      prompt = question
  lines = [f'{start}generate {checkpoint} --prompt={shlex.quote(prompt)}']
  if answer.get('tools'):  # which only requests to a server have
    lines = [f'{start}serve {checkpoint}']
  # `evaluate` compares tasks of environments with the start, if it is known:
  # metrics eval/METRIC/ENV, eval/reward/NAME/ENV. On held-out pairs a start
  # that is the reference ranks nothing, and answers to the suite have no grade.
  keys = {key for row in rows if row['stage'] == name for key in row}
  if any(
    key.startswith('eval/') and key.rpartition('/')[2] in stage.envs
    for key in keys
    if not key.startswith(('eval/pairs/', 'eval/suite/'))
  ):
    kind, _, before = (init := stage.init).partition(':')
    if kind == 'stage':
      init = os.path.join(workdir, 'checkpoints', before)
    against = '' if init == 'random' else f' --against={shlex.quote(init)}'
    unlogged = dataclasses.replace(run, metrics=schema.Metrics())
    trusted = ' --trust_config' if checks.untrusted(unlogged) else ''
    # The command line has no functions of a Python program.
    lines.append(
      f'in Python: posttrain.api.evaluate({workdir!r})'
      if ':KEPT.' in repr(run)
      else f'{start}evaluate {checkpoint}{against}{trusted}'
    )
  folder = shlex.quote(os.path.join(workdir, 'exported'))
  return [*lines, f'{start}export {checkpoint} --folder={folder}']
