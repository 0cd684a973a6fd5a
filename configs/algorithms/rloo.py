"""rloo: the mean reward of the other rollouts of the group is the baseline.

    python -m posttrain.main --config=configs/algorithms/rloo.py --workdir=DIR

grpo.py with advantages G / (G - 1) times as large, most of which the scale of
Adam's updates hides.

Expected: pass rates not measured. Two cores: three minutes.
"""

from configs import algorithms, machinery
from posttrain import schema

START = algorithms.imitation(150, sums=algorithms.SUMS)
MAIN = algorithms.trial(
  100,
  prompts=32,
  sums=schema.EnvEntry(
    env=algorithms.SUMS,
    algorithm=schema.Rloo(),
    sampler=algorithms.SAMPLER,
    group_size=8,
  ),
)


def get_config(argument: str = ''):
  machinery.check_argument(argument, 'tiny')
  config = algorithms.config_dict(start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config)
    # No answer is right: with pruning, no token would train.
    config.main.envs.sums.algorithm.prune_zero_advantage = False
  return config
