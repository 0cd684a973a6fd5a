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


def reward_model(tiny: bool, sft: schema.Stage) -> schema.Stage:
  """What an answer is worth: of two, the right one more."""
  return schema.Stage(
      kind='ranking',
      init='stage:sft',
      steps=10 if tiny else 300,
      envs=common.questions(sft),
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
      rollout=sft.rollout, eval=schema.Eval(every=5 if tiny else 50),
  )  # fmt: skip


def get_config(argument: str = ''):
  if argument not in ('', 'tiny'):
    raise ValueError(f"the argument must be '' or 'tiny': got {argument!r}")
  tiny = argument == 'tiny'

  # First by example: a policy that is right about half of the time.
  sft = common.arithmetic_sft(tiny)
  # Then which of two of its answers was right.
  rm = reward_model(tiny, sft)
  run = schema.Run(
      model=schema.PRESETS['tiny' if tiny else 'small'],
      checkpoint=schema.Checkpoint(every=10 if tiny else 100),
      stages={'sft': sft, 'rm': rm},
  )
  return common.get_config(run)
