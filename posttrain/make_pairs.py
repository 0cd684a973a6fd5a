"""Makes preferences: a right and a wrong answer to each of many questions.

    python -m posttrain.make_pairs --output=FILE --checkpoint=PATH
        [--stage=NAME] [--config=FILE[:ARGUMENT]] [--config.KEY=VALUE ...]
        [--prompts=1000] [--samples=8] [--temperature=1.0] [--max_tokens=64]
        [--per_prompt=1] [--seed=0]
    python -m posttrain.make_pairs --output=FILE --gsm8k=SOLUTIONS

PATH is as for posttrain.evaluate, and so are --stage and --config: the policy
answers training tasks of that stage's environments, as often as --samples says,
and what they grade as right is chosen, what they grade as wrong is rejected
(`posttrain.rollout.pairing`). SOLUTIONS is GSM8K's file
`example_model_solutions.jsonl`.

FILE gets a line of JSON per pair: prompt, chosen and rejected, as messages. A
stage takes it by pairs='{"type": "file", "path": FILE}'; DPO and reward models
of this package make such a file by themselves where they are not given one.
Prints what became of the answers. Exit codes: 0 done, 1 environments failed
too often, 2 the command is wrong, 130 interrupted.
"""

import dataclasses
import sys
from collections.abc import Sequence

from posttrain import schema
from posttrain.config import load as config
from posttrain.util import errors

PLAIN = ('output', 'checkpoint', 'gsm8k', 'stage', 'config', 'seed')
MADE = ('prompts', 'samples', 'temperature', 'max_tokens', 'per_prompt')


@dataclasses.dataclass
class Flags:
  """The command line."""

  output: str = ''
  checkpoint: str | None = None
  gsm8k: str | None = None
  stage: str | None = None
  config: str | None = None
  seed: int = 0
  overrides: list[tuple[str, str]] = dataclasses.field(default_factory=list)
  pairs: schema.MadePairs = schema.MadePairs()


def parse(argv: Sequence[str]) -> Flags:
  """Reads the command line; ValueError names the argument that is wrong."""
  flags, made = Flags(), {}
  for argument in argv:
    name, _, value = argument.removeprefix('--').partition('=')
    if argument.startswith('--config.') and value:
      flags.overrides.append((name.removeprefix('config.'), value))
    elif argument.startswith('--') and value and name in (*PLAIN, *MADE):
      kind = (
        type(getattr(flags.pairs, name))
        if name in MADE
        else (int if name == 'seed' else str)
      )
      try:
        read = kind(value)
      except ValueError:
        raise ValueError(
          f'--{name} must be of type {kind.__name__}: got {value!r}'
        ) from None
      if name in MADE:
        made[name] = read
      else:
        setattr(flags, name, read)
    else:
      expected = ', '.join(f'--{known}=...' for known in (*PLAIN, *MADE))
      raise ValueError(
        f'arguments must be of {expected} or --config.KEY=VALUE: got '
        f'{argument!r}'
      )
  _check_given(flags, argv)
  try:
    flags.pairs = schema.MadePairs(**made)
  except schema.FieldError as error:
    raise ValueError(f'--{error.field} {error.detail}') from None
  return flags


def _check_given(flags: Flags, argv: Sequence[str]) -> None:
  """Refuses what is missing, and what nothing would read."""
  if not flags.output:
    raise ValueError('--output=FILE must be given')
  if (flags.checkpoint is None) == (flags.gsm8k is None):
    raise ValueError('--checkpoint=PATH or --gsm8k=FILE must be given')
  unread = [x for x in argv if not x.startswith(('--output=', '--gsm8k='))]
  if flags.gsm8k is not None and unread:
    raise ValueError(
      '--gsm8k=FILE must be given with --output=FILE alone: got '
      f'{" ".join(unread)} too; nothing reads that, as no policy is asked'
    )


def make(flags: Flags) -> str:
  """Writes the file; returns what people read.

  Raises:
    ValueError: the command is wrong, or weights and config do not fit.
    TooManyErrors: of environments.
  """
  # Late, so that a mistake in the command line is answered at once.
  from posttrain.data import preferences
  from posttrain.envs import gsm8k_solutions

  try:
    preferences.check_writable(flags.output)
  except OSError as error:
    raise ValueError(f'--output must be writable: {error}') from error
  if flags.gsm8k is not None:
    made = gsm8k_solutions.read(flags.gsm8k)
    asked = {str(pair.prompt) for pair in made}
    line = f'{len(made)} pairs of {len(asked)} questions'
  else:
    made, line = _ask(flags)
  preferences.write(flags.output, made)
  return f'{line}; in {flags.output}'


def _ask(flags: Flags):
  """Pairs of what the policy of a checkpoint answers, and what became of it."""
  from posttrain.checkpoints import weights
  from posttrain.rollout import driver, pairing
  from posttrain.stage import from_checkpoint

  folder = weights.find(flags.checkpoint)
  run, name = from_checkpoint.stage_of(
    folder, flags.config, flags.stage, flags.overrides
  )
  stage = run.stages[name]
  stage = dataclasses.replace(
    stage,
    eval=dataclasses.replace(stage.eval, max_tokens=flags.pairs.max_tokens),
  )
  run = dataclasses.replace(run, stages={**run.stages, name: stage})
  built, engine, load = from_checkpoint.engine(
    run, name, folder, _room(run, name, flags)
  )
  load(folder)
  made, count = pairing.make(
    {k: env for k, env in built.envs.items() if stage.envs[k].ratio},
    driver.Driver(engine, built.renderer, built.capacity, stage.rollout),
    flags.pairs,
    flags.seed,
    stage.rollout.max_errors,
  )
  return made, count.line()


def _room(run: schema.Run, name: str, flags: Flags) -> int:
  """Tokens of the longest question that will be asked, and its answer."""
  from posttrain import envs
  from posttrain.chat import renderer as chat
  from posttrain.evaluation import evaluator
  from posttrain.rollout import pairing

  stage, renderer = run.stages[name], chat.load(run.tokenizer)
  made = [
    envs.make(key, entry.env)
    for key, entry in stage.envs.items()
    if entry.ratio
  ]
  return max(
    (
      evaluator.max_episode_length(
        renderer, env, pairing.asked(env, flags.pairs, flags.seed), stage.eval
      )
      for env in made
    ),
    default=0,
  )


def main(argv: Sequence[str]) -> int:
  """Returns the exit code."""
  if '--help' in argv:
    print(__doc__)
    return 0
  try:
    print(make(parse(argv)))
  except KeyboardInterrupt:
    return 130
  except (ValueError, RuntimeError) as error:
    return errors.report(error, 'configs.', config.RECIPE_PREFIX)
  return 0


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
