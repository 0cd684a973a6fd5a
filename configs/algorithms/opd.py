"""opd: a teacher scores what the student says; no reward is read.

    python -m posttrain.main --config=configs/algorithms/opd.py --workdir=DIR
"""

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  sums = schema.EnvEntry(
      env=algorithms.SUMS, sampler=algorithms.SAMPLED,
      algorithm=schema.Opd(reference='stage:teacher'),
  )
  return algorithms.run(
      tiny,
      teacher=algorithms.warm(tiny, 300, sums=algorithms.RIGHT),
      start=algorithms.warm(tiny, 150, sums=algorithms.SUMS),
      main=algorithms.trial(
          tiny, 120, prompts=256, lr=7e-4, sums=sums
      ),
  )
