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

import argparse
import json
import math
import pathlib
import re
import statistics
from collections.abc import Sequence
from typing import Any

from posttrain import config
from posttrain.envs import registry
from posttrain.envs.sql import players
from posttrain.evaluation import answers
from posttrain.metrics import writers
from posttrain.report import page

NAMES = ('sql', 'sql_hard')  # environments of the recipe
_LEFT = re.compile(r'\n(?:left|Steps left): \d+$')  # end of observations
_MARKS = re.compile(r'[\\`*_~<>&|\[\]]')  # markup of Markdown

Rows = list[dict[str, Any]]


def interval(right: int, count: int) -> str:
  """Returns a rate with its 95 % interval by Wilson's score, as text."""
  z, p = 1.96, right / count
  middle = (p + z * z / (2 * count)) / (1 + z * z / count)
  half = (
    z
    / (1 + z * z / count)
    * math.sqrt(p * (1 - p) / count + z * z / (4 * count * count))
  )
  low, high = max(middle - half, 0.0), min(middle + half, 1.0)
  return f'{p:.1%} ({low:.1%} to {high:.1%})'


def difference(pairs: Sequence[tuple[bool, bool]]) -> str:
  """Returns the change of a rate on the same questions, as text.

      mean(d) +- 1.96 sd(d) / sqrt(n)    d = after - before, per question

  Args:
    pairs: (right before, right after); at least two.

  Returns:
    The points, with their 95 % interval by the normal approximation, which
    does not exist if d is the same for all questions.
  """
  changes = [after - before for before, after in pairs]
  mean = statistics.fmean(changes)
  if len(set(changes)) == 1:
    return f'{100 * mean:+.1f} points'
  half = 1.96 * statistics.stdev(changes) / math.sqrt(len(changes))
  low, high = mean - half, mean + half
  return f'{100 * mean:+.1f} ({100 * low:+.1f} to {100 * high:+.1f}) points'


def episodes(run: pathlib.Path, stage: str, step: int) -> Rows:
  """Returns the greedy episodes of an evaluation."""
  path = run / 'rollouts' / f'{stage}_eval_{step:06}.jsonl'
  return writers.read(str(path))


def evaluations(run: pathlib.Path) -> list[tuple[str, int]]:
  """Returns (stage, step) of the start and of every stage's end."""
  rows = writers.read(str(run / 'metrics.jsonl'))
  ends = {row['stage']: row['step'] for row in rows}
  return [(rows[0]['stage'], 0), *ends.items()]


def rates(runs: Sequence[pathlib.Path]) -> str:
  """Returns a table of greedy pass rates, by run, stage and environment."""
  lines = [
    '| run | after | questions | greedy pass rate |',
    '|---|---|---|---|',
  ]
  means: dict[tuple[str, str], list[float]] = {}
  for run in runs:
    for stage, step in evaluations(run):
      rows = episodes(run, stage, step)
      for name in NAMES:
        right = [row['correct'] for row in rows if row['env'] == name]
        if right:
          when = stage if step else 'nothing'
          means.setdefault((when, name), []).append(sum(right) / len(right))
          lines.append(
            f'| {run.name} | {when} | {name} | '
            f'{interval(sum(right), len(right))} |'
          )
  if len(runs) > 1:
    lines += [
      f'| mean of {len(x)} | {when} | {name} | {sum(x) / len(x):.1%} |'
      for (when, name), x in means.items()
    ]
  return '\n'.join(lines)


