"""opsd: the policy that was shown how teaches the policy that was not.

    python -m posttrain.main --config=configs/algorithms/opsd.py --workdir=DIR
"""

import dataclasses

from configs import algorithms
from posttrain import schema

HINT = 'Do it like this: {demonstration}'


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  # Reading a hint has to be learned once; large models come with it.
  told = dataclasses.replace(algorithms.SUMS, hint=HINT)
  sums = schema.EnvEntry(
      env=algorithms.RIGHT, sampler=algorithms.SAMPLED,
      algorithm=schema.Opsd(reference='init', template=HINT),
  )
  return algorithms.run(
      tiny,
      start=algorithms.warm(
          tiny, 250, row_tokens=128, sums=algorithms.SUMS, told=told
      ),
      main=algorithms.trial(
          tiny, 120, prompts=256, lr=7e-4, sums=sums
      ),
  )
