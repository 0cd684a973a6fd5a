"""SFT, then GRPO, on two-digit arithmetic, from random weights, on a laptop.

    python -m posttrain.main --config=configs/arithmetic.py --workdir=DIR

A byte-level transformer of 0.6 M parameters imitates a teacher who shows the
work but errs in three demonstrations of ten; then it tries every question eight
times and learns from what was right. Measured on two cores, seeds 0 to 5, 500
unseen questions: sampled pass rate 0.49 to 0.64 after SFT, 0.86 to 0.97 after
GRPO; greedy 0.91 to 0.98, then 0.96 to 1.00; five minutes with everything. SFT
on the same demonstrations for as long (seed 0): 0.75 sampled, 1.00 greedy.

`:tiny` runs every part of it in seconds and learns nothing.
"""

import dataclasses

from configs import common
from posttrain import schema


def get_config(argument: str = ''):
  if argument not in ('', 'tiny'):
    raise ValueError(f"the argument must be '' or 'tiny': got {argument!r}")
  tiny = argument == 'tiny'

  # What is learned: the questions, and how (well) their answers are shown.
  env = schema.Arithmetic(ops=('+', '-'), max_operand=99, mistakes=0.3)
  # How answers are decoded, and how well they do on unseen questions.
  rollout = schema.Rollout(
    slots=16 if tiny else 512, prefill_rows=8 if tiny else 64
  )
  evaluation = schema.Eval(
    every=10 if tiny else 50,
    prompts=20 if tiny else 500,
    samples=2 if tiny else 8,
    max_tokens=40,
  )
  # First by example: who copies a teacher copies the mistakes, when sampled.
  sft = schema.Stage(
    init='random',
    steps=20 if tiny else 320,
    envs={
      'arithmetic': schema.EnvEntry(
        env=env, algorithm=schema.Sft(), sampler=schema.Dataset()
      )
    },
    batch=schema.Batch(
      prompts_per_step=8 if tiny else 64,
      row_tokens=64,
      micro_batch_tokens=256 if tiny else 1024,
    ),
    optim=schema.Optim(lr=2e-3, schedule='cosine', warmup_steps=10),
    rollout=rollout,
    eval=dataclasses.replace(evaluation, every=None),
  )
  # Then by trial: what was right more often than the group's mean.
  grpo = schema.Stage(
    init='stage:sft',
    steps=20 if tiny else 150,
    envs={
      'arithmetic': schema.EnvEntry(
        # No answer of the tiny one is right: pruned, nothing would be left.
        env=env,
        algorithm=schema.Grpo(prune_zero_advantage=not tiny),
        sampler=schema.Policy(temperature=1.0, max_tokens=40),
        group_size=4 if tiny else 8,
      )
    },
    batch=schema.Batch(
      prompts_per_step=4 if tiny else 64,
      row_tokens=64,
      micro_batch_tokens=256 if tiny else 1024,
    ),
    loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
    optim=schema.Optim(
      lr=3e-4,
      schedule='linear',
      warmup_steps=10,
      beta2=0.99,
      weight_decay=0.0,
      average=0.95,
    ),
    rollout=rollout,
    eval=dataclasses.replace(evaluation, kl=True),
  )
  run = schema.Run(
    model=schema.PRESETS['tiny' if tiny else 'small'],
    checkpoint=schema.Checkpoint(every=10 if tiny else 100),
    stages={'sft': sft, 'grpo': grpo},
  )
  return common.get_config(run)
