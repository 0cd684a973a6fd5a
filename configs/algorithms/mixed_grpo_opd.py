"""Two environments, two algorithms: sums by grpo, differences by opd.

    python -m posttrain.main --config=configs/algorithms/mixed_grpo_opd.py \\
        --workdir=DIR

A teacher of differences is trained, a start on both with mistakes; then every
step has some 32 sums x 8 answers, learned from by their rewards, and 128
differences, by the teacher's word. Measured with seed 0 on two busy cores, 250
unseen questions each, sampled: sums 0.413 after the start, 0.526 after;
differences 0.247, then 0.564; six minutes.
"""

import dataclasses

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  sums = schema.EnvEntry(
    env=algorithms.SUMS,
    sampler=algorithms.SAMPLED,
    group_size=8,
    algorithm=schema.Grpo(prune_zero_advantage=not tiny),
  )
  differences = schema.EnvEntry(
    env=algorithms.DIFFERENCES,
    sampler=algorithms.SAMPLED,
    # One answer each, so that four times as many cost half as much.
    algorithm=schema.Opd(reference='stage:teacher'),
    ratio=4.0,
  )
  known = dataclasses.replace(algorithms.DIFFERENCES, mistakes=0.0)
  return algorithms.run(
    tiny,
    teacher=algorithms.warm(tiny, 300, differences=known),
    start=algorithms.warm(
      tiny, 200, sums=algorithms.SUMS, differences=algorithms.DIFFERENCES
    ),
    main=algorithms.trial(
      tiny, 80, prompts=160, sums=sums, differences=differences
    ),
  )
