"""The runs: one per loss, dtype, number of updates per batch and seed."""

import dataclasses
import itertools

from experiments.benchmarks.sanity import questions as questions_lib
from posttrain import schema

LOSSES = {
  'dppo': schema.Dppo(),
  'ipo': schema.Ipo(threshold=0.3),
  'clip': schema.Clip(),
  'cispo': schema.Cispo(),
  'gspo': schema.Gspo(),
}
DTYPES = 'float32', 'bfloat16'


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


def parse(losses: str, dtypes: str, updates: str, seeds: str) -> list[Case]:
  """Returns all combinations of values that are separated by commas.

  Raises:
    ValueError: names the flag with a value that is none of it.
  """
  return [
    Case(loss, dtype, count, seed)
    for seed, count, dtype, loss in itertools.product(
      _numbers('seeds', seeds),
      _numbers('updates', updates),
      _names('dtypes', dtypes, DTYPES),
      _names('losses', losses, tuple(LOSSES)),
    )
  ]


def _names(flag: str, text: str, known: tuple[str, ...]) -> list[str]:
  words = text.split(',')
  if not set(words) <= set(known):
    raise ValueError(f'--{flag} must be of {",".join(known)}: got {text!r}')
  return words


def _numbers(flag: str, text: str) -> list[int]:
  words = text.split(',')
  if not all(word.isdecimal() for word in words):
    raise ValueError(f'--{flag} must be numbers, as 0,1,2: got {text!r}')
  return [int(word) for word in words]


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
  env = questions_lib.env(questions)
  stage = dataclasses.replace(
    stage,
    init=start,
    envs={
      'questions': dataclasses.replace(entry, env=env),
      'unseen': dataclasses.replace(entry, ratio=0.0),
    },
    loss=dataclasses.replace(stage.loss, rl=LOSSES[case.loss]),
    updates_per_rollout=case.updates,
  )
  model = dataclasses.replace(run.model, dtype=case.dtype)
  return dataclasses.replace(
    run, seed=case.seed, model=model, stages={name: stage}
  )
