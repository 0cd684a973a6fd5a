"""grpo: the mean reward of the group is the baseline.

    python -m posttrain.main --config=configs/algorithms/grpo.py --workdir=DIR

SFT on demonstrations with mistakes, then 60 steps of 32 questions x 8 answers.

Expected, on 250 unseen questions, seed 0: sampled pass rate 0.576 after the
start, 0.716 after; greedy 0.968, then 0.820. Two busy cores of an AMD EPYC:
three minutes. configs/arithmetic.py trains longer, on larger batches.
"""

from configs import algorithms, machinery
from posttrain import schema

START = algorithms.imitation(150, sums=algorithms.SUMS)
MAIN = algorithms.trial(
  100,
  prompts=32,
  sums=schema.EnvEntry(
    env=algorithms.SUMS,
    algorithm=schema.Grpo(),
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
