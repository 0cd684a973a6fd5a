"""ppo: the values of a critic are the baseline, per token.

    python -m posttrain.main --config=configs/algorithms/ppo.py --workdir=DIR

As grpo.py, with a critic of the policy's size that begins as the policy and
learns alone for the first steps. --config.main.critic.kind=head puts a linear
head on the policy's trunk instead.
"""

import dataclasses

from configs import algorithms, arguments
from posttrain import schema

START = algorithms.imitation(150, sums=algorithms.SUMS)
MAIN = dataclasses.replace(
  algorithms.trial(
    100,
    prompts=64,
    sums=schema.EnvEntry(
      env=algorithms.SUMS,
      algorithm=schema.Ppo(),
      sampler=algorithms.SAMPLER,
      group_size=8,
    ),
  ),
  loss=schema.Loss(rl=schema.Clip(high=0.2)),
  critic=schema.Critic(kind='model', lr=5e-4, warmup_steps=10),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = algorithms.config_dict(start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config)
    config.main.critic.warmup_steps = 1
  return config
