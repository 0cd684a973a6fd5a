"""SFT, then DPO on the policy's own answers, on arithmetic, on a laptop.

    python -m posttrain.main --config=configs/arithmetic_dpo.py --workdir=DIR

A byte-level transformer of 0.6 M parameters imitates a teacher who errs in
three demonstrations of ten. It then answers training questions eight times
each; of one right and one wrong answer to a question it learns to prefer the
right one. The pairs are in DIR/pairs/dpo.jsonl.

`:sums` asks what arithmetic_reward_model.py does. `:tiny` runs every part of it
in seconds and learns next to nothing.
"""

from configs import common
from posttrain import schema


def get_config(argument: str = ''):
  if argument not in ('', 'sums', 'tiny'):
    raise ValueError(
      f"the argument must be '', 'sums' or 'tiny': got {argument!r}"
    )
  tiny, sums = argument == 'tiny', argument == 'sums'

  # First by example: who copies a teacher copies the mistakes, when sampled.
  sft = common.arithmetic_sft(tiny, sums)
  # Then by comparison: which of two of its answers was right.
  dpo = schema.Stage(
    kind='preference',
    init='stage:sft',
    steps=10 if tiny else 150,
    envs=common.questions(sft),
    pairs=schema.MadePairs(
      prompts=15 if tiny else 1950 if sums else 4000,
      samples=8,
      per_prompt=4,
      max_tokens=16 if tiny else 40,
      eval_fraction=0.1,
    ),
    batch=schema.Batch(
      prompts_per_step=8 if tiny else 64,
      row_tokens=128,
      micro_batch_tokens=512 if tiny else 2048,
    ),
    # Near the reference: what follows a slip in a wrong answer is mostly
    # right, and is not to be unlearned with it.
    loss=schema.Loss(preference=schema.Sigmoid(beta=3.0)),
    optim=schema.Optim(
      lr=1e-4,
      schedule='linear',
      warmup_steps=5 if tiny else 10,
      beta2=0.99,
      weight_decay=0.0,
      average=0.98,
    ),
    rollout=sft.rollout,
    eval=sft.eval,
  )
  run = schema.Run(
    model=schema.PRESETS['tiny' if tiny else 'small'],
    checkpoint=schema.Checkpoint(every=10 if tiny else 100),
    stages={'sft': sft, 'dpo': dpo},
  )
  return common.get_config(run)
