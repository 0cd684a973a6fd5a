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
   whose pass rate is in [low, high] are kept, in WORKDIR/questions.jsonl, with
   rows like GSM8K's, so that `envs.gsm8k` asks and grades them.
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
import itertools
import json
import pathlib
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from experiments.benchmarks import learning, timing
from experiments.launch import results as results_lib
from experiments.launch import sweep
from posttrain import main as program
from posttrain import schema
from posttrain.envs import registry
from posttrain.metrics import writers

LOSSES = {
  'dppo': schema.Dppo(),
  'ipo': schema.Ipo(threshold=0.3),
  'clip': schema.Clip(),
  'cispo': schema.Cispo(),
  'gspo': schema.Gspo(),
  'dro': schema.Dro(),
}
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
SOLVED = 0.99  # the training pass rate that every loss must reach
HEADER = (
  *('loss', 'dtype', 'updates', 'lr', 'seed', 'steps'),
  *('start', 'best', 'last'),
  *(f'step of {SOLVED}', f'CPU s to {SOLVED}', 'CPU s'),
  *('unseen sampled', 'unseen greedy', 'mismatch mean', 'largest', 'k3'),
)
_TRAINED = 'eval/sampled_pass_rate/questions'
Row = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Case:
  """One run on the questions."""

  loss: str
  dtype: str
  updates: int
  seed: int

  @property
  def name(self) -> str:
    """Returns a name that is unique among the cases, and a folder's."""
    return f'{self.loss}_{self.dtype}_updates={self.updates}_seed={self.seed}'


def options(
  run: schema.Run, case: Case, start: str, questions: str
) -> schema.Run:
  """Returns the options of a case.

  Its environments are `questions`, which trains, and `unseen`, the evaluation
  questions of the recipe's own, which is only evaluated.

  Args:
    run: the recipe, whose last stage has one environment.
    case: the case.
    start: the workdir of the start.
    questions: the file of questions.
  """
  name = list(run.stages)[-1]
  stage = run.stages[name]
  (entry,) = stage.envs.values()
  stage = dataclasses.replace(
    stage,
    init=start,
    envs={
      'questions': dataclasses.replace(entry, env=env(questions)),
      'unseen': dataclasses.replace(entry, ratio=0.0),
    },
    loss=dataclasses.replace(stage.loss, rl=LOSSES[case.loss]),
    updates_per_rollout=case.updates,
  )
  model = dataclasses.replace(run.model, dtype=case.dtype)
  return dataclasses.replace(
    run, seed=case.seed, model=model, stages={name: stage}
  )


def env(path: str) -> schema.Gsm8k:
  """Returns the environment of a file of questions, the same in both splits."""
  return schema.Gsm8k(path=path, eval_path=path, instruction='', lenient=False)


def make_questions(args, run: schema.Run, start: str, stage: str) -> str:
  """Returns the path of the chosen questions; makes the file if it is absent.

  Args:
    args: the command's arguments.
    run: the recipe, whose training questions are the candidates.
    start: a workdir, whose weights answer.
    stage: the stage of these weights.

  Raises:
    ValueError: too few candidates have such a pass rate.
  """
  folder = pathlib.Path(args.workdir)
  path = folder / 'questions.jsonl'
  if path.exists():
    return str(path)
  tasks, answers = folder / 'candidates.jsonl', folder / 'answers.jsonl'
  (entry,) = list(run.stages.values())[-1].envs.values()
  source = registry.make('questions', entry.env).source('train', run.seed)
  rows = [
    {
      'question': task.prompt[-1]['content'],
      'answer': f'#### {task.answer}',
      'id': task.id,
    }
    for task in source.take(args.candidates)
  ]
  learning.write_rows(tasks, rows)
  nodes = {'questions': {'env': dataclasses.asdict(env(str(tasks)))}}
  words = [
    *(sys.executable, '-m', 'posttrain.evaluate', f'--checkpoint={start}'),
    *('--trust_config', f'--answers={answers}'),
    f'--config.{stage}.envs={json.dumps(nodes)}',
    f'--config.{stage}.eval.prompts={len(rows)}',
    f'--config.{stage}.eval.samples={args.samples}',
  ]
  subprocess.run(words, check=True, stdout=sys.stderr)
  chosen = choose(rows, writers.read(str(answers)), args.low, args.high)
  if len(chosen) < args.questions:
    raise ValueError(
      f'--questions must be at most {len(chosen)}, the candidates whose pass '
      f'rate is in [{args.low}, {args.high}]: got {args.questions}; raise '
      '--candidates'
    )
  learning.write_rows(path, chosen[: args.questions])
  return str(path)


