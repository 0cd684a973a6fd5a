"""opd: on-policy distillation; a teacher scores the student's tokens.

    python -m posttrain.main --config=configs/algorithms/opd.py --workdir=DIR

The teacher is trained on demonstrations without mistakes, the student on some
with mistakes; then the student samples 256 answers per step, and the teacher's
logprobs are the credit. Rewards are not read.

Expected, on 250 unseen questions, means of seeds 0, 1, 2: sampled pass rate
0.437 (student), 0.956 (after 120 steps); greedy 0.815, then 0.991; the teacher
has 0.986 and 1.000 on seed 0. Two cores of an AMD EPYC: 282 s.

Tried:
  64 answers per step, lr 5e-4, 100 steps: 0.451 to 0.640.
  256 answers per step, lr 1e-3, 60 steps: 0.742.

`--config.main.envs.sums.algorithm.reference='{"type": "endpoint", "name": ...,
"base_url": "http://127.0.0.1:8000/v1"}'` has a teacher on a server, for example
`python -m posttrain.serve --checkpoint=DIR/checkpoints/teacher`.
"""

from configs import algorithms, arguments
from posttrain import schema

TEACHER = algorithms.imitation(300, sums=algorithms.RIGHT_SUMS)
START = algorithms.imitation(150, sums=algorithms.SUMS)
MAIN = algorithms.trial(
  120,
  prompts=256,
  lr=7e-4,
  sums=schema.EnvEntry(
    env=algorithms.SUMS,
    algorithm=schema.Opd(reference='stage:teacher'),
    sampler=algorithms.SAMPLER,
  ),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = algorithms.config_dict(teacher=TEACHER, start=START, main=MAIN)
  if argument == 'tiny':
    algorithms.shrink(config)
  return config
