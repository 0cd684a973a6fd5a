r"""SFT, then GRPO, on countdown; sums known before lose 0.07, greedy.

    python -m posttrain.main --config=configs/countdown.py --workdir=DIR

The answer is an expression of the given numbers whose value is the target: 3 or
4 from 1 to 99, each used once; targets up to 100. Demonstrations show the value
of every part, then the expression: `31+26=57, 57-14=43, \boxed{31+26-14}`. No
multiset of numbers is in training and in evaluation.

Expected, on 500 unseen questions, seed 0: sampled pass rate 0.200 after SFT,
0.349 after GRPO; greedy 0.280, then 0.410; any of 16 answers 0.740, then 0.724.
SFT ran all its 1,000 steps: on the questions of the rule its best was 0.170.
A random valid expression solves 0.068 of 500 questions of 3 numbers, 0.018 of 4
(`experiments.benchmarks.controls`). Two cores of an AMD EPYC beside much other
work: 840 CPU seconds, of which SFT takes 590.

`countdown.py:DIR` is for a HuggingFace directory. Published, from a pretrained
model: pass@1 0.30, then 0.64, pass@16 0.75, then 0.78, 100 steps x 128
(Qwen2.5-0.5B, SFT, then RLOO; the CS224R default project).

`:random`, `:rejection` and `:sft` are controls of GRPO from the same start, see
`configs.common.ARMS`. `:retention` measures sums, which SFT then teaches too.
`:tiny` runs every part and learns nothing.

Compared over five seeds on each of two starts that know sums, in equal CPU
seconds, each arm at the best of four learning rates (docs/results.md):

                        countdown, sampled  countdown, greedy  sums, greedy
  GRPO                  0.160 -> 0.318      0.268 -> 0.390     0.987 -> 0.922
  rejection sampling    0.160 -> 0.339      0.268 -> 0.400     0.987 -> 0.886
  SFT for as long       0.160 -> 0.236      0.268 -> 0.381     0.987 -> 0.003
  random rewards        0.160 -> 0.131      0.268 -> 0.206     0.987 -> 0.965
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
  config, folder = common.published_task(argument, stages, 512, 1024)
  for name in config.stages if folder else ():
    config[name].envs.countdown.env.prompt = schema.Countdown.prompt
  return config
