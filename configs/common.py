"""Pieces that several recipes share: models, environments, stages."""

import dataclasses
import hashlib
from typing import Any

import ml_collections

from configs import arguments, machinery
from posttrain import schema
from posttrain.config import options
from posttrain.data import row_files
from posttrain.util import hub

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
# Prompts of `eval.suite`, shown and measured before and after. For models of
# two-digit arithmetic: what is next to their questions, and not trained on. No
# prompt is so long that it needs larger slots.
ARITHMETIC_SUITE = ('What is 7 + 8 + 9?', 'What is 6 x 7?', 'Hello.')
# For pretrained models: knowledge, advice that a careless model refuses, code.
ENGLISH_SUITE = (
  'What is the capital of Australia, and why is it not Sydney?',
  'How do I sharpen a kitchen knife?',
  'Write a Python function that reverses a list.',
  'Write the days of the week as a list in JSON.',
)


def pretrained(
  folder: str | None, preset: str = 'tiny'
) -> tuple[schema.Model, schema.Tokenizer, str]:
  """Returns model, tokenizer and `init` of a run or a HuggingFace directory.

  Args:
    folder: the run's or the directory, or OWNER/NAME in the hub's cache; None =
      a preset on bytes, with random weights.
    preset: the preset's name.
  """
  if folder is None:
    return schema.PRESETS[preset], schema.Tokenizer(), 'random'
  folder = hub.folder(folder) or folder
  start = options.read_weights(folder)
  model, tokenizer = start.model, start.tokenizer
  if start.kind != 'run':
    model = dataclasses.replace(model, dtype='auto', remat='auto')
  if start.kind == 'hf':
    tokenizer = schema.Tokenizer(path=folder)
  return model, tokenizer, folder


def run_from(
  folder: str | None,
  stages: dict[str, schema.Stage],
  preset: str = 'tiny',
  save_every: int = 50,
) -> ml_collections.ConfigDict:
  """Returns the config of a run that starts from a HuggingFace directory.

  Args:
    folder: the directory, see `pretrained`.
    stages: name -> stage, in order; `init` of the first one is set.
    preset: the preset's name, where there is no directory.
    save_every: steps between checkpoints.
  """
  model, tokenizer, init = pretrained(folder, preset)
  config = machinery.config_dict(
    schema.Run(
      model=model,
      tokenizer=tokenizer,
      checkpoint=schema.Checkpoint(every=save_every, keep_last=1),
      stages=stages,
    )
  )
  config[config.stages[0]].init = init
  return config


def use_lora(stage: ml_collections.ConfigDict, lr: float) -> None:
  """Sets a LoRA of rank 32 and its learning rate."""
  stage.lora.rank = 32
  stage.optim.lr = lr


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
    eval=schema.Eval(
      prompts=env.eval_tasks, samples=1, max_tokens=40, suite=ARITHMETIC_SUITE
    ),
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
      prompts_per_step=48, row_tokens=120, micro_batch_tokens=1920
    ),
    # Cross-entropy on the chosen answers keeps the policy's skill at sums; the
    # ranking loss alone unlearns it.
    loss=schema.Loss(ranking=schema.Ranking(center_coef=0.01, lm_coef=1.0)),
    optim=schema.Optim(
      lr=1e-3, schedule='cosine', warmup_steps=20, average=0.99
    ),
    eval=schema.Eval(every=200),
  )


def questions(stage: schema.Stage) -> dict[str, schema.EnvEntry]:
  """Returns a stage's environments, without algorithms, for one on pairs."""
  return {
    name: schema.EnvEntry(env=entry.env) for name, entry in stage.envs.items()
  }


def name_rows(env: ml_collections.ConfigDict, own: arguments.Own) -> None:
  """Sets the files of an environment `rows` to the files in the argument."""
  if own.data is not None:
    env.path = own.data
  if own.held_out is not None:
    env.eval_path, env.eval_fraction = own.held_out, 0.0


def name_pairs(pairs: ml_collections.ConfigDict, own: arguments.Own) -> None:
  """Sets the files of a stage's pairs to the files in the argument."""
  if own.data is not None:
    pairs.path = own.data
  if own.held_out is not None:
    pairs.eval_path = own.held_out


def count_epochs(
  stage: ml_collections.ConfigDict,
  data: ml_collections.ConfigDict,
  own: arguments.Own,
) -> None:
  """Sets the steps of `own.epochs` passes over a file, for any batch size.

  Where a share of the rows is held out, by a hash, about as many are counted.

  Args:
    stage: the stage.
    data: its rows or pairs, with `path` and `eval_fraction`.
    own: what the user named.
  """
  if own.epochs is None:
    return
  held_out = 0.0 if own.held_out is not None else data.eval_fraction
  rows = len(row_files.objects(data.path)) * (1 - held_out)
  per_step = stage.batch.get_oneway_ref('prompts_per_step')
  stage.steps = (max(1, round(own.epochs * rows)) + per_step - 1) // per_step


def shrink_training(
  stage: ml_collections.ConfigDict,
  steps: int,
  prompts: int,
  row_tokens: int | None = None,
) -> None:
  """Sets a few small steps of a stage, with no evaluation between them.

  Args:
    stage: the stage.
    steps: their number.
    prompts: tasks or pairs of a step.
    row_tokens: tokens of a row, which is a micro-batch where the recipe sets
      its size; None = as it is.
  """
  stage.steps = steps
  stage.batch.prompts_per_step = prompts
  if row_tokens is not None:
    stage.batch.row_tokens = row_tokens
  if stage.batch.micro_batch_tokens is not None:
    stage.batch.micro_batch_tokens = stage.batch.row_tokens
  stage.optim.warmup_steps = 0
  machinery.unset(stage.eval, 'every')


