"""rloo: the mean reward of the other rollouts of the group is the baseline.

    python -m posttrain.main --config=configs/algorithms/rloo.py --workdir=DIR

grpo.py with advantages G / (G - 1) times as large, most of which the scale of
Adam's updates hides.

Expected, on 250 unseen questions, seeds 0, 1, 2: sampled 0.575, 0.552,
0.254 after the start, 0.866, 0.852, 0.442 after; greedy 0.972, 0.948, 0.576,
then 0.992, 0.976, 0.628. Two cores of an AMD EPYC: two minutes.

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
    algorithm=schema.Rloo(),
    sampler=algorithms.SAMPLER,
    group_size=8,
  ),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = algorithms.config_dict(start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config, unpruned='sums')
  return config
