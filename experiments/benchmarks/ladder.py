"""The ladder on arithmetic: SFT, DPO, GRPO, reward model, GRPO on its rewards.

    python -m experiments.benchmarks.ladder --workdir=DIR [--seed=0] [--tiny]

One run of five stages: those of the recipes `configs/arithmetic_dpo.py:sums`
and `configs/arithmetic_rm_grpo.py`, and the latter's GRPO once more with the
environment's own grade as the reward and without a KL leash; the reward model
trains for RM_STEPS steps, fewer than in its recipe. All stages after SFT begin
with its weights, and are evaluated on the same 450 unseen questions. Started
again, the run continues from its newest checkpoint.

Prints a table: the share of greedy answers that can be parsed, the share that
is right (95 % interval), the share of sampled answers that is right, and the
minutes of each stage with its evaluations; below it the reward model's accuracy
on unseen pairs; and one JSON object.
"""

import dataclasses
import json
import os
import time

from experiments.benchmarks import learning, timing
from experiments.launch import results as results_lib
from posttrain import main as program
from posttrain import schema
from posttrain.config import checks
from posttrain.metrics import writers
from posttrain.report import curves

ROWS = {  # stage, or `base` before the first one -> name in the table
  'base': 'base (random)',
  'sft': 'SFT',
  'dpo': 'DPO',
  'grpo': 'GRPO',
  'rm_grpo': 'GRPO on the reward model',
}
RM_STEPS = 900  # the whole ladder then takes 20 minutes on a slow core
RATES = (
  *('format_rate', 'pass_rate', 'sampled_pass_rate'),
  *('pass_rate_low', 'pass_rate_high'),
)


def main(argv=None) -> None:
  """Runs the command."""
  parser = timing.parser(__doc__, seed=0)
  parser.add_argument('--workdir', required=True)
  parser.add_argument(
    '--tiny',
    action='store_true',
    help='run every part in a minute; learns next to nothing',
  )
  args = parser.parse_args(argv)
  start = time.monotonic()
  program.train(recipe(args.seed, args.tiny), args.workdir)
  wall = time.monotonic() - start
  rows = writers.read(os.path.join(args.workdir, 'metrics.jsonl'))
  results = summary(rows)
  print('\n'.join(table(results)))
  print(f'This start took {wall / 60:.1f} minutes of wall time.')
  print(json.dumps({'seed': args.seed, **results}))


def recipe(seed: int, tiny: bool) -> schema.Run:
  """Returns a run of the two recipes' stages, after one SFT."""
  names = 'arithmetic_dpo.py:sums', 'arithmetic_rm_grpo.py'
  if tiny:
    names = 'arithmetic_dpo.py:tiny', 'arithmetic_rm_grpo.py:tiny'
  dpo, learned = (
    program.load(f'configs/{name}', [('seed', str(seed))]) for name in names
  )
  assert dpo.stages['sft'] == learned.stages['sft']  # and not another start
  rm, last = learned.stages['rm'], learned.stages['grpo']
  ((name, entry),) = last.envs.items()
  entry = dataclasses.replace(entry, rewards={}, algorithm=schema.Grpo())
  run = dataclasses.replace(
    dpo,
    stages={
      'sft': dpo.stages['sft'],
      'dpo': dpo.stages['dpo'],
      'grpo': dataclasses.replace(last, envs={name: entry}),
      'rm': dataclasses.replace(rm, steps=min(rm.steps, RM_STEPS)),
      'rm_grpo': last,
    },
  )
  checks.check(run)
  return run


def summary(rows: list[dict]) -> dict[str, dict[str, float]]:
  """Returns each stage's rates and minutes, and the reward model's accuracy."""

  def rates(row: dict) -> dict[str, float]:
    keys = {name: f'eval/{name}/arithmetic' for name in RATES}
    keys['pairs'] = learning.PAIRS
    return {name: row[key] for name, key in keys.items() if key in row}

  results = {'base': {**rates(rows[0]), 'minutes': 0.0}}
  for stage in dict.fromkeys(row['stage'] for row in rows):
    own = [row for row in rows if row['stage'] == stage]
    seconds = sum(sum(curves.slices(row).values()) for row in own)
    results[stage] = {**rates(own[-1]), 'minutes': seconds / 60}
  return results


def table(results: dict[str, dict[str, float]]) -> list[str]:
  """Returns the lines of the table, in Markdown."""
  header = '', 'format rate', 'pass rate, greedy', '95 %', 'sampled', 'minutes'
  lines = []
  for name, heading in ROWS.items():
    row = results[name]
    parsed, greedy, sampled, low, high = (f'{row[x]:.3f}' for x in RATES)
    cells = heading, parsed, greedy, f'{low} to {high}', sampled
    lines.append((*cells, f'{row["minutes"]:.1f}'))
  total = sum(row['minutes'] for row in results.values())
  return [
    *results_lib.markdown(header, lines),
    '',
    f'The reward model is right about {results["rm"]["pairs"]:.1%} of unseen '
    f'pairs ({results["rm"]["minutes"]:.1f} minutes). {total:.1f} minutes in '
    'all.',
  ]


if __name__ == '__main__':
  main()
