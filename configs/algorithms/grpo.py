"""grpo: the mean reward of the group is the baseline.

    python -m posttrain.main --config=configs/algorithms/grpo.py --workdir=DIR

A start that imitates mistakes, then 60 steps of 32 questions x 8 answers.
Measured with seed 0 on two busy cores, 250 unseen questions, 8 sampled answers
each: right 0.576 of the time after the start, 0.716 after; greedy 0.968, then
0.820; three minutes. `configs/arithmetic.py` goes further, with more of
everything.
"""

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  sums = schema.EnvEntry(
    env=algorithms.SUMS,
    sampler=algorithms.SAMPLED,
    group_size=8,
    # No answer of the tiny one is right: pruned, nothing would be left.
    algorithm=schema.Grpo(prune_zero_advantage=not tiny),
  )
  return algorithms.run(
    tiny,
    start=algorithms.warm(tiny, 150, sums=algorithms.SUMS),
    main=algorithms.trial(tiny, 60, prompts=32, sums=sums),
  )
