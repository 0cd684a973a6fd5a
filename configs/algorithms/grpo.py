"""grpo: the mean reward of the group is the baseline.

    python -m posttrain.main --config=configs/algorithms/grpo.py --workdir=DIR

SFT on demonstrations with mistakes, then 100 steps of 64 questions x 8 answers.

Expected, on 250 unseen questions, seeds 0, 1, 2: sampled 0.573, 0.555,
0.252 after the start, 0.916, 0.895, 0.545 after; greedy 0.968, 0.948, 0.576,
then 0.992, 0.992, 0.728. Two cores of an AMD EPYC: four minutes.
configs/arithmetic.py trains longer, on larger batches.

Tried (experiments/results/learning.md):
  32 questions, the recipe until 2026-11-25, for half the CPU seconds: sampled
    0.871, 0.856, 0.432, greedy 0.988, 0.992, 0.652. The same with
    `scale_rewards=group`, `kl_beta` 0.001 or 0.01, averaged weights: no
    difference. Without decay: greedy 0.964, 0.908, 0.664.
  lr 5e-4, 60 steps: sampled 0.785, 0.794, 0.127, greedy 0.888, 0.868, 0.164:
    Adam's steps on the noise of 256 answers unlearn what the start knew; also
    with averaged weights (0.95), seed 0: 0.754, 0.872.
  lr 2e-4, 60 steps, seeds 0 and 2: sampled 0.843, 0.386, greedy 0.968, 0.532.
"""

from configs import algorithms, arguments
from posttrain import schema

START = algorithms.imitation(150, sums=algorithms.SUMS)
MAIN = algorithms.trial(
  100,
  prompts=64,
  sums=schema.EnvEntry(
    env=algorithms.SUMS,
    algorithm=schema.Grpo(),
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