def choose(
  rows: Iterable[Row], answers: Iterable[Row], low: float, high: float
) -> list[dict[str, Any]]:
  """Returns the rows whose answers are right often enough, with `pass_rate`.

  Args:
    rows: questions.
    answers: of each row, the line that `posttrain.evaluate --answers` writes.
    low: lowest share of sampled answers that are right, itself included.
    high: highest share, itself included.
  """
  rated = [
    {**row, 'pass_rate': statistics.fmean(answer['sampled'])}
    for row, answer in zip(rows, answers, strict=True)
  ]
  return [row for row in rated if low <= row['pass_rate'] <= high]


def summarize(rows: Sequence[Row]) -> dict[str, Any]:
  """Returns what the rows of a run's metrics.jsonl say.

  Returns:
    curve: (step, training pass rate, CPU seconds so far) per evaluation.
    solved: the first point of the curve with SOLVED; None = never.
    cpu: CPU seconds of the run.
    sampled, greedy: pass rates on unseen questions, [before, after].
    mismatch: |log pi - log mu| of trainer and sampler under the same weights,
      nats: mean and largest; and the mean k3 estimate of the KL.
  """
  evaluations = [row for row in rows if _TRAINED in row]
  curve = [[x['step'], x[_TRAINED], x['time/cpu']] for x in evaluations]
  ends = evaluations[0], evaluations[-1]
  steps = [row for row in rows if 'mismatch/max' in row]
  return {
    'curve': curve,
    'solved': next((point for point in curve if point[1] >= SOLVED), None),
    'cpu': rows[-1]['time/cpu'],
    'sampled': [row['eval/sampled_pass_rate/unseen'] for row in ends],
    'greedy': [row['eval/pass_rate/unseen'] for row in ends],
    'mismatch': [
      statistics.fmean(x['mismatch/abs_mean'] for x in steps),
      max(x['mismatch/max'] for x in steps),
      statistics.fmean(x['mismatch/k3'] for x in steps),
    ],
  }


def table(results: Mapping[Case, Mapping[str, Any]]) -> list[str]:
  """Returns the lines of a Markdown table, a row per run.

  Args:
    results: of each run, what `summarize` returns, and `lr`.
  """
  lines = []
  for case, x in results.items():
    curve, (step, _, cpu) = x['curve'], x['solved'] or ('never',) * 3
    rates = [rate for _, rate, _ in curve]
    cells = [case.loss, case.dtype, case.updates, f'{x["lr"]:g}', case.seed]
    cells.append(curve[-1][0])
    cells += [f'{y:.3f}' for y in (rates[0], max(rates), rates[-1])]
    cells += [step, cpu if cpu == 'never' else f'{cpu:.0f}', f'{x["cpu"]:.0f}']
    for before, after in (x['sampled'], x['greedy']):
      cells.append(f'{before:.3f} -> {after:.3f}')
    lines.append([*cells, *(f'{y:.1e}' for y in x['mismatch'])])
  return results_lib.markdown(HEADER, lines)


@learning.guarded
def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code."""
  parser = timing.parser(
    __doc__,
    recipe='algorithms/grpo',
    losses=','.join(LOSSES),
    dtypes='float32,bfloat16',
    updates='4',
    seeds='0',
    questions=64,
    candidates=100,
    samples=32,
    low=0.2,
    high=0.8,
    jobs=1,
  )
  parser.add_argument('--workdir', required=True, help='the folder of all runs')
  args, rest = parser.parse_known_args(argv)
  losses = args.losses.split(',')
  if unknown := set(losses) - set(LOSSES):
    raise ValueError(f'--losses must be of {",".join(LOSSES)}: got {unknown}')
  cases = [
    Case(loss, dtype, int(count), int(seed))
    for seed, count, dtype, loss in itertools.product(
      args.seeds.split(','),
      args.updates.split(','),
      args.dtypes.split(','),
      losses,
    )
  ]
  name, colon, argument = args.recipe.partition(':')
  words = [(f'main.{key}', text) for key, text in SETTINGS.items()]
  words.append(('main.batch.prompts_per_step', str(args.questions)))
  run = program.load(
    f'configs/{name}.py{colon}{argument}',
    [*words, *learning.overrides_of(rest)],
  )
  before = learning.without_last(run)
  start = learning.make_job('start', before, args.workdir)
  if code := sweep.play([start]):
    return code
  stage = list(before.stages)[-1]
  questions = make_questions(args, run, start.workdir, stage)
  runs = {case: options(run, case, start.workdir, questions) for case in cases}
  jobs = {
    case: learning.make_job(case.name, own, args.workdir)
    for case, own in runs.items()
  }
  code = sweep.play(list(jobs.values()), args.jobs)
  results = {}
  for case, job in jobs.items():
    rows = learning.read(job)
    if any(_TRAINED in row for row in rows) and rows[-1]['step']:
      lr = runs[case].stages['main'].optim.lr
      results[case] = {**summarize(rows), 'lr': lr}
  full = [{**dataclasses.asdict(case), **x} for case, x in results.items()]
  learning.write(args.workdir, 'sanity', table(results), full)
  return code


if __name__ == '__main__':
  sys.exit(main())
