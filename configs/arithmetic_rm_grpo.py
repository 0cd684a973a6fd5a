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

  # What is learned: the questions, and how (well) their answers are shown.
  env = schema.Arithmetic(
      ops=('+', '-'), max_operand=99, mistakes=0.3, eval_tasks=1000
  )
  if tiny:  # so easy that some answers are right
    env = schema.Arithmetic(
        ops=('+',), max_operand=4, worked=False, train_tasks=15, eval_tasks=4
    )
  rollout = schema.Rollout(
      slots=16 if tiny else 512, prefill_rows=8 if tiny else 64
  )
  evaluation = schema.Eval(
      prompts=4 if tiny else 1000, samples=2 if tiny else 1,
      max_tokens=16 if tiny else 40,
  )  # fmt: skip
  # First by example: a policy that is right about half of the time.
  sft = schema.Stage(
      init='random',
      steps=40 if tiny else 220,
      envs={'arithmetic': schema.EnvEntry(
          env=env, algorithm=schema.Sft(), sampler=schema.Dataset()
      )},
      batch=schema.Batch(
          prompts_per_step=8 if tiny else 64, row_tokens=64,
          micro_batch_tokens=256 if tiny else 1024,
      ),
      optim=schema.Optim(
          lr=1e-2 if tiny else 2e-3, schedule='cosine', warmup_steps=10
      ),
      rollout=rollout, eval=evaluation,
  )  # fmt: skip
  # Then what an answer is worth: of two, the right one more.
  rm = schema.Stage(
      kind='ranking',
      init='stage:sft',
      steps=10 if tiny else 300,
      envs={'arithmetic': schema.EnvEntry(env=env)},
      pairs=schema.MadePairs(
          prompts=15 if tiny else 6000, samples=8,
          per_prompt=1 if tiny else 2,
          max_tokens=16 if tiny else 40, eval_fraction=0.1,
      ),
      batch=schema.Batch(
          prompts_per_step=8 if tiny else 64, row_tokens=128,
          micro_batch_tokens=512 if tiny else 2048,
      ),
      loss=schema.Loss(ranking=schema.Ranking(center_coef=0.01)),
      optim=schema.Optim(lr=1e-3, schedule='cosine', warmup_steps=5),
      rollout=rollout, eval=schema.Eval(every=5 if tiny else 50),
  )  # fmt: skip
  # Then by trial: what the reward model likes more than the group's mean.
  grpo = schema.Stage(
      init='stage:sft',
      steps=10 if tiny else 100,
      envs={'arithmetic': schema.EnvEntry(
          env=env, algorithm=schema.Grpo(),
          sampler=schema.Policy(
              temperature=1.0, max_tokens=16 if tiny else 40
          ),
          rewards={'learned': schema.RewardFn(model='stage:rm')},
          group_size=4 if tiny else 8,
      )},
      batch=schema.Batch(
          prompts_per_step=4 if tiny else 64, row_tokens=64,
          micro_batch_tokens=256 if tiny else 1024,
      ),
      loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
      optim=schema.Optim(
          lr=3e-4, schedule='linear', warmup_steps=5 if tiny else 10,
          beta2=0.99, weight_decay=0.0, average=0.95,
      ),
      rollout=rollout, eval=evaluation,
  )  # fmt: skip
  run = schema.Run(
      model=schema.PRESETS['tiny' if tiny else 'small'],
      checkpoint=schema.Checkpoint(every=10 if tiny else 100),
      stages={'sft': sft, 'rm': rm, 'grpo': grpo},
  )
  return common.get_config(run)
