"""SFT, then a reward model of the policy's own answers, on a laptop.

    python -m posttrain.main --config=configs/arithmetic_reward_model.py \\
        --workdir=DIR

A policy like that of arithmetic_dpo.py, but of additions up to 49, answers
training questions 16 times each; a copy of it, whose head is a number, learns
which of two answers to a question was right. `eval/pairs/rewards/accuracies` is
how often it is right about pairs of questions of which it was shown none. (It
read the questions in SFT, with mistakes in three demonstrations of ten.)

`:tiny` runs every part of it in seconds and learns next to nothing.
"""

from configs import common
from posttrain import schema


def get_config(argument: str = ''):
  if argument not in ('', 'tiny'):
    raise ValueError(f"the argument must be '' or 'tiny': got {argument!r}")
  tiny = argument == 'tiny'

  # First by example: a policy that is right about half of the time.
  sft = common.arithmetic_sft(tiny, sums=True)
  # Then which of two of its answers was right.
  rm = common.arithmetic_reward_model(tiny, sft)
  run = schema.Run(
    model=schema.PRESETS['tiny' if tiny else 'small'],
    checkpoint=schema.Checkpoint(every=10 if tiny else 100),
    stages={'sft': sft, 'rm': rm},
  )
  return common.get_config(run)
