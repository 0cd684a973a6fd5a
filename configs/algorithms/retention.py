"""Sums by grpo, while opd on the start's own logprobs holds the differences.

    python -m posttrain.main --config=configs/algorithms/retention.py \\
        --workdir=DIR

A start on sums and differences; then every step has 32 sums x 8 answers, with
their rewards as credit, and 32 differences x 1 answer, which opd keeps near
the start (reference `init`).

Expected, on 250 unseen questions each, mean of seeds 0, 1, 2, greedy:
differences 0.468 after the start, 0.471 after; sums 0.733, then 0.783; sampled,
sums 0.339, then 0.524. Two busy cores of an AMD EPYC: five minutes.

Tried: differences only evaluated (`--config.main.envs.differences.ratio=0.0
  --config.main.batch.prompts_per_step=32`): differences greedy 0.335, lower on
  each seed; sums greedy 0.781, sampled 0.558.
"""

from configs import algorithms, arguments
from posttrain import schema

START = algorithms.imitation(
  200, sums=algorithms.SUMS, differences=algorithms.DIFFERENCES
)
MAIN = algorithms.trial(
  100,
  prompts=64,
  sums=schema.EnvEntry(
    env=algorithms.SUMS,
    algorithm=schema.Grpo(),
    sampler=algorithms.SAMPLER,
    group_size=8,
  ),
  differences=schema.EnvEntry(
    env=algorithms.DIFFERENCES,
    algorithm=schema.Opd(reference='init', weight=0.3),
    sampler=algorithms.SAMPLER,
  ),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = algorithms.config_dict(start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config, unpruned='sums')
  return config
