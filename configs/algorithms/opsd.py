"""opsd: the policy that was shown how teaches the policy that was not.

    python -m posttrain.main --config=configs/algorithms/opsd.py --workdir=DIR

The start learns to add, from demonstrations with mistakes, and to follow a
hint. Then it samples 256 answers a step without one, and is scored as it was
at the start, with the right way in front of it. No reward is read. Measured
with seed 0 on two cores, 250 unseen questions: sampled answers right 0.565 of
the time after the start, 0.939 after; greedy 0.960, then 0.996; 284 s. With
the live policy for a teacher (reference 'policy', the default) and 64 answers
a step it fell to 0.084: who teaches and who learns then lose the way together.
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
    env=algorithms.RIGHT,
    sampler=algorithms.SAMPLED,
    algorithm=schema.Opsd(reference='init', template=HINT),
  )
  return algorithms.run(
    tiny,
    start=algorithms.warm(
      tiny, 250, row_tokens=128, sums=algorithms.SUMS, told=told
    ),
    main=algorithms.trial(tiny, 100, prompts=256, lr=7e-4, sums=sums),
  )
