"""reward: the reward is the advantage, without a baseline.

    python -m posttrain.main --config=configs/algorithms/reward.py --workdir=DIR

Right answers become likelier, wrong ones have advantage 0.

Expected, on 250 unseen questions, seeds 0, 1, 2: sampled 0.575, 0.552,
0.254 after the start, 0.913, 0.903, 0.483 after; greedy 0.972, 0.948, 0.576,
then 0.988, 0.992, 0.676. Two cores of an AMD EPYC: two minutes.

Tried: see grpo.py, whose 64 questions are twice as many as here.
"""

from configs import algorithms, arguments
from posttrain import schema

START = algorithms.imitation(150, sums=algorithms.SUMS)
MAIN = algorithms.trial(
  100,
  prompts=32,
  sums=schema.EnvEntry(
    env=algorithms.SUMS,
    # Without pruning, wrong answers count in the mean over tokens: the update
    # is smaller where fewer answers are right.
    algorithm=schema.Reward(prune_zero_advantage=False),
    sampler=algorithms.SAMPLER,
    group_size=8,
  ),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = algorithms.config_dict(start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config)
  return config
