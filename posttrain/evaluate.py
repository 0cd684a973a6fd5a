"""The evaluation command: measures one policy, or two, on held-out tasks.

    python -m posttrain.evaluate --checkpoint=runs/gsm8k
    python -m posttrain.evaluate --checkpoint=runs/dpo \\
        --against=runs/dpo/checkpoints/sft --config.dpo.eval.prompts=200

By default the tasks and options are those of the stage that saved the
checkpoint; the keys that matter are its `eval`, `envs`, `pairs` and `rollout`.
The values of reward models on answers are not measured here: `eval/reward/*` is
in the run's metrics.jsonl.

Prints the first lines of the answers to the prompts of `eval.suite` (none with
`--config.STAGE.eval.suite=()`), a table with 95 % intervals over the tasks of
rates, rewards, NLL and token accuracy, and as the last line on stdout one JSON
object. With --against both policies answer the same tasks: the suite's
answers stand side by side, and the table adds the mean difference (first minus
second) of rates, rewards, NLL and token accuracy, with the normal 95 % interval
of the mean of the differences per task; that of the suite's values (`suite`)
has no interval.

A stage on pairs has held-out pairs beside its tasks: `accuracy` is the share of
pairs whose chosen answer has the higher reward (equal rewards count 0.5),
`margin` the mean difference of the two rewards. The rewards are those of the
reward model, or the implicit rewards of the loss, under the reference that the
first policy was trained with.

Exit codes: 0 done, 1 environments failed too often, 2 the command line or the
config is wrong, 130 interrupted.
"""

import dataclasses
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from posttrain import config
from posttrain.config import names
from posttrain.evaluation import comparison
from posttrain.metrics import writers
from posttrain.util import commands


@dataclasses.dataclass
class Flags:
  """The command line."""

  checkpoint: str = commands.checkpoint()
  against: str | None = commands.flag(
    None,
    'A second policy with the same model and tokenizer, or a second reward '
    'model, to compare with.',
    value='PATH',
  )
  config: str | None = commands.flag(
    None,
    'A recipe, whose tasks and options replace those of the run; required for '
    'a HuggingFace or PEFT directory.',
    value='FILE',
    if_absent="the run's own config",
  )
  overrides: list[tuple[str, str]] = commands.overrides()
  trust_config: bool = commands.flag(False, commands.TRUST_CONFIG)
  stage: str | None = commands.flag(
    None,
    'The stage whose tasks are answered.',
    value='NAME',
    if_absent='the stage of the checkpoint, or the last of --config',
  )
  answers: str | None = commands.flag(
    None,
    'Writes each greedy answer of the first policy, and each held-out pair, as '
    'a line of JSON.',
    value='FILE',
  )


PARSER = commands.Parser(Flags, __doc__, names.flag)


def measure(
  flags: Flags,
) -> tuple[comparison.Measurement, comparison.Measurement | None]:
  """Measures one policy or two, or reward models, on what a stage holds out.

  Returns:
    The measurement of --checkpoint, and that of --against or None.

  Raises:
    ValueError: the flags are wrong, or weights and config do not fit.
    TooManyErrors: environments failed too often.
  """
  # Imported here so that command-line mistakes are reported without jax.
  from posttrain.checkpoints import weights
  from posttrain.stage import from_checkpoint
  from posttrain.training import objectives

  folder = weights.find(flags.checkpoint)
  run, name = from_checkpoint.stage_of(
    folder, flags.config, flags.stage, flags.overrides, flags.trust_config
  )
  stage = run.stages[name]
  # The KL needs the stage's initial weights, which only training loads.
  stage = dataclasses.replace(
    stage, eval=dataclasses.replace(stage.eval, kl=False)
  )
  run = dataclasses.replace(run, stages={**run.stages, name: stage})
  if objectives.TYPES[stage.kind].generates_text:
    first, *others = _policies(run, name, folder, flags.against)
  else:
    first, *others = _reward_models(run, name, folder, flags.against)
  return first, others[0] if others else None


def _policies(
  run: Any, name: str, folder: str, against: str | None
) -> Iterator[comparison.Measurement]:
  """Measures policies on tasks, on the suite and on held-out pairs."""
  from posttrain.evaluation import evaluator as evaluation
  from posttrain.evaluation import pair_rewards
  from posttrain.stage import from_checkpoint

  player = from_checkpoint.player(run, name, folder)
  folders = [folder, *_rival(against, player.check, 'policy')]
  evaluator = evaluation.Evaluator(
    player.components.eval_tasks, player.driver, measures=player.measures()
  )
  score = _pair_scorer(run, player.components, folder)
  for path in folders:
    player.load(path)
    tasks = evaluator.measure()
    pairs = score(player.params) if score else pair_rewards.PairRewards()
    measurement = comparison.Measurement(
      pairs.metrics | tasks.metrics,
      [*tasks.answers, *pairs.answers],
      tasks.suite,
    )
    _check_tasks(name, measurement)
    yield measurement


def _pair_scorer(run: Any, components: Any, folder: str) -> Any:
  """Returns the scorer of held-out pairs; without any warns, and is None."""
  from posttrain.rollout import endpoints
  from posttrain.stage import pair_evaluation

  if components.stage.kind != 'preference':
    return None
  try:
    return pair_evaluation.Policies(run, components, folder)
  except (ValueError, endpoints.EndpointError) as error:
    warnings.warn(f'held-out pairs are not measured: {error}', stacklevel=2)
    return None


def _reward_models(
  run: Any, name: str, folder: str, against: str | None
) -> Iterator[comparison.Measurement]:
  """Measures reward models on held-out pairs."""
  from posttrain.stage import from_checkpoint, pair_evaluation

  playing = from_checkpoint.for_playing(run, name)
  components = from_checkpoint.components(playing, name)
  score = pair_evaluation.RewardModels(run, components, folder)
  for path in (folder, *_rival(against, score.check, 'reward model')):
    pairs = score(path)
    yield comparison.Measurement(pairs.metrics, [*pairs.answers], [])


# What both models must have in common.
_SAME = {
  'policy': 'of the same model and tokens',
  'reward model': 'of the same tokens',
}


def _rival(
  path: str | None, check: Callable[[str], None], kind: str
) -> list[str]:
  """Returns the folder of the second model, if any; refuses another model."""
  from posttrain.checkpoints import weights

  if path is None:
    return []
  try:
    folder = weights.find(path)
  except ValueError as error:
    raise ValueError(f'--against must name a {kind}: {error}') from error
  try:
    check(folder)
  except ValueError as error:
    raise ValueError(
      f'--against must name a {kind} {_SAME[kind]}: got '
      f'{path!r}; {error}; a {kind} with other tokens is measured by itself, '
      'as --checkpoint'
    ) from error
  return [folder]


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
