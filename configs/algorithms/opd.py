"""opd: a teacher scores what the student says; no reward is read.

    python -m posttrain.main --config=configs/algorithms/opd.py --workdir=DIR

A teacher is trained on demonstrations without mistakes, a student on some with
mistakes; then the student samples 256 answers a step, and the teacher scores
their tokens. Measured with seed 0 on two cores, 250 unseen questions:
sampled answers right 0.986 of the time (teacher), 0.447 (student), 0.967
(after 120 steps); greedy 1.000, 0.840, 0.996; 282 s.

`--config.main.envs.sums.algorithm.reference='{"type": "endpoint", "name": ...,
"base_url": "http://127.0.0.1:8000/v1"}'` takes a teacher that a server holds,
for example `python -m posttrain.serve --checkpoint=DIR/checkpoints/teacher`.
"""

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  sums = schema.EnvEntry(
    env=algorithms.SUMS,
    sampler=algorithms.SAMPLED,
    algorithm=schema.Opd(reference='stage:teacher'),
  )
  return algorithms.run(
    tiny,
    teacher=algorithms.warm(tiny, 300, sums=algorithms.RIGHT),
    start=algorithms.warm(tiny, 150, sums=algorithms.SUMS),
    main=algorithms.trial(tiny, 120, prompts=256, lr=7e-4, sums=sums),
  )
