"""SFT, a reward model of its answers, GRPO on that alone, on a laptop.

    python -m posttrain.main --config=configs/arithmetic_rm_grpo.py \\
        --workdir=DIR

What arithmetic_reward_model.py does, and then GRPO, to which nobody says what
was right: an answer is worth what the reward model says. The environment's
grade is only measured, in evaluation. `rollout/reward` rises whatever happens;
where `eval/pass_rate` does not follow it, the policy has found out what the
reward model likes instead.

`:tiny` runs every part of it in seconds and learns next to nothing.
"""

from configs import common
from posttrain import schema


def get_config(argument: str = ''):
  if argument not in ('', 'tiny'):
    raise ValueError(f"the argument must be '' or 'tiny': got {argument!r}")
  tiny = argument == 'tiny'

  # First by example: a policy that is right about half of the time.
  sft = common.arithmetic_sft(tiny, sums=True)
  # Then which of two of its answers was right.
  rm = common.arithmetic_reward_model(tiny, sft)
  # Then by trial: what the reward model likes more than the group's mean.
  grpo = schema.Stage(
    init='stage:sft',
    steps=10 if tiny else 60,
    envs={
      'arithmetic': schema.EnvEntry(
        env=sft.envs['arithmetic'].env,
        # Where it strays far, it finds what the reward model errs about.
        algorithm=schema.Grpo(kl_beta=0.5),
        sampler=schema.Policy(temperature=1.0, max_tokens=16 if tiny else 40),
        rewards={'learned': schema.RewardFn(model='stage:rm')},
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
      warmup_steps=5 if tiny else 10,
      beta2=0.99,
      weight_decay=0.0,
      average=0.95,
    ),
    rollout=sft.rollout,
    eval=sft.eval,
  )
  run = schema.Run(
    model=schema.PRESETS['tiny' if tiny else 'small'],
    checkpoint=schema.Checkpoint(every=10 if tiny else 100),
    stages={'sft': sft, 'rm': rm, 'grpo': grpo},
  )
  return common.get_config(run)
