"""sft: the student imitates answers that a frozen teacher samples.

    python -m posttrain.main --config=configs/algorithms/sft.py --workdir=DIR

The teacher is trained on demonstrations without mistakes, the student on some
with mistakes, then on 128 of the teacher's answers per step.

Expected, on 250 unseen questions, means of seeds 0, 1, 2: sampled pass rate
0.437 (student), 0.935 (after 60 steps); greedy 0.815, then 0.996; the teacher
has 0.986 and 1.000 on seed 0. Two busy cores of an AMD EPYC: three minutes.
"""

from configs import algorithms, arguments
from posttrain import schema

TEACHER = algorithms.imitation(300, sums=algorithms.RIGHT_SUMS)
START = algorithms.imitation(150, sums=algorithms.SUMS)
MAIN = algorithms.trial(
  60,
  prompts=128,
  lr=1e-3,
  sums=schema.EnvEntry(
    env=algorithms.SUMS,
    algorithm=schema.Sft(),
    sampler=schema.Frozen(model='stage:teacher', max_tokens=40),
  ),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = algorithms.config_dict(teacher=TEACHER, start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config)
  return config
