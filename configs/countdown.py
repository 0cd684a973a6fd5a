r"""SFT, then GRPO, on countdown: an expression of given numbers with a value.

    python -m posttrain.main --config=configs/countdown.py --workdir=DIR

TODO
"""

import dataclasses

import ml_collections

from configs import common
from posttrain import schema

# What is learned: 3 or 4 numbers from 1 to 99; evaluation has other multisets.
ENV = schema.Countdown(prompt='{numbers} = {target}', train_tasks=60_000)
ENTRY = schema.EnvEntry(env=ENV)

# How answers are decoded and measured, in both stages.
ROLLOUT = schema.Rollout(slots=512, prefill_rows=64, prefill_tokens=24)
EVAL = schema.Eval(
  prompts=500,
  samples=1,
  max_tokens=72,
  suite=('1 2 3 = 6', '50 50 50 50 = 1', '7 = 7'),
)

# Stage 1: SFT, up to the first evaluation with a sampled pass rate of 0.2.
SFT = schema.Stage(
  envs={'countdown': ENTRY},
  rollout=ROLLOUT,
  steps=1000,
  batch=schema.Batch(
    prompts_per_step=64, row_tokens=112, micro_batch_tokens=1792
  ),
  optim=schema.Optim(lr=2e-3, schedule='constant', warmup_steps=20),
  eval=dataclasses.replace(
    EVAL,
    every=100,
    best='eval/sampled_pass_rate/countdown',
    best_prompts=500,
    stop_at=0.2,
  ),
)

# Stage 2: GRPO.
GRPO = schema.Stage(
  init='stage:sft',
  envs={
    'countdown': dataclasses.replace(
      ENTRY,
      algorithm=schema.Grpo(),
      sampler=schema.Policy(temperature=1.0, max_tokens=72),
      group_size=8,
    )
  },
  rollout=ROLLOUT,
  steps=60,
  batch=schema.Batch(
    prompts_per_step=64, row_tokens=112, micro_batch_tokens=1792
  ),
  loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
  optim=schema.Optim(
    lr=4e-4,
    schedule='linear',
    warmup_steps=5,
    beta2=0.99,
    weight_decay=0.0,
    average=0.95,
  ),
  eval=dataclasses.replace(EVAL, samples=16, every=30),
)


def get_config(argument: str = '') -> ml_collections.ConfigDict:
  stages = {'sft': SFT, 'grpo': GRPO}
  config, folder, _ = common.published_task(argument, stages, 512, 1024)
  for name in config.stages if folder else ():
    config[name].envs.countdown.env.prompt = schema.Countdown.prompt
  return config
