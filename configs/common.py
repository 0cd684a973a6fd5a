"""Pieces that several recipes share: models, environments, stages."""

import dataclasses
import os

import ml_collections

from configs import machinery
from posttrain import schema
from posttrain.models import hf_config

# Two-digit arithmetic with a mistake in three demonstrations of ten.
ARITHMETIC = schema.Arithmetic(
  ops=('+', '-'), max_operand=99, mistakes=0.3, eval_tasks=1000
)
# Additions up to 49: few enough facts for a small reward model, which must
# learn from whole answers which step of them is wrong.
SUMS = schema.Arithmetic(
  ops=('+',), max_operand=49, mistakes=0.3, train_tasks=1950, eval_tasks=450
)
# Additions up to 4 for `:tiny`: so easy that some answers of its model are
# right, and pairs can be made.
EASY_SUMS = schema.Arithmetic(
  ops=('+',), max_operand=4, worked=False, train_tasks=15, eval_tasks=4
)


def pretrained(
  folder: str | None,
) -> tuple[schema.Model, schema.Tokenizer, str]:
  """Returns model, tokenizer and `init` of a HuggingFace directory.

  None gives the preset `tiny` on bytes, with random weights.
  """
  if folder is None:
    return schema.PRESETS['tiny'], schema.Tokenizer(), 'random'
  model = hf_config.read(os.path.expanduser(folder))
  model = dataclasses.replace(model, dtype='bfloat16', remat='block')
  return model, schema.Tokenizer(path=folder), folder


def arithmetic_sft(env: schema.Arithmetic, steps: int) -> schema.Stage:
  """Returns SFT on demonstrations, some with mistakes: a start to improve."""
  return schema.Stage(
    init='random',
    envs={'arithmetic': schema.EnvEntry(env=env)},
    rollout=schema.Rollout(slots=512, prefill_rows=64, prefill_tokens=20),
    steps=steps,
    batch=schema.Batch(
      prompts_per_step=64, row_tokens=64, micro_batch_tokens=1024
    ),
    optim=schema.Optim(lr=2e-3, schedule='cosine', warmup_steps=10),
    eval=schema.Eval(prompts=env.eval_tasks, samples=1, max_tokens=40),
  )


def arithmetic_reward_model(sft: schema.Stage) -> schema.Stage:
  """Returns a reward model's stage, on pairs of answers sampled after `sft`."""
  return schema.Stage(
    kind='ranking',
    init='stage:sft',
    envs=questions(sft),
    pairs=schema.MadePairs(
      prompts=1950, samples=16, per_prompt=6, max_tokens=40, eval_prompts=450
    ),
    rollout=sft.rollout,
    steps=1400,
    batch=schema.Batch(
      prompts_per_step=32, row_tokens=120, micro_batch_tokens=1920
    ),
    # Cross-entropy on the chosen answers keeps the policy's skill at sums; the
    # ranking loss alone unlearns it.
    loss=schema.Loss(ranking=schema.Ranking(center_coef=0.01, lm_coef=1.0)),
    optim=schema.Optim(lr=1e-3, schedule='cosine', warmup_steps=20),
    eval=schema.Eval(every=200),
  )


def questions(stage: schema.Stage) -> dict[str, schema.EnvEntry]:
  """Returns a stage's environments, without algorithms, for one on pairs."""
  return {
    name: schema.EnvEntry(env=entry.env) for name, entry in stage.envs.items()
  }


def shrink_model(config: ml_collections.ConfigDict) -> None:
  """Sets the preset `tiny` and frequent checkpoints."""
  config.model = machinery.node(schema.PRESETS['tiny'])
  config.checkpoint.every = 10


def shrink_decoding(stage: ml_collections.ConfigDict) -> None:
  """Sets easy questions with short answers, and a small engine."""
  for entry in stage.envs.values():
    entry.env = machinery.node(EASY_SUMS)
  stage.rollout.slots = 16
  stage.rollout.prefill_rows = 8


def shrink_arithmetic_sft(sft: ml_collections.ConfigDict) -> None:
  """Sets the sizes of `:tiny` in the stage of `arithmetic_sft`."""
  shrink_decoding(sft)
  sft.steps = 40
  sft.batch.prompts_per_step = 8
  sft.batch.micro_batch_tokens = 256
  sft.optim.lr = 1e-2
  shrink_arithmetic_eval(sft.eval)


def shrink_arithmetic_eval(evaluation: ml_collections.ConfigDict) -> None:
  """Sets the sizes of `:tiny` in the evaluation of `arithmetic_sft`."""
  evaluation.prompts = 4
  evaluation.samples = 2
  evaluation.max_tokens = 16


def shrink_arithmetic_reward_model(rm: ml_collections.ConfigDict) -> None:
  """Sets the sizes of `:tiny` in the stage of `arithmetic_reward_model`."""
  shrink_decoding(rm)
  rm.pairs.prompts = 15
  rm.pairs.samples = 8
  rm.pairs.per_prompt = 1
  rm.pairs.max_tokens = 16
  machinery.unset(rm.pairs, 'eval_prompts')
  rm.steps = 10
  rm.batch.prompts_per_step = 8
  rm.batch.micro_batch_tokens = 480
  rm.optim.warmup_steps = 5
  rm.eval.every = 5
