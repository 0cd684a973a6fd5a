"""reward: the reward is the advantage, without a baseline.

    python -m posttrain.main --config=configs/algorithms/reward.py --workdir=DIR

Right answers become likelier, wrong ones have advantage 0.

Expected, on 250 unseen questions, seed 0: sampled pass rate 0.576 after the
start, 0.859 after; greedy 0.968, then 0.904. Two busy cores of an AMD EPYC:
three minutes.
"""

from configs import algorithms, machinery
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
  machinery.check_argument(argument, 'tiny')
  config = algorithms.config_dict(start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config)
  return config
