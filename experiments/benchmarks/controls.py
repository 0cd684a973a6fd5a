"""What tasks that others publish give without learning: their controls.

    python -m experiments.benchmarks.controls [--questions=1000] [--seed=0]

countdown: a random expression of all numbers, each part a positive integer (as
  targets are made, with no look at the target), one per question of evaluation.
wordle: six guesses that are the same for every secret; each finds itself alone,
  so that any six words of a list are as good. And a random guesser whose
  guesses agree with all feedback, one game per secret of evaluation.
"""

import random

from absl import app, flags

from posttrain import schema
from posttrain.envs import countdown, registry, wordle

_QUESTIONS = flags.DEFINE_integer(
  'questions', 1000, 'Questions of countdown.', lower_bound=1
)
_SEED = flags.DEFINE_integer('seed', 0, 'Seed of the random answers.')


def solved_by_random_expressions(questions: int, seed: int) -> dict[int, list]:
  """Returns, by the count of numbers, whether each question was solved."""
  cfg, rng = schema.Countdown(eval_tasks=questions), random.Random(seed)
  solved: dict[int, list] = {size: [] for size in cfg.sizes}
  for task in registry.make('e', cfg).source('eval', 0).take(questions):
    drawn = None
    while drawn is None:
      drawn = countdown.draw(task.info['numbers'], rng.randrange)
    solved[task.info['size']].append(drawn[0] == task.answer)
  return solved


def guesses_of_a_consistent_guesser(seed: int) -> list[int]:
  """Returns the guesses of a game per secret of evaluation."""
  env, rng = (
    wordle.Wordle('e', schema.Wordle(eval_tasks=128)),
    random.Random(seed),
  )
  return [
    len(list(wordle.consistent_game(x.answer, env.words, rng)))
    for x in env.source('eval', 0).take(128)
  ]


def main(_) -> None:
  seed = _SEED.value
  for size, solved in solved_by_random_expressions(
    _QUESTIONS.value, seed
  ).items():
    print(
      f'countdown, {size} numbers, a random valid expression: '
      f'{sum(solved) / len(solved):.3f} of {len(solved)} questions, seed {seed}'
    )
  held_out = 128
  print(
    f'wordle, the best fixed six guesses: {6 / held_out:.3f} of {held_out} '
    f'secrets of evaluation; of all {len(wordle.WORDS)} words '
    f'{6 / len(wordle.WORDS):.3f}'
  )
  games = guesses_of_a_consistent_guesser(seed)
  within = [x <= 6 for x in games]
  print(
    f'wordle, a random consistent guesser: {sum(within) / len(within):.3f} of '
    f'{len(games)} secrets of evaluation in six guesses, '
    f'{sum(games) / len(games):.2f} guesses in the mean, seed {seed}'
  )


if __name__ == '__main__':
  app.run(main)
