"""Measures a policy on a recipe's held-out tasks; trains nothing.

    python -m posttrain.evaluate --checkpoint=PATH [--against=PATH]
        [--stage=NAME] [--config=FILE[:ARGUMENT]] [--config.KEY=VALUE ...]
        [--answers=FILE]

PATH is as for posttrain.generate: of a run, or a HuggingFace or PEFT
directory. A run is asked the tasks of the stage it was saved in, by its own
config; --config takes a recipe instead, which a directory needs, and --stage
another stage of it (default: the last). The keys that matter are a stage's
`eval`, `envs` and `rollout`.

Prints a table with 95 % intervals over the tasks, the answers to the prompts of
`eval.suite`, and as the last line on stdout one JSON object. --against measures
a second policy, of the same model, on the same tasks, and prints both: the
suite's answers side by side, and how much more of the tasks the first gets
right, with the normal 95 % interval of the mean of the differences per task.
--answers writes each greedy answer of the first as a line of JSON. Exit codes:
0 done, 1 environments failed too often, 2 the command is wrong, 130
interrupted.
"""

import dataclasses
import sys
from collections.abc import Sequence

from posttrain.config import load as config
from posttrain.evaluation import comparison
from posttrain.metrics import writers
from posttrain.util import errors


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = ''
  against: str | None = None
  config: str | None = None
  stage: str | None = None
  answers: str | None = None
  overrides: list[tuple[str, str]] = dataclasses.field(default_factory=list)


def parse(argv: Sequence[str]) -> Flags:
  """Reads the command line; ValueError names the argument that is wrong."""
  flags = Flags()
  for argument in argv:
    name, _, value = argument.removeprefix('--').partition('=')
    if argument.startswith('--config.') and value:
      flags.overrides.append((name.removeprefix('config.'), value))
    elif (
      argument.startswith('--')
      and value
      and name in ('checkpoint', 'against', 'config', 'stage', 'answers')
    ):
      setattr(flags, name, value)
    else:
      raise ValueError(
        'arguments must be --checkpoint=PATH, --against=PATH, --config=FILE, '
        '--stage=NAME, --answers=FILE or --config.KEY=VALUE: got '
        f'{argument!r}'
      )
  if not flags.checkpoint:
    raise ValueError('--checkpoint=PATH must be given')
  return flags


def measure(
  flags: Flags,
) -> tuple[comparison.Measurement, comparison.Measurement | None]:
  """Answers the tasks, by one policy or by two.

  Raises:
    ValueError: the command is wrong, or weights and config do not fit.
    TooManyErrors: of environments.
  """
  # Late, so that a mistake in the command line is answered at once.
  from posttrain.checkpoints import weights
  from posttrain.evaluation import evaluator as evaluation
  from posttrain.rollout import driver
  from posttrain.stage import from_checkpoint

  folders = [weights.find(flags.checkpoint)]
  run, name = from_checkpoint.stage_of(
    folders[0], flags.config, flags.stage, flags.overrides
  )
  stage = run.stages[name]
  if stage.kind == 'ranking':
    raise ValueError(
      f'stage {name!r} must train a model that speaks: got a reward model; '
      "what it is right about is eval/pairs/* of its run's metrics.jsonl"
    )
  # How far the policy has drifted is known to those who train it.
  stage = dataclasses.replace(
    stage, eval=dataclasses.replace(stage.eval, kl=False)
  )
  run = dataclasses.replace(run, stages={**run.stages, name: stage})
  built, engine, load = from_checkpoint.engine(run, name, folders[0])
  if flags.against is not None:
    folders.append(_rival(flags.against, built))
  evaluator = evaluation.Evaluator(
    built.eval_tasks,
    driver.Driver(engine, built.renderer, built.capacity, stage.rollout),
  )
  found = []
  for folder in folders:
    load(folder)
    found.append(comparison.Measurement(*evaluator(), evaluator.answer_suite()))
    _check_asked(name, found[-1])
  return found[0], found[1] if len(found) > 1 else None


def _rival(path: str, built) -> str:
  """The folder of the second policy."""
  from posttrain.checkpoints import weights

  try:
    folder = weights.find(path)
    weights.check(folder, built.model, built.renderer)
  except ValueError as error:
    raise ValueError(
      '--against must name a policy of the same model and tokens: got '
      f'{path!r}; {error}'
    ) from error
  return folder


def _check_asked(name: str, found: comparison.Measurement) -> None:
  if not (found.values or found.suite):
    raise ValueError(
      f'stage {name!r} must have held-out tasks: no environment of it has; '
      f'set config.{name}.envs.NAME.env.eval_path, say'
    )


def _check_writable(path: str | None) -> None:
  """Refuses a file for the answers before any is asked for; changes none."""
  try:
    if path:
      open(path, 'a').close()
  except OSError as error:
    raise ValueError(f'--answers must be writable: {error}') from error


def main(argv: Sequence[str]) -> int:
  """Returns the exit code."""
  if '--help' in argv:
    print(__doc__)
    return 0
  try:
    flags = parse(argv)
    _check_writable(flags.answers)
    mine, theirs = measure(flags)
    print('\n'.join(comparison.table(mine, theirs)))
    print('\n'.join([*comparison.suite(mine, theirs), '']), end='')
    print(writers.dumps(comparison.to_json(mine, theirs)))
    if flags.answers:
      with open(flags.answers, 'w') as f:
        for answer in mine.answers:
          f.write(writers.dumps(dataclasses.asdict(answer)) + '\n')
  except KeyboardInterrupt:
    return 130
  except (ValueError, RuntimeError) as error:
    return errors.report(error, 'configs.', config.RECIPE_PREFIX)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
