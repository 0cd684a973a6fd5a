"""max_rl: what is solved rarely weighs more; made for hard questions.

    python -m posttrain.main --config=configs/algorithms/max_rl.py --workdir=DIR
"""

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  sums = schema.EnvEntry(
      env=algorithms.SUMS, sampler=algorithms.SAMPLED, group_size=8,
      algorithm=schema.MaxRl(prune_zero_advantage=not tiny),
  )
  return algorithms.run(
      tiny,
      # So little of it that most questions are hard.
      start=algorithms.warm(tiny, 80, sums=algorithms.SUMS),
      main=algorithms.trial(tiny, 80, prompts=32, lr=3e-4, sums=sums),
  )
