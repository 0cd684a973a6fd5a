"""The whole ladder on arithmetic: SFT, DPO, GRPO, reward model, GRPO on that.

    python -m experiments.ladder --workdir=DIR [--seed=0] [--tiny]

One run of five stages, those of the recipes `configs/arithmetic_dpo.py:sums`
and `configs/arithmetic_rm_grpo.py`, and the latter's GRPO once more with the
environment's own grade for a reward and no leash; the reward model learns for
RM_STEPS only, less than in its recipe. All of them but SFT begin with what it
ended with, and answer the same 450 unseen questions. Started again, it goes on
where it stands.

Prints a table: what share of the greedy answers can be parsed, and is right
(95 % interval), what share of the sampled ones is right, the minutes that a
stage took with its evaluations; and one JSON object. What the reward model says
of pairs that it has not seen stands below the table.
"""

import argparse
import dataclasses
import json
import os
import time

from posttrain import main as program
from posttrain import schema
from posttrain.config import checks
from posttrain.metrics import writers

ROWS = {  # stage (or where it begins) -> what it is called
  'base': 'base (random)',
  'sft': 'SFT',
  'dpo': 'DPO',
  'grpo': 'GRPO',
  'rm_grpo': 'GRPO on the reward model',
}
RM_STEPS = 900  # so that all of it takes 25 minutes on two slow cores
RATES = ('format_rate', 'pass_rate', 'sampled_pass_rate')


def main(argv=None) -> None:
  parser = argparse.ArgumentParser(prog='python -m experiments.ladder')
  parser.add_argument('--workdir', required=True)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument(
    '--tiny',
    action='store_true',
    help='every part in a minute; learns next to nothing',
  )
  args = parser.parse_args(argv)
  start = time.monotonic()
  program.train(recipe(args.seed, args.tiny), args.workdir)
  wall = time.monotonic() - start
  rows = writers.read(os.path.join(args.workdir, 'metrics.jsonl'))
  found = summary(rows)
  print('\n'.join(table(found)))
  print(f'This time {wall / 60:.1f} minutes by the clock.')
  print(json.dumps({'seed': args.seed, **found}))


def recipe(seed: int, tiny: bool) -> schema.Run:
  """The stages of the two recipes, from one SFT."""
  words = (':tiny', ':tiny') if tiny else (':sums', '')
  dpo, learned = (
    program.load(f'configs/{name}.py{word}', [('seed', str(seed))])
    for name, word in zip(
      ('arithmetic_dpo', 'arithmetic_rm_grpo'), words, strict=True
    )
  )
  if dpo.stages['sft'] != learned.stages['sft'] or dpo.model != learned.model:
    raise ValueError(
      'configs/arithmetic_dpo.py and configs/arithmetic_rm_grpo.py must '
      'begin with the same SFT; undo the change to one of them'
    )
  rm, last = learned.stages['rm'], learned.stages['grpo']
  ((name, entry),) = last.envs.items()
  graded = dataclasses.replace(
    last,
    envs={
      name: dataclasses.replace(entry, rewards={}, algorithm=schema.Grpo())
    },
  )
  run = dataclasses.replace(
    dpo,
    stages={
      'sft': dpo.stages['sft'],
      'dpo': dpo.stages['dpo'],
      'grpo': graded,
      'rm': dataclasses.replace(rm, steps=min(rm.steps, RM_STEPS)),
      'rm_grpo': last,
    },
  )
  checks.check(run)
  return run


def summary(rows: list[dict]) -> dict[str, dict[str, float]]:
  """Each rung's rates and minutes, and the reward model's accuracy."""
  found = {}
  for stage in dict.fromkeys(row['stage'] for row in rows):
    mine = [row for row in rows if row['stage'] == stage]
    if not found:
      found['base'] = {**rates(mine[0]), 'minutes': 0.0}
    found[stage] = {**rates(mine[-1]), 'minutes': minutes(mine)}
  return found


def rates(row: dict) -> dict[str, float]:
  """What an evaluation measured, without its prefix and the environment."""
  names = (*RATES, 'pass_rate_low', 'pass_rate_high')
  found = {
    name: row[f'eval/{name}/arithmetic']
    for name in names
    if f'eval/{name}/arithmetic' in row
  }
  pairs = 'eval/pairs/rewards/accuracies'
  return {**found, **({'pairs': row[pairs]} if pairs in row else {})}


def minutes(rows: list[dict]) -> float:
  """Of a stage; compiling lies within the other times."""
  apart = ('time/compile', 'time/programs', 'time/tokens_per_second')
  return (
    sum(
      value
      for row in rows
      for key, value in row.items()
      if key.startswith('time/') and key not in apart
    )
    / 60
  )


def table(found: dict[str, dict[str, float]]) -> list[str]:
  """Markdown."""
  lines = [
    '| | format rate | pass rate, greedy | 95 % | sampled | minutes |',
    '|---|---|---|---|---|---|',
  ]
  for name, called in ROWS.items():
    row = found[name]
    low, high = row['pass_rate_low'], row['pass_rate_high']
    lines.append(
      f'| {called} | {row["format_rate"]:.3f} | {row["pass_rate"]:.3f} | '
      f'{low:.3f} to {high:.3f} | {row["sampled_pass_rate"]:.3f} | '
      f'{row["minutes"]:.1f} |'
    )
  total = sum(row['minutes'] for row in found.values())
  return [
    *lines,
    '',
    f'The reward model is right about {found["rm"]["pairs"]:.1%} of unseen '
    f'pairs ({found["rm"]["minutes"]:.1f} minutes). {total:.1f} minutes in '
    'all.',
  ]


if __name__ == '__main__':
  main()
