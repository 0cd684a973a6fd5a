"""sft: the student imitates what a frozen teacher says, as it says it.

    python -m posttrain.main --config=configs/algorithms/sft.py --workdir=DIR
"""

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  sums = schema.EnvEntry(
      env=algorithms.SUMS, algorithm=schema.Sft(),
      sampler=schema.Frozen(model='stage:teacher', max_tokens=40),
  )
  return algorithms.run(
      tiny,
      teacher=algorithms.warm(tiny, 300, sums=algorithms.RIGHT),
      start=algorithms.warm(tiny, 150, sums=algorithms.SUMS),
      main=algorithms.trial(
          tiny, 60, prompts=128, lr=1e-3, sums=sums
      ),
  )