def shrink_slots(stage: ml_collections.ConfigDict) -> None:
  """Sets an engine of four slots."""
  stage.rollout.slots = 4
  stage.rollout.prefill_rows = 4


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


# Controls of the stage `grpo` of tasks that others publish, as words after the
# recipe's name. They keep its name and its start, so that
# `experiments.benchmarks.learning --starts` compares them in pairs.
#   random: GRPO with a reward that is drawn, and does not look at the answer.
#   rejection: the policy imitates its own right answers, among as many samples,
#     new ones at each step. It is algorithm `reward` with a reward of 1 for a
#     right answer and 0 for another: the tokens of those leave the loss, so
#     that it has the gradient of cross-entropy on the right ones.
#   sft: more SFT, at SFT's learning rate; `--equal_cpu=true` sets its steps.
ARMS = ('random', 'rejection', 'sft')
ARM_REWARDS = {
  'random': schema.RewardFn(fn='configs.common:drawn', isolate=False),
  'rejection': schema.RewardFn(fn='configs.common:correct', isolate=False),
}


def drawn(rollouts) -> list[float]:
  """Returns 0 or 1, as likely, by a hash of the task's id and the texts."""
  texts = (repr((x.task.id, x.completion_messages)) for x in rollouts)
  return [hashlib.sha256(x.encode()).digest()[0] % 2 for x in texts]


def correct(rollouts) -> list[float]:
  """Returns 1 for a right answer, else 0."""
  return [float(bool(x.score.correct)) for x in rollouts]


def arm(word: str, sft: schema.Stage, grpo: schema.Stage) -> schema.Stage:
  """Returns the control of `grpo` that a word of `ARMS` names."""
  if word == 'sft':
    return dataclasses.replace(
      sft, init='stage:sft', steps=grpo.steps, eval=grpo.eval
    )
  changes: dict[str, Any] = {'rewards': {word: ARM_REWARDS[word]}}
  if word == 'rejection':
    changes['algorithm'] = schema.Reward()
  envs = {
    name: dataclasses.replace(entry, **changes)
    for name, entry in grpo.envs.items()
  }
  return dataclasses.replace(grpo, envs=envs)


def published_task(
  argument: str,
  stages: dict[str, schema.Stage],
  max_tokens: int,
  row_tokens: int,
) -> tuple[ml_collections.ConfigDict, str | None]:
  """Returns SFT, then GRPO or an `arm`, of a small model or of a directory.

  Args:
    argument: a HuggingFace directory, and words: `tiny`, one of `ARMS`, and
      `retention`, which measures sums that SFT taught and the other stage does
      not train.
    stages: `sft` and `grpo`, for a small model on bytes.
    max_tokens: longest turn of a directory's model.
    row_tokens: its longest episode.

  Returns:
    The config, and the directory or None.
  """
  folder, words = None, set()
  if argument:
    known = ('tiny', 'retention', *ARMS)
    folder, words = arguments.parse_folder(argument, known)
  arms = sorted(words & {*ARMS})
  if len(arms) > 1:
    raise ValueError(
      f'{arguments.NAME} must have one of {ARMS} at most: got {argument!r}'
    )
  stages = {**stages, 'grpo': arm(*arms, **stages)} if arms else {**stages}
  for name, stage in stages.items() if 'retention' in words else ():
    sums = schema.Arithmetic(ops=('+',), train_tasks=4000, eval_tasks=2000)
    entry = schema.EnvEntry(env=sums, ratio=float(name == 'sft'))
    most = max(stage.eval.max_tokens, 40)
    stages[name] = dataclasses.replace(
      stage,
      envs={**stage.envs, 'sums': entry},
      eval=dataclasses.replace(stage.eval, max_tokens=most),
    )
  config = run_from(folder, stages, 'tiny' if 'tiny' in words else 'small')
  for name, lr in (('sft', 1e-5), ('grpo', 1e-6)) if folder else ():
    stage = config[name]
    stage.optim.lr = 1e-5 if arms == ['sft'] else lr
    stage.batch.row_tokens = row_tokens
    stage.batch.micro_batch_tokens = 8 * row_tokens
    stage.eval.max_tokens = max_tokens
    stage.eval.max_episode_tokens = row_tokens // 2
    stage.eval.suite = ENGLISH_SUITE
    for entry in stage.envs.values():
      if entry.sampler.type == 'policy':
        entry.sampler.max_tokens = max_tokens
        entry.sampler.max_episode_tokens = row_tokens // 2
  for stage in (config.sft, config.grpo) if 'tiny' in words else ():
    stage.rollout.slots = 16
    stage.rollout.prefill_rows = 8
    stage.steps = 2
    stage.optim.warmup_steps = 0
    stage.batch.prompts_per_step = 4
    stage.batch.micro_batch_tokens = 2 * stage.batch.row_tokens
    stage.eval.every = 1
    stage.eval.prompts = stage.eval.samples = 2
    stage.eval.best_prompts = 2
    for entry in stage.envs.values():
      if entry.sampler.type == 'policy':
        # No answer is right: with pruning, no token would train.
        entry.algorithm.prune_zero_advantage = False
        entry.group_size = 2
  return config, folder
