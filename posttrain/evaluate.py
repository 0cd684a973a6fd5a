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
import functools
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from posttrain.config import names
from posttrain.evaluation import comparison
from posttrain.metrics import writers
from posttrain.util import commands, watchdog


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
  config: str | None = commands.recipe()
  overrides: list[tuple[str, str]] = commands.overrides()
  trust_config: bool = commands.flag(False, commands.TRUST_CONFIG)
  stage: str | None = commands.stage()
  answers: str | None = commands.flag(
    None,
    'Writes each greedy answer of the first policy, and each held-out pair, as '
    'a line of JSON.',
    value='FILE',
  )


PARSER = commands.Parser(Flags, __doc__, names.flag)


@watchdog.phase('eval', first=True)
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
    folder,
    flags.config,
    flags.stage,
    flags.overrides,
    flags.trust_config,
    kl=False,  # it needs the stage's initial weights, which only training loads
  )
  kind = objectives.TYPES[run.stages[name].kind]
  all_measured = _policies if kind.generates_text else _reward_models
  first, *others = all_measured(run, name, folder, flags.against)
  return first, others[0] if others else None


def _policies(
  run: Any, name: str, folder: str, against: str | None
) -> Iterator[comparison.Measurement]:
  """Measures policies on tasks, on the suite and on held-out pairs."""
  from posttrain.evaluation import evaluator
  from posttrain.rollout import endpoints
  from posttrain.stage import from_checkpoint

  player = from_checkpoint.player(run, name, folder)
  components = player.components
  folders = [folder, *_rival(against, player.check)]
  tasks_of = evaluator.Evaluator(
    components.eval_tasks, player.driver, player.measures()
  )
  print(
    f'evaluates with at most {tasks_of.most_tokens():,} sampled tokens; '
    f'config.{name}.eval.prompts and config.{name}.eval.max_tokens bound them',
    file=sys.stderr,
  )
  pairs_of = None
  if components.stage.kind == 'preference':
    try:
      pairs_of = from_checkpoint.Policies(run, components, folder)
    except (ValueError, endpoints.EndpointError) as error:
      warnings.warn(f'held-out pairs are not measured: {error}', stacklevel=2)
  for path in folders:
    player.load(path)
    tasks = tasks_of.measure()
    pairs = [] if pairs_of is None else pairs_of(player.params)
    values = from_checkpoint.pair_metrics(pairs) | tasks.metrics
    if not (values or tasks.suite):
      raise ValueError(
        f'config.{name}.envs must have held-out tasks: got none; set '
        'NAME.env.eval_path, for example'
      )
    answers = [*tasks.answers, *pairs]
    yield comparison.Measurement(values, answers, tasks.suite)


def _reward_models(
  run: Any, name: str, folder: str, against: str | None
) -> Iterator[comparison.Measurement]:
  """Measures reward models on held-out pairs."""
  from posttrain.stage import from_checkpoint

  components = from_checkpoint.components(run, name)
  rewards = from_checkpoint.RewardModels(run, components, folder)
  for path in (folder, *_rival(against, rewards.check)):
    pairs = rewards(path)
    yield comparison.Measurement(from_checkpoint.pair_metrics(pairs), pairs, [])


def _rival(path: str | None, check: Callable[[str], None]) -> list[str]:
  """Returns the folder of the second model, if any; `check` refuses others."""
  from posttrain.checkpoints import weights

  if path is None:
    return []
  try:
    folder = weights.find(path)
    check(folder)
  except ValueError as error:
    raise ValueError(
      f'--against must fit the model and the tokens of --checkpoint: {error}'
    ) from error
  return [folder]


def _run(flags: Flags) -> None:
  if flags.answers:
    open(flags.answers, 'a').close()  # fails before anything is measured
  first, second = measure(flags)
  print('\n'.join(comparison.text(first, second)))
  print(writers.dumps(comparison.to_json(first, second)))
  if flags.answers:
    with open(flags.answers, 'w') as f:
      for answer in first.answers:
        f.write(writers.dumps(dataclasses.asdict(answer)) + '\n')


# Returns the exit code; takes the arguments, None = those of the process.
main = functools.partial(PARSER.run, _run)

if __name__ == '__main__':
  sys.exit(main())
