"""The command that writes preference pairs: a correct and an incorrect answer.

    python -m posttrain.make_pairs --output=pairs.jsonl \\
        --checkpoint=runs/dpo/checkpoints/sft --per_prompt=4
    python -m posttrain.make_pairs --output=pairs.jsonl \\
        --gsm8k=example_model_solutions.jsonl

With --checkpoint the policy samples answers to the training tasks of a stage.
Answers that the environment grades as correct become chosen ones, incorrect
answers rejected ones (`posttrain.rollout.pairing`). With --gsm8k the pairs come
from GSM8K's file of model solutions, without a policy.

Each line of the output is a JSON object of messages: prompt, chosen, rejected.
A stage reads the file with pairs='{"type": "file", "path": FILE}'; without one,
the DPO and reward-model stages sample their own pairs. Prints the counts of
answers and pairs.

Exit codes: 0 done, 1 environments failed too often, 2 the command line or the
config is wrong, 130 interrupted.
"""

import dataclasses
import functools
import pathlib
import sys
from typing import Any

from posttrain import schema
from posttrain.config import names
from posttrain.util import commands, watchdog


@dataclasses.dataclass
class Flags:
  """The command line."""

  output: str = commands.required('FILE', 'The JSONL file of pairs to write.')
  checkpoint: str | None = commands.flag(
    None, commands.CHECKPOINT, value='PATH'
  )
  gsm8k: str | None = commands.flag(
    None,
    "GSM8K's example_model_solutions.jsonl, in place of --checkpoint.",
    value='FILE',
  )
  config: str | None = commands.recipe()
  overrides: list[tuple[str, str]] = commands.overrides()
  trust_config: bool = commands.flag(False, commands.TRUST_CONFIG)
  stage: str | None = commands.stage()
  prompts: int = commands.option(schema.MadePairs, 'prompts')
  samples: int = commands.option(schema.MadePairs, 'samples')
  temperature: float = commands.option(schema.MadePairs, 'temperature')
  max_tokens: int = commands.option(schema.MadePairs, 'max_tokens')
  per_prompt: int = commands.option(schema.MadePairs, 'per_prompt')
  seed: int = commands.flag(0, 'The seed of tasks and sampling.')

  def __post_init__(self):
    if (self.checkpoint is None) == (self.gsm8k is None):
      raise ValueError('--checkpoint=PATH or --gsm8k=FILE must be given')
    self.pairs  # noqa: B018 - checks itself

  @property
  def pairs(self) -> schema.MadePairs:
    """The options of sampling, as a stage has them."""
    fields = ('prompts', 'samples', 'temperature', 'max_tokens', 'per_prompt')
    return schema.MadePairs(**{name: getattr(self, name) for name in fields})


PARSER = commands.Parser(Flags, __doc__, names.flag)


def make(flags: Flags) -> None:
  """Writes the file; prints a line of counts.

  Raises:
    ValueError: the flags are wrong, or weights and config do not fit.
    TooManyErrors: environments failed too often.
  """
  # Imported here so that command-line mistakes are reported without jax.
  from posttrain.data import preferences
  from posttrain.envs import gsm8k

  path = pathlib.Path(flags.output)
  path.parent.mkdir(parents=True, exist_ok=True)
  with path.open('a') as file:  # an error before any work
    is_new = not file.tell()
  if is_new:
    path.unlink()
  if flags.gsm8k is not None:
    pairs = gsm8k.read_solutions(flags.gsm8k)
    questions = {str(pair.prompt) for pair in pairs}
    counts = f'{len(pairs)} pairs of {len(questions)} questions'
  else:
    pairs, counts = _sample(flags)
  preferences.write(flags.output, pairs)
  print(f'{counts}; in {flags.output}')


@watchdog.phase('rollout', first=True)
def _sample(flags: Flags) -> tuple[list[Any], str]:
  """Samples a policy's answers; returns their pairs and a line of counts."""
  from posttrain.checkpoints import weights
  from posttrain.evaluation import evaluator
  from posttrain.rollout import pairing
  from posttrain.stage import from_checkpoint

  folder = weights.find(flags.checkpoint)
  run, name = from_checkpoint.stage_of(
    folder,
    flags.config,
    flags.stage,
    flags.overrides,
    flags.trust_config,
    max_tokens=flags.max_tokens,
  )
  stage = run.stages[name]
  if not stage.has_tasks:
    raise ValueError(
      f'config.{name}.envs must hold an environment with a ratio > 0: got '
      f'{sorted(stage.envs)}'
    )

  def drawn(data) -> dict[str, Any]:
    """Returns the environments that the stage draws tasks from."""
    return {k: env for k, env in data.envs.items() if stage.envs[k].ratio}

  def longest(renderer, data) -> int:
    """Returns the length of the longest question with its answer, in tokens."""
    return max(
      evaluator.max_episode_length(
        renderer,
        env,
        pairing.first_tasks(
          env, flags.pairs, flags.seed, stage.rollout.env_timeout
        ),
        stage.eval,
      )
      for env in drawn(data).values()
    )

  player = from_checkpoint.player(run, name, folder, longest)
  player.load(folder)
  pairs, count = pairing.make(
    drawn(player.components.data),
    player.driver,
    flags.pairs,
    flags.seed,
    stage.rollout.max_error_share,
  )
  return pairs, count.line()


# Returns the exit code; takes the arguments, None = those of the process.
main = functools.partial(PARSER.run, make)

if __name__ == '__main__':
  sys.exit(main())