def differences(runs: Sequence[pathlib.Path]) -> str:
  """Returns a table of the last stages' gains; '' with fewer than two."""
  lines = [
    '| run | after | questions | more than before |',
    '|---|---|---|---|',
  ]
  pooled: dict[tuple[str, str], list[tuple[bool, bool]]] = {}
  for run in runs:
    stages = evaluations(run)[1:]
    if len(stages) < 2:
      continue
    before, after = (
      {(row['env'], row['id']): row['correct'] for row in episodes(run, *time)}
      for time in stages[-2:]
    )
    for name in NAMES:
      pairs = [
        (before[key], right)
        for key, right in after.items()
        if key[0] == name and key in before
      ]
      if len(pairs) > 1:
        when = f'{stages[-1][0]}, not {stages[-2][0]}'
        pooled.setdefault((when, name), []).extend(pairs)
        lines.append(f'| {run.name} | {when} | {name} | {difference(pairs)} |')
  if len(runs) > 1:
    lines += [
      f'| all {len(runs)} | {when} | {name} | {difference(pairs)} |'
      for (when, name), pairs in pooled.items()
    ]
  return '\n'.join(lines) if pooled else ''


def transcripts(run: pathlib.Path, first: int, count: int) -> str:
  """Returns episodes of some tasks, by random actions and after each stage."""
  cfg = config.build(
    config.from_dict(json.loads((run / 'config.json').read_text()))
  )
  stages = evaluations(run)[1:]
  env = registry.make(NAMES[0], cfg.stages[stages[-1][0]].envs[NAMES[0]].env)
  parts = []
  for task in env.source('eval', cfg.seed).take(first + count)[first:]:
    chance = players.play(env, task, players.chance, seed=cfg.seed)
    attempts = {'random actions': vars(answers.of(chance))} | {
      f'after {stage}': next(
        row
        for row in episodes(run, stage, step)
        if (row['env'], row['id']) == (NAMES[0], task.id)
      )
      for stage, step in stages
    }
    parts.append(_side_by_side(task, attempts))
  return '\n\n'.join(parts)


def _side_by_side(task, attempts: dict[str, dict[str, Any]]) -> str:
  """Returns a table with a column per attempt, and a row per turn."""
  question = _plain(task.prompt[-1]['content'].replace('\n', '; '))
  columns = [_turns(row) for row in attempts.values()]
  lines = [
    f'**{question}** (expected: {_code(str(task.answer))})',
    '',
    '| ' + ' | '.join(attempts) + ' |',
    '|---' * len(attempts) + '|',
  ]
  for i in range(max(map(len, columns))):
    cells = (column[i] if i < len(column) else '' for column in columns)
    lines.append('| ' + ' | '.join(cells) + ' |')
  return '\n'.join(lines)


def _turns(row: dict[str, Any]) -> list[str]:
  turns = [
    _code(message['content'])
    if message['role'] == 'assistant'
    else _plain(_LEFT.sub('', message['content']))
    for message in row['messages']
  ]
  return [*turns, '**right**' if row['correct'] else '**wrong**']


def _plain(text: str) -> str:
  """Returns any text verbatim, for a cell of a table."""
  return '<br>'.join(_MARKS.sub(r'\\\g<0>', text).splitlines())


def _code(text: str) -> str:
  """Returns any text as code, for a cell of a table, line by line."""
  return '<br>'.join(map(_code_line, text.strip().splitlines())) or '(empty)'


def _code_line(line: str) -> str:
  longest = max(map(len, re.findall('`+', line)), default=0)
  line, ticks = line.replace('|', '\\|'), '`' * (longest + 1)
  return f'{ticks} {line} {ticks}' if longest else f'{ticks}{line}{ticks}'


def main() -> None:
  """Runs the command."""
  parser = argparse.ArgumentParser(
    prog='python -m experiments.examples.sql_story'
  )
  parser.add_argument('runs', metavar='RUN', nargs='+', type=pathlib.Path)
  parser.add_argument('--tasks', type=int, default=5)
  parser.add_argument('--first', type=int, default=0)
  parser.add_argument('--png')
  args = parser.parse_args()
  if args.png:
    page.figure(str(args.runs[0]), args.png)
  print(rates(args.runs))
  print()
  if gains := differences(args.runs):
    print(gains)
    print()
  print(transcripts(args.runs[0], args.first, args.tasks))


if __name__ == '__main__':
  main()
