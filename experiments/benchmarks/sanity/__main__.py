"""The sanity run: training pass rates that must approach 1, per loss and dtype.

    python -m experiments.benchmarks.sanity --workdir=runs/sanity
    python -m experiments.benchmarks.sanity \\
        --losses=clip,gspo --dtypes=float32 \\
        --updates=1,4 --config.main.optim.lr=2e-4 --workdir=runs/updates

A policy that solves a question now and then can learn to solve it always. A
loss that is right, on logprobs that are right, therefore learns all questions
of a set of such questions.

1. The start: the recipe's stages before its last one, once.
2. The questions: the start answers training questions at temperature 1; those
   whose pass rate is in [low, high] are kept, in WORKDIR/questions.jsonl.
3. The runs, one per loss, dtype, number of updates per batch and seed: the
   recipe's last stage on these questions alone, from the start's weights. An
   evaluation answers the same questions, eight times at temperature 1: the
   training pass rate. Beside them it answers the recipe's unseen questions.
4. WORKDIR/sanity.md: a row per run; sanity.jsonl has the curves as well.

The same command continues what is left; other questions need another workdir.
Exit codes: as experiments.launch.sweep.

References: Qi et al., "Defeating the Training-Inference Mismatch via FP16",
arXiv 2510.26788 (the sanity test on "perfectible" questions).
"""

import dataclasses
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from experiments.benchmarks.learning import trials
from experiments.benchmarks.sanity import cases as cases_lib
from experiments.benchmarks.sanity import questions as questions_lib
from experiments.benchmarks.sanity import table
from experiments.launch import sweep
from posttrain import main as program
from posttrain import schema
from posttrain.metrics import writers
from posttrain.util import files
from posttrain.util import flags as flags_lib

# What differs from the recipe's last stage, besides a batch of all questions;
# --config.KEY=VALUE comes after it. Questions whose answers are all right have
# no credit and are not trained on, so that late steps cost little. The decay
# ends the noise of the updates; experiments/results/sanity.md has what was
# tried.
SETTINGS = {
  'steps': '100',
  'optim.lr': '2e-4',
  'optim.schedule': 'linear',
  'eval.every': '10',
  'eval.prompts': '128',
}


@dataclasses.dataclass
class Flags:
  """The command line."""

  workdir: str = flags_lib.required('DIR', 'The folder of all runs.')
  overrides: list[tuple[str, str]] = flags_lib.overrides()
  recipe: str = flags_lib.flag(
    'algorithms/grpo',
    'A file in configs/, without .py, with a start and a stage main, which has '
    'one environment, whose answers are numbers.',
  )
  losses: str = flags_lib.flag(
    ','.join(cases_lib.LOSSES), 'Types of main.loss.rl.'
  )
  dtypes: str = flags_lib.flag(','.join(cases_lib.DTYPES), 'Compute dtypes.')
  updates: str = flags_lib.flag('4', 'Numbers of updates per batch.')
  seeds: str = flags_lib.flag('0', 'Seeds of the runs.')
  questions: int = flags_lib.flag(64, 'Number of questions.', least=1)
  candidates: int = flags_lib.flag(
    100, 'Number of training questions that the start answers.', least=1
  )
  samples: int = flags_lib.flag(32, 'Number of answers to each.', least=1)
  low: float = flags_lib.flag(0.2, 'Lowest pass rate of the start.')
  high: float = flags_lib.flag(0.8, 'Highest pass rate of the start.')
  jobs: int = flags_lib.flag(1, 'Runs at a time.', least=1)


PARSER = flags_lib.Parser(Flags, __doc__)


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(_run, argv, 'configs.', 'experiments.')


def _run(flags: Flags) -> int:
  cases = cases_lib.parse(
    flags.losses, flags.dtypes, flags.updates, flags.seeds
  )
  batch = 'main.batch.prompts_per_step', str(flags.questions)
  run = load(flags.recipe, [batch, *flags.overrides])
  *before, _ = run.stages
  start_run = dataclasses.replace(
    run, stages={name: run.stages[name] for name in before}
  )
  start = trials.make_job('start', start_run, flags.workdir)
  code = sweep.play([start])
  if code:
    return code
  (entry,) = run.stages['main'].envs.values()
  choice = questions_lib.Choice(
    flags.questions, flags.candidates, flags.samples, flags.low, flags.high
  )
  questions = questions_lib.make(
    entry, run.seed, start.workdir, before[-1], choice, flags.workdir
  )
  runs = {
    case: cases_lib.options(run, case, start.workdir, questions)
    for case in cases
  }
  jobs = {
    case: trials.make_job(case.name, own, flags.workdir)
    for case, own in runs.items()
  }
  code = sweep.play(list(jobs.values()), flags.jobs)
  results = {}
  for case, job in jobs.items():
    rows = writers.read_metrics(os.path.join(job.workdir, 'metrics.jsonl'))
    if any(map(table.is_evaluation, rows)) and rows[-1]['step']:
      lr = runs[case].stages['main'].optim.lr
      results[case] = {**table.summarize(rows), 'lr': lr}
  write(results, flags.workdir)
  return code


def load(recipe: str, overrides: Sequence[tuple[str, str]]) -> schema.Run:
  """Returns the options of a recipe with SETTINGS and overrides.

  Raises:
    ValueError: there is no such recipe, or a value is wrong.
  """
  name, colon, argument = recipe.partition(':')
  settings = [(f'main.{key}', text) for key, text in SETTINGS.items()]
  return program.load(
    f'configs/{name}.py{colon}{argument}', [*settings, *overrides]
  )


def write(
  results: Mapping[cases_lib.Case, Mapping[str, Any]], folder: str
) -> None:
  """Prints the table; writes it, and the results in full."""
  text = table.lines(results)
  print('\n'.join(text), flush=True)
  with files.replacing(os.path.join(folder, 'sanity.md')) as file:
    file.writelines(f'{line}\n' for line in text)
  questions_lib.write_jsonl(
    os.path.join(folder, 'sanity.jsonl'),
    [{**dataclasses.asdict(case), **x} for case, x in results.items()],
  )


if __name__ == '__main__':
  sys.exit(main())
