"""SFT, then a reward model of the policy's own answers, on a laptop.

    python -m posttrain.main --config=configs/arithmetic_reward_model.py \\
        --workdir=DIR

The same policy as in arithmetic_dpo.py answers training questions eight times
each; a copy of it, whose head is a number, learns which of two answers to a
question was right. `eval/pairs/rewards/accuracies` is how often it is right
about pairs of questions that it has not seen.

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
      rollout=rollout,
      eval=schema.Eval(
          prompts=4 if tiny else 1000, samples=2 if tiny else 1,
          max_tokens=16 if tiny else 40,
      ),
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
  run = schema.Run(
      model=schema.PRESETS['tiny' if tiny else 'small'],
      checkpoint=schema.Checkpoint(every=10 if tiny else 100),
      stages={'sft': sft, 'rm': rm},
  )
  return common.get_config(run)
