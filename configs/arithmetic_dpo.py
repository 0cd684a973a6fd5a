"""SFT, then DPO on the policy's own answers, on arithmetic, on a laptop.

    python -m posttrain.main --config=configs/arithmetic_dpo.py --workdir=DIR

A byte-level transformer of 0.6 M parameters imitates a teacher who errs in
three demonstrations of ten. It then answers training questions eight times
each; of one right and one wrong answer to a question it learns to prefer the
right one. The pairs are in DIR/pairs/dpo.jsonl.

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
  # First by example: who copies a teacher copies the mistakes, when sampled.
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
  # Then by comparison: which of two of its answers was right.
  dpo = schema.Stage(
      kind='preference',
      init='stage:sft',
      steps=10 if tiny else 150,
      envs={'arithmetic': schema.EnvEntry(env=env)},
      pairs=schema.MadePairs(
          prompts=15 if tiny else 4000, samples=8, per_prompt=4,
          max_tokens=16 if tiny else 40, eval_fraction=0.1,
      ),
      batch=schema.Batch(
          prompts_per_step=8 if tiny else 64, row_tokens=128,
          micro_batch_tokens=512 if tiny else 2048,
      ),
      # Near the reference: what follows a slip in a wrong answer is mostly
      # right, and is not to be unlearned with it.
      loss=schema.Loss(preference=schema.Sigmoid(beta=3.0)),
      optim=schema.Optim(
          lr=1e-4, schedule='linear', warmup_steps=5 if tiny else 10,
          beta2=0.99, weight_decay=0.0, average=0.98,
      ),
      rollout=rollout, eval=evaluation,
  )  # fmt: skip
  run = schema.Run(
      model=schema.PRESETS['tiny' if tiny else 'small'],
      checkpoint=schema.Checkpoint(every=10 if tiny else 100),
      stages={'sft': sft, 'dpo': dpo},
  )
  return common.get_config(run)
