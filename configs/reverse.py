r"""SFT, then GRPO, on texts to reverse; sums known before lose 0.12, greedy.

    python -m posttrain.main --config=configs/reverse.py --workdir=DIR

Texts have 8 to 16 letters, which are bytes. GRPO's reward is the ratio of the
longest common subsequence, as published; an answer is correct if every letter
is.

Expected, on 500 unseen texts, seed 0: sampled pass rate 0.238 after SFT (which
ends at step 275, the first evaluation of 0.2 or more), 0.678 after GRPO; greedy
0.422, then 0.850; any of 16 answers 0.716, then 0.960. Two cores of an AMD EPYC
beside much other work: 255 CPU seconds.

`reverse.py:DIR` is for a HuggingFace directory. Published, from a pretrained
model and on paragraphs: reward 0.05, then about 0.8 after SFT and 20 steps
(Qwen3-0.6B, prime-rl's examples/basic/reverse-text).

`:random`, `:rejection` and `:sft` are controls of GRPO from the same start, see
`configs.common.ARMS`. `:retention` measures sums, which SFT then teaches too.
`:tiny` runs every part and learns nothing.

Compared over five seeds on each of two starts that know sums, in equal CPU
seconds, each arm at the best of four learning rates (docs/results.md):

                        texts, sampled      sums, greedy
  GRPO at lr 8e-4       0.347 -> 0.841      0.904 -> 0.788
  rejection sampling    0.347 -> 0.942      0.904 -> 0.470
  SFT for as long       0.347 -> 0.932      0.904 -> 0.032
  random rewards        0.347 -> 0.008      0.904 -> 0.901
"""

import dataclasses

import ml_collections

from configs import common
from posttrain import schema

# What is learned: texts of 8 to 16 random letters, none twice.
ENV = schema.ReverseText(
  min_length=8, max_length=16, train_tasks=60_000, eval_tasks=1000
)
ENTRY = schema.EnvEntry(env=ENV)

# How answers are decoded and measured, in both stages.
ROLLOUT = schema.Rollout(slots=512, prefill_rows=64, prefill_tokens=32)
EVAL = schema.Eval(
  prompts=500,
  samples=1,
  max_tokens=20,
  suite=('Reverse: abc', 'Reverse: posttraining', 'Hello.'),
)
BATCH = schema.Batch(
  prompts_per_step=64, row_tokens=64, micro_batch_tokens=1024
)

# Stage 1: SFT, up to the first evaluation with a sampled pass rate of 0.2.
SFT = schema.Stage(
  envs={'reverse': ENTRY},
  rollout=ROLLOUT,
  steps=1000,
  batch=BATCH,
  optim=schema.Optim(lr=2e-3, schedule='constant', warmup_steps=20),
  eval=dataclasses.replace(
    EVAL,
    every=25,
    best='eval/sampled_pass_rate/reverse',
    best_prompts=500,
    stop_at=0.2,
  ),
)

# Stage 2: GRPO.
GRPO = schema.Stage(
  init='stage:sft',
  envs={
    'reverse': dataclasses.replace(
      ENTRY,
      algorithm=schema.Grpo(),
      sampler=schema.Policy(temperature=1.0, max_tokens=20),
      group_size=8,
    )
  },
  rollout=ROLLOUT,
  steps=60,
  batch=BATCH,
  loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
  optim=schema.Optim(
    lr=4e-4, schedule='linear', warmup_steps=5, beta2=0.99, weight_decay=0.0
  ),
  eval=dataclasses.replace(EVAL, samples=16, every=30),
)


def get_config(argument: str = '') -> ml_collections.ConfigDict:
  stages = {'sft': SFT, 'grpo': GRPO}
  return common.published_task(argument, stages, 64, 256)[0]
