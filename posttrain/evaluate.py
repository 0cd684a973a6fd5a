"""The evaluation command: measures one policy, or two, on held-out tasks.

    python -m posttrain.evaluate --checkpoint=runs/gsm8k
    python -m posttrain.evaluate --checkpoint=runs/dpo \\
        --against=runs/dpo/checkpoints/sft --config.dpo.eval.prompts=200

By default the tasks and options are those of the stage that saved the
checkpoint; the keys that matter are its `eval`, `envs` and `rollout`. Held-out
pairs and the values of reward models are not measured here: `eval/pairs/*` and
`eval/reward/*` are in the run's metrics.jsonl.

Prints the first lines of the answers to the prompts of `eval.suite` (none with
`--config.STAGE.eval.suite=()`), a table with 95 % intervals over the tasks of
rates, rewards, NLL and token accuracy, and as the last line on stdout one JSON
object. With --against both policies answer the same tasks: the suite's
answers stand side by side, and the table adds the mean difference (first minus
second) of rates, rewards, NLL and token accuracy, with the normal 95 % interval
of the mean of the differences per task; that of the suite's values (`suite`)
has no interval.

Exit codes: 0 done, 1 environments failed too often, 2 the command line or the
config is wrong, 130 interrupted.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any

from posttrain.config import hints
from posttrain.config import load as config
from posttrain.evaluation import comparison
from posttrain.metrics import writers
from posttrain.util import flags as flags_lib


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = flags_lib.checkpoint()
  against: str | None = flags_lib.flag(
    None,
    'A second policy with the same model and tokenizer, to compare with.',
    value='PATH',
  )
  config: str | None = flags_lib.flag(
    None,
    'A recipe, whose tasks and options replace those of the run; required for '
    'a HuggingFace or PEFT directory.',
    value='FILE',
    if_absent="the run's own config",
  )
  overrides: list[tuple[str, str]] = flags_lib.overrides()
  trust_config: bool = flags_lib.flag(False, flags_lib.TRUST_CONFIG)
  stage: str | None = flags_lib.flag(
    None,
    'The stage whose tasks are answered.',
    value='NAME',
    if_absent='the stage of the checkpoint, or the last of --config',
  )
  answers: str | None = flags_lib.flag(
    None,
    'Writes each greedy answer of the first policy as a line of JSON.',
    value='FILE',
  )


PARSER = flags_lib.Parser(Flags, __doc__, hints.flag)


def measure(
  flags: Flags,
) -> tuple[comparison.Measurement, comparison.Measurement | None]:
  """Measures one policy or two on the tasks of a stage.

  Returns:
    The measurement of --checkpoint, and that of --against or None.

  Raises:
    ValueError: the flags are wrong, or weights and config do not fit.
    TooManyErrors: environments failed too often.
  """
  # Imported here so that command-line mistakes are reported without jax.
  from posttrain.checkpoints import weight_folders
  from posttrain.evaluation import evaluator as evaluation
  from posttrain.stage import from_checkpoint
  from posttrain.training import objectives

  folders = [weight_folders.find(flags.checkpoint)]
  run, name = from_checkpoint.stage_of(
    folders[0], flags.config, flags.stage, flags.overrides, flags.trust_config
  )
  stage = run.stages[name]
  if not objectives.TYPES[stage.kind].generates_text:
    raise ValueError(
      f'stage {name!r} must train a policy: got a reward model; its accuracy '
      "is eval/pairs/* in the run's metrics.jsonl"
    )
  # The KL needs the stage's initial weights, which only training loads.
  stage = dataclasses.replace(
    stage, eval=dataclasses.replace(stage.eval, kl=False)
  )
  run = dataclasses.replace(run, stages={**run.stages, name: stage})
  player = from_checkpoint.player(run, name, folders[0])
  if flags.against is not None:
    folders.append(_rival(flags.against, player))
  evaluator = evaluation.Evaluator(
    player.components.eval_tasks, player.driver, measures=player.measures()
  )
  measurements = []
  for folder in folders:
    player.load(folder)
    values, answers, _ = evaluator.measure()
    suite_values, suite = evaluator.answer_suite()
    measurements.append(
      comparison.Measurement(values | suite_values, answers, suite)
    )
    _check_tasks(name, measurements[-1])
  return measurements[0], measurements[1] if len(measurements) > 1 else None


def _rival(path: str, player: Any) -> str:
  """Returns the folder of the second policy; refuses another model."""
  from posttrain.checkpoints import weight_folders

  try:
    folder = weight_folders.find(path)
  except ValueError as error:
    raise ValueError(f'--against must name a policy: {error}') from error
  try:
    player.check(folder)
  except ValueError as error:
    raise ValueError(
      '--against must name a policy of the same model and tokens: got '
      f'{path!r}; {error}; a policy with other tokens is measured by itself, '
      'as --checkpoint'
    ) from error
  return folder


def _check_tasks(name: str, measurement: comparison.Measurement) -> None:
  if not (measurement.values or measurement.suite):
    raise ValueError(
      f'stage {name!r} must have held-out tasks: got none in any environment; '
      f'set config.{name}.envs.NAME.env.eval_path, for example'
    )


def _check_writable(path: str | None) -> None:
  """Checks that the file of answers can be written, without changing it."""
  try:
    if path:
      open(path, 'a').close()
  except OSError as error:
    raise ValueError(f'--answers must be writable: {error}') from error


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command; returns the exit code. `argv=None`: the process's."""
  return PARSER.run(_run, argv, 'configs.', config.RECIPE_PREFIX)


def _run(flags: Flags) -> None:
  _check_writable(flags.answers)
  first, second = measure(flags)
  print('\n'.join(comparison.text(first, second)))
  print(writers.dumps(comparison.to_json(first, second)))
  if flags.answers:
    with open(flags.answers, 'w') as f:
      for answer in first.answers:
        f.write(writers.dumps(dataclasses.asdict(answer)) + '\n')


if __name__ == '__main__':
  sys.exit(main())
