"""max_rl: what is solved rarely weighs more; made for hard questions.

    python -m posttrain.main --config=configs/algorithms/max_rl.py --workdir=DIR
"""

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  hard = schema.EnvEntry(
      env=algorithms.DIFFERENCES, sampler=algorithms.SAMPLED, group_size=16,
      algorithm=schema.MaxRl(prune_zero_advantage=not tiny),
  )
  return algorithms.run(
      tiny,
      start=algorithms.warm(
          tiny, 200, sums=algorithms.SUMS, differences=algorithms.DIFFERENCES
      ),
      main=algorithms.trial(tiny, 60, prompts=32, lr=2e-4, differences=hard),
  )
