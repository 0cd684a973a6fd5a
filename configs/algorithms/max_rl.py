"""max_rl: what is solved rarely weighs more; made for hard questions.

    python -m posttrain.main --config=configs/algorithms/max_rl.py --workdir=DIR

A start that is right a quarter of the time, then 60 steps of 32 questions x 16
answers. Measured with seed 0 on two busy cores, 250 unseen questions, sampled
/ greedy / any of 8: 0.247 / 0.540 / 0.752 after the start, 0.427 / 0.628 /
0.856 after; with `--config.main.envs.differences.algorithm=grpo` 0.435 / 0.572
/ 0.788: as many right answers, to fewer of the questions. Five minutes.
"""

from configs import algorithms
from posttrain import schema


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)
  hard = schema.EnvEntry(
    env=algorithms.DIFFERENCES,
    sampler=algorithms.SAMPLED,
    group_size=16,
    algorithm=schema.MaxRl(prune_zero_advantage=not tiny),
  )
  return algorithms.run(
    tiny,
    start=algorithms.warm(
      tiny, 200, sums=algorithms.SUMS, differences=algorithms.DIFFERENCES
    ),
    main=algorithms.trial(tiny, 60, prompts=32, lr=2e-4, differences=hard),
  )
