"""SFT, then a reward model of the policy's own answers, on additions up to 49.

    python -m posttrain.main --config=configs/arithmetic_reward_model.py \\
        --workdir=DIR

A policy like that of arithmetic_dpo.py answers training questions 16 times
each; a copy of it with a scalar head learns which of two answers to a question
is right. `eval/pairs/rewards/accuracies` is its accuracy on pairs of answers to
450 questions that neither SFT nor the reward model trains on.

Expected, seeds 0 to 2: accuracy 0.946, 0.943, 0.972 on some 2,000 held-out
pairs (0.635, 0.672, 0.573 after 200 of the 1,400 steps). One core of an AMD
EPYC: some 670 CPU seconds.

Tried:
  32 pairs per step: 0.942, 0.948, 0.954; again with other rounding 0.937,
    0.960, 0.918: seed 2 is at 0.614 after 600 steps, with 48 pairs at 0.827.
  The rest with 32 pairs. No average: 0.923, 0.959, 0.965; average 0.98: 0.943,
    0.947, 0.954.
  900 steps: 0.907, 0.917, 0.857.
  Seed 0, lr 1.5e-3: 0.932; up to 12 pairs per question: 0.933.
  On an easier tenth of the training questions, 64 pairs per step, 300 steps
    unless stated: the ranking loss alone, lr 1e-3, 550 steps, 0.702;
    `lm_coef=1`, 0.805; also with ranking at every token after the first
    difference, 0.777; `lm_coef=1`, lr 1e-3, 600 steps, 0.914; the same with 32
    pairs per step, 800 steps, 0.902.
  Sums and differences up to 99, `lm_coef=2`: 0.548 after 200 steps.
  Two layers more: no effect in 120 steps.

`:tiny` runs every part in seconds and learns next to nothing.
"""

from configs import arguments, common, machinery
from posttrain import schema

# Stage 1: SFT, to a policy that is right about half of the time.
SFT = common.arithmetic_sft(common.SUMS, steps=120)

# Stage 2: a reward model, on pairs of answers of this policy.
REWARD_MODEL = common.arithmetic_reward_model(SFT)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = machinery.config_dict(
    schema.Run(
      model=schema.PRESETS['small'],
      checkpoint=schema.Checkpoint(every=100),
      stages={'sft': SFT, 'rm': REWARD_MODEL},
    )
  )
  if argument == 'tiny':
    common.shrink_model(config)
    common.shrink_arithmetic_sft(config.sft)
    common.shrink_arithmetic_reward_model(config.rm)
  return config
