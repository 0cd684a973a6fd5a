"""sft: the student imitates what a frozen teacher says, as it says it.

    python -m posttrain.main --config=configs/algorithms/sft.py --workdir=DIR

A teacher is trained on demonstrations without mistakes, a student on some with
mistakes; then the student imitates 128 answers a step that the teacher
samples. Measured with seed 0 on two busy cores, 250 unseen questions: sampled
answers right 0.986 of the time (teacher), 0.447 (student), 0.940 (after 60
steps); greedy 1.000, 0.840, 0.992; three minutes.
"""

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  sums = schema.EnvEntry(
    env=algorithms.SUMS,
    algorithm=schema.Sft(),
    sampler=schema.Frozen(model='stage:teacher', max_tokens=40),
  )
  return algorithms.run(
    tiny,
    teacher=algorithms.warm(tiny, 300, sums=algorithms.RIGHT),
    start=algorithms.warm(tiny, 150, sums=algorithms.SUMS),
    main=algorithms.trial(tiny, 60, prompts=128, lr=1e-3, sums=sums),
  )
