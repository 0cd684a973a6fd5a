"""SFT, a reward model, GRPO on its rewards alone, on additions up to 49.

    python -m posttrain.main --config=configs/arithmetic_rm_grpo.py \\
        --workdir=DIR

The stages of arithmetic_reward_model.py, then GRPO whose only reward is the
reward model's. The environment's grade is measured in evaluation and never
trained on: where `rollout/reward` rises and `eval/pass_rate` does not follow,
the policy exploits errors of the reward model.

Expected, on 450 unseen sums, seeds 0 to 2: sampled pass rate 0.467, 0.613,
0.460 after SFT, 0.738, 0.931, 0.798 after GRPO; greedy 0.811, 0.949, 0.878,
then 0.849, 0.991, 0.920, with reward models of 32 pairs per step (accuracy
0.937, 0.960, 0.918). One core of an AMD EPYC: 15 minutes.

Tried, on seed 0 and a reward model of 600 steps of 64 pairs (greedy 0.811 and
sampled 0.467 before, after 60 steps):
  No KL leash: greedy 0.651, sampled 0.629; the reward model's mean rises to
    1.05 while the share of right rollouts falls from 0.596 after ten steps to
    0.533 after 30.
  kl_beta 0.1: 0.749, 0.696.
  kl_beta 0.5: 0.824, 0.729.
  kl_beta 0.5 on a reward model of 900 steps of 32 pairs: 0.822, 0.724.
  The environment's grade as the reward: 0.871, 0.778.
Tried, with a reward model of 32 pairs without averaged weights: sampled 0.769,
  0.916, 0.860, greedy 0.876, 0.987, 0.958 for seeds 0 to 2.

`:tiny` runs every part in seconds and learns next to nothing.
"""

import ml_collections

from configs import arguments, common, machinery
from posttrain import schema

# Stage 1: SFT, to a policy that is right about half of the time.
SFT = common.arithmetic_sft(common.SUMS, steps=120)

# Stage 2: a reward model, on pairs of answers of this policy.
REWARD_MODEL = common.arithmetic_reward_model(SFT)

# Stage 3: GRPO. The reward model is the only reward.
GRPO = schema.Stage(
  init='stage:sft',
  envs={
    'arithmetic': schema.EnvEntry(
      env=SFT.envs['arithmetic'].env,
      # Without the KL leash the policy finds errors of the reward model.
      algorithm=schema.Grpo(kl_beta=0.5),
      sampler=schema.Policy(temperature=1.0, max_tokens=40),
      rewards={'learned': schema.RewardFn(model='stage:rm')},
      group_size=8,
    )
  },
  rollout=SFT.rollout,
  steps=60,
  batch=schema.Batch(
    prompts_per_step=64, row_tokens=64, micro_batch_tokens=1024
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
  eval=SFT.eval,
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = machinery.config_dict(
    schema.Run(
      model=schema.PRESETS['small'],
      checkpoint=schema.Checkpoint(every=100),
      stages={'sft': SFT, 'rm': REWARD_MODEL, 'grpo': GRPO},
    )
  )
  if argument == 'tiny':
    shrink(config)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  common.shrink_model(config)
  common.shrink_arithmetic_sft(config.sft)
  common.shrink_arithmetic_reward_model(config.rm)
  common.shrink_decoding(config.grpo)
  config.grpo.envs.arithmetic.sampler.max_tokens = 16
  config.grpo.envs.arithmetic.group_size = 4
  config.grpo.steps = 10
  config.grpo.batch.prompts_per_step = 4
  config.grpo.batch.micro_batch_tokens = 256
  config.grpo.optim.warmup_steps = 5
  common.shrink_arithmetic_eval(config.grpo.eval)
