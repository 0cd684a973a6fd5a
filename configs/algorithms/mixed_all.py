"""All algorithms at once; names and, on two seeds of three, greedy sums fall.

    python -m posttrain.main --config=configs/algorithms/mixed_all.py \\
        --workdir=DIR

Sums by grpo, max_rl, reward, custom, opd, opsd and sft, names to sort by echo.
The train step reads the streams alone, whichever algorithm wrote them.

Expected, on 250 unseen sums, seeds 0, 1, 2, mean of the seven environments:
sampled pass rate 0.574, 0.576, 0.441 after the start, 0.757, 0.728, 0.539 after
60 steps; greedy 0.976, 0.968, 0.848, then 0.968, 0.984, 0.804; names, sampled,
0.578, 0.514, 0.476, then 0.550, 0.495, 0.462 (see echo.py). Two busy cores of
an AMD EPYC: ten minutes, half of them for the teacher, the start, and eight
evaluations.

Tried, lr 2e-4, seeds 0, 1, 2: sampled 0.804, 0.750, 0.540; greedy 0.980, 0.968,
  0.848, then 0.964, 0.968, 0.740; names, sampled, 0.580, 0.514, 0.476, then
  0.508, 0.462, 0.449.
"""

import dataclasses

from configs import algorithms, arguments
from posttrain import schema

HINT = 'Do it like this: {demonstration}'
HINTED = dataclasses.replace(algorithms.RIGHT_SUMS, hint=HINT)
NAMES = schema.AlphabetSort(
  turns=2, first=2, more=1, role='tool', train_tasks=1000, eval_tasks=250
)
# Rollouts of sums: groups of four, or one rollout each of more tasks.
GROUPS = schema.EnvEntry(
  env=algorithms.SUMS, sampler=algorithms.SAMPLER, group_size=4
)
SINGLES = schema.EnvEntry(
  env=algorithms.SUMS, sampler=algorithms.SAMPLER, ratio=4.0
)

TEACHER = algorithms.imitation(
  300, row_tokens=128, sums=algorithms.RIGHT_SUMS, told=HINTED, names=NAMES
)
START = algorithms.imitation(
  250, row_tokens=128, sums=algorithms.SUMS, names=NAMES
)
MAIN = algorithms.trial(
  60,
  prompts=128,
  row_tokens=128,
  grpo=dataclasses.replace(GROUPS, algorithm=schema.Grpo()),
  max_rl=dataclasses.replace(GROUPS, algorithm=schema.MaxRl()),
  reward=dataclasses.replace(
    GROUPS, algorithm=schema.Reward(prune_zero_advantage=False)
  ),
  custom=dataclasses.replace(
    GROUPS,
    algorithm=schema.Custom(
      import_path='configs.algorithms.custom:centered', kwargs={'price': 0.002}
    ),
  ),
  echo=schema.EnvEntry(
    env=NAMES,
    algorithm=schema.Echo(roles={'tool': schema.EchoRole(alpha=0.01)}),
    sampler=algorithms.SAMPLER,
    group_size=4,
  ),
  opd=dataclasses.replace(
    SINGLES, algorithm=schema.Opd(reference='stage:teacher')
  ),
  opsd=dataclasses.replace(
    SINGLES, algorithm=schema.Opsd(template=HINT, reference='stage:teacher')
  ),
  sft=dataclasses.replace(
    SINGLES,
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
