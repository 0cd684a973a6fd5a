"""rloo: the mean reward of the others is the baseline.

    python -m posttrain.main --config=configs/algorithms/rloo.py --workdir=DIR

As grpo.py, with advantages G / (G - 1) times as large; the optimizer's scale
hides most of that. Three minutes on two cores.
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
    algorithm=schema.Rloo(prune_zero_advantage=not tiny),
  )
  return algorithms.run(
    tiny,
    start=algorithms.warm(tiny, 150, sums=algorithms.SUMS),
    main=algorithms.trial(tiny, 60, prompts=32, sums=sums),
  )
