"""Rates and transcripts of runs of configs/sql.py, as Markdown.

    python -m experiments.examples.sql_story RUN [RUN ...] [--tasks=5]
        [--first=0] [--png=FILE]

Rates are of the greedy episodes of evaluation in RUN/rollouts, with 95 %
intervals (Wilson, 1927); with several runs, the last row has the mean of the
rates. The gain of the last stage over the one before it is measured on the same
questions; over several runs, each question of each run counts separately. The
transcripts are of the first run, and of the first evaluation tasks, or of those
from `--first` on; they are not selected. Random actions are played anew. FILE
gets the learning curves of the first run.
"""

import itertools
import json
import pathlib
import re
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.benchmarks import timing
from posttrain import config
from posttrain.envs import registry, sql
from posttrain.evaluation import answers
from posttrain.metrics import estimates, writers
from posttrain.report import curves

NAMES = ('sql', 'sql_hard')  # environments of the recipe
_LEFT = re.compile(r'\n(?:left|Steps left): \d+$')  # end of observations
_MARKS = re.compile(r'[\\`*_~<>&|\[\]]')  # markup of Markdown

Rows = list[dict[str, Any]]


def episodes(run: pathlib.Path, stage: str, step: int) -> Rows:
  """Returns the greedy episodes of an evaluation."""
  path = run / 'rollouts' / f'{stage}_eval_{step:06}.jsonl'
  return writers.read(str(path))


def evaluations(run: pathlib.Path) -> list[tuple[str, int]]:
  """Returns (stage, step) of the start and of every stage's end."""
  rows = writers.read(str(run / 'metrics.jsonl'))
  ends = {row['stage']: row['step'] for row in rows}
  return [(rows[0]['stage'], 0), *ends.items()]


def rates(runs: Sequence[pathlib.Path]) -> list[str]:
  """Returns a table of greedy pass rates, by run, stage and environment."""
  lines = [
    '| run | after | questions | greedy pass rate |',
    '|---|---|---|---|',
  ]
  means: dict[str, list[float]] = {}
  for run in runs:
    for stage, step in evaluations(run):
      rows, when = episodes(run, stage, step), stage if step else 'nothing'
      for name in NAMES:
        right = [float(row['correct']) for row in rows if row['env'] == name]
        if right:
          mean, bounds = statistics.fmean(right), estimates.interval(right)
          means.setdefault(f'{when} | {name}', []).append(mean)
          rate = '{:.1%} ({:.1%} to {:.1%})'.format(mean, *bounds)
          lines.append(f'| {run.name} | {when} | {name} | {rate} |')
  for key, x in means.items() if len(runs) > 1 else ():
    lines.append(f'| mean of {len(x)} | {key} | {statistics.fmean(x):.1%} |')
  return lines


def differences(runs: Sequence[pathlib.Path]) -> list[str]:
  """Returns a table of the last stages' gains on the same questions."""
  lines = ['| run | after | questions | points more |', '|---|---|---|---|']
  pooled: dict[str, list[tuple[float, float]]] = {}
  for run in runs:
    stages = evaluations(run)[1:]
    if len(stages) < 2:
      continue
    before, after = (
      {(row['env'], row['id']): row['correct'] for row in episodes(run, *time)}
      for time in stages[-2:]
    )
    for name in NAMES:
      keys = [key for key in after if key[0] == name and key in before]
      if len(keys) > 1:
        pairs = [(after[key], before[key]) for key in keys]
        row = f'{stages[-1][0]}, not {stages[-2][0]} | {name}'
        pooled.setdefault(row, []).extend(pairs)
        lines.append(f'| {run.name} | {row} | {_points(pairs)} |')
  for row, pairs in pooled.items() if len(runs) > 1 else ():
    lines.append(f'| all {len(runs)} | {row} | {_points(pairs)} |')
  return lines if pooled else []


def _points(pairs: Sequence[tuple[float, float]]) -> str:
  """Returns the mean of after - before with its 95 % interval, as text."""
  bounds = estimates.paired(*zip(*pairs, strict=True))
  assert bounds is not None
  return '{:+.1f} ({:+.1f} to {:+.1f})'.format(*(100 * x for x in bounds))


def transcripts(run: pathlib.Path, first: int, count: int) -> str:
  """Returns episodes of some tasks, by random actions and after each stage."""
  cfg = config.build(
    config.from_dict(json.loads((run / 'config.json').read_text()))
  )
  stages = evaluations(run)[1:]
  env = registry.make(NAMES[0], cfg.stages[stages[-1][0]].envs[NAMES[0]].env)
  parts = []
  for task in env.source('eval', cfg.seed).take(first + count)[first:]:
    chance = sql.play(env, task, sql.chance, seed=cfg.seed)
    attempts = {'random actions': vars(answers.of(chance))} | {
      f'after {stage}': next(
        row
        for row in episodes(run, stage, step)
        if (row['env'], row['id']) == (NAMES[0], task.id)
      )
      for stage, step in stages
    }
    # A column per attempt, and a row per turn.
    question = _plain(task.prompt[-1]['content'].replace('\n', '; '))
    lines = [
      f'**{question}** (expected: {_plain(str(task.answer))})',
      '',
      '| ' + ' | '.join(attempts) + ' |',
      '|---' * len(attempts) + '|',
    ]
    for cells in itertools.zip_longest(
      *map(_turns, attempts.values()), fillvalue=''
    ):
      lines.append('| ' + ' | '.join(cells) + ' |')
    parts.append('\n'.join(lines))
  return '\n\n'.join(parts)


def _turns(row: dict[str, Any]) -> list[str]:
  turns = [
    f'<code>{_plain(message["content"])}</code>'
    if message['role'] == 'assistant'
    else _plain(_LEFT.sub('', message['content']))
    for message in row['messages']
  ]
  return [*turns, '**right**' if row['correct'] else '**wrong**']


def _plain(text: str) -> str:
  """Returns any text verbatim, for a cell of a table."""
  return '<br>'.join(_MARKS.sub(r'\\\g<0>', text).splitlines())


def main() -> None:
  """Runs the command."""
  parser = timing.parser(__doc__, tasks=5, first=0, png='')
  parser.add_argument('runs', metavar='RUN', nargs='+', type=pathlib.Path)
  args = parser.parse_args()
  if args.png:
    rows = writers.read_metrics(str(args.runs[0] / 'metrics.jsonl'))
    curves.draw(rows).savefig(args.png, dpi=160)
  tables = rates(args.runs), differences(args.runs)
  print('\n\n'.join('\n'.join(lines) for lines in tables if lines))
  print(f'\n{transcripts(args.runs[0], args.first, args.tasks)}')


if __name__ == '__main__':
  main()
