"""All algorithms in one run, mixed in every batch; the trainer sees streams.

    python -m posttrain.main --config=configs/algorithms/mixed_all.py \\
        --workdir=DIR

Sums by grpo, max_rl, reward, custom, opd, opsd and sft, names to sort by echo,
all in one batch. Measured with seed 0 on two busy cores: sampled answers to 250
unseen sums are right 0.57 of the time after the start, 0.80 after 60 steps;
greedy 0.972, then 0.980; names 0.576, then 0.506 (see echo.py). Ten minutes,
half of them the teacher, the start, and eight evaluations.
"""

import dataclasses

from configs import algorithms
from posttrain import schema

HINT = 'Do it like this: {demonstration}'


def get_config(argument: str = ''):
  tiny = algorithms.is_tiny(argument)

  def sums(algorithm, group_size=4, **options):
    return schema.EnvEntry(
      env=algorithms.SUMS,
      algorithm=algorithm,
      group_size=group_size,
      **{'sampler': algorithms.SAMPLED, **options},
    )

  names = schema.AlphabetSort(
    turns=2, first=2, more=1, role='tool', train_tasks=1000, eval_tasks=250
  )
  told = dataclasses.replace(algorithms.RIGHT, hint=HINT)
  known = dict(sums=algorithms.RIGHT, told=told, names=names)
  taught = dict(sums=algorithms.SUMS, names=names)
  return algorithms.run(
    tiny,
    teacher=algorithms.warm(tiny, 300, row_tokens=128, **known),
    start=algorithms.warm(tiny, 250, row_tokens=128, **taught),
    main=algorithms.trial(
      tiny,
      60,
      prompts=128,
      row_tokens=128,
      lr=2e-4,
      grpo=sums(schema.Grpo()),
      max_rl=sums(schema.MaxRl()),
      reward=sums(schema.Reward(prune_zero_advantage=False)),
      custom=sums(
        schema.Custom(
          import_path='configs.algorithms.custom:centered',
          kwargs={'price': 0.002},
        )
      ),
      echo=schema.EnvEntry(
        env=names,
        group_size=4,
        sampler=algorithms.SAMPLED,
        algorithm=schema.Echo(roles={'tool': schema.EchoRole(alpha=0.01)}),
      ),
      # One rollout per task, so more tasks.
      opd=sums(schema.Opd(reference='stage:teacher'), 1, ratio=4.0),
      opsd=sums(
        schema.Opsd(template=HINT, reference='stage:teacher'), 1, ratio=4.0
      ),
      sft=sums(
        schema.Sft(),
        1,
        ratio=4.0,
        sampler=schema.Frozen(model='stage:teacher', max_tokens=40),
      ),
    ),
  )
