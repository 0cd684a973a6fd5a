"""SFT, then GRPO, on SQL exploration; hard questions are guessed less often.

    python -m posttrain.main --config=configs/sql.py --workdir=DIR

The questions are about a database that the prompt does not show; an episode has
eight steps of DESCRIBE, SAMPLE, QUERY, ANSWER. A word-level transformer of
0.7 M parameters, random at first, imitates a hasty scripted teacher, which
answers three medium questions of five with a value from a sample of rows. GRPO
then learns to look up the names of the columns, and to query. As many of its
questions are hard, which are in no demonstration: the policy can only guess
their answers, and with GRPO on the others alone it would stop guessing.

Expected, on 400 unseen questions, seeds 0, 1, 2: greedy pass rate 0.542, 0.545,
0.540 after SFT, 0.953, 0.922, 0.885 after GRPO; on hard questions 0.080, 0.107,
0.055, then 0.037, 0.043, 0.048. Two cores of an AMD EPYC beside other work:
some 580 CPU seconds.

Over two starts and five seeds of GRPO, at 6e-4: greedy 0.533, then 0.909, hard
questions 0.074, then 0.067. The start decides: one ends at 0.854 to 0.878, the
other at 0.918 to 0.969 (docs/results.md, "Recipes compared in pairs").

Tried, on seed 0, before rows were joined:
  SFT alone, 1,000 steps: 0.540, hard questions 0.062.
  600 steps of SFT, then GRPO: 0.548, then 0.928.

Tried (experiments/results/learning.md):
  GRPO on easy and medium questions alone, `kl_beta=0.01`, 24 steps: 0.905,
    0.880, 0.838, hard 0.035, 0.032, 0.015.
  Seed 2, hard questions held by sft on samples of `stage:sft`, or by opd with
    the reference `init`, on a fifth of the groups: hard 0.01 to 0.02, 0.83 to
    0.85 on the others.
  Seed 2, hard questions by max_rl, a third of the groups: hard 0.060, 0.853.
  Seed 2, demonstrations beside GRPO: hard 0.072 to 0.075, 0.86.
  Seed 2, `:medium`: 0.920 where the recipe gave 0.888, sampled 0.805 where it
    gave 0.835, hard 0.033 (docs/sql.md).

Names used elsewhere, and their keys here (NAME is the stage, `grpo`):

    model_name                      model, NAME.init; the DIR of sql_llm.py
    num_generations                 NAME.envs.sql.group_size
    max_new_tokens, max_completion_length (of a turn)
                                    NAME.envs.sql.sampler.max_tokens
    max_episode_tokens              NAME.envs.sql.sampler.max_episode_tokens
    step_budget, max_turns          NAME.envs.sql.env.budget
    difficulty_filter               NAME.envs.sql.env.difficulties
    questions_path, db_dir          NAME.envs.sql.env.data.questions, .databases
    reward_funcs, reward_weights    NAME.envs.sql.env.reward, or .rewards
    beta (of the KL)                NAME.envs.sql.algorithm.kl_beta
    epsilon, epsilon_high           NAME.loss.rl.low, .high
    learning_rate                   NAME.optim.lr
    per_device_train_batch_size x gradient_accumulation_steps
                                    NAME.batch.prompts_per_step (tasks a step)
    max_steps, num_train_epochs     NAME.steps
    temperature                     NAME.envs.sql.sampler.temperature
    seed                            seed
    output_dir                      --workdir
    logging_steps                   every step is logged
    save_steps                      checkpoint.every

`:sft` is the first stage alone, to compare with (`--config.sft.steps=1000`, and
`--config.sft.envs.medium.env.teacher.haste=0.0` for a teacher without haste).
`:medium` gives medium questions three quarters of GRPO's samples, hard ones a
quarter. `:ppo` has a critic and one episode per question, of as many samples;
its stage is still named `grpo`. At lr 1.2e-3, in the CPU seconds of GRPO, its
greedy rate ends at 0.890, on hard questions at 0.045; from as many episodes, at
6e-4, 0.015 above GRPO's, for 2.5 times the CPU seconds.
`:tiny` runs every part and learns nothing.
"""

import dataclasses
import pathlib

import ml_collections

from configs import arguments, machinery
from posttrain import schema

# Words of the generated databases; see `posttrain.envs.sql.synth`.
TOKENIZER = schema.Tokenizer(
  path=str(pathlib.Path(__file__).with_name('sql_tokenizer.json')),
  eos='<|end|>',
)

# What is learned: questions about thousands of databases; evaluation has its
# own.
DATABASES = schema.SqlSynth(train_databases=4000, eval_databases=200)
QUESTIONS = schema.Sql(data=DATABASES, difficulties=('easy', 'medium'))
HARD = dataclasses.replace(QUESTIONS, difficulties=('hard',))
MEASURED = {
  'sql': schema.EnvEntry(env=QUESTIONS, ratio=0.0),
  'sql_hard': schema.EnvEntry(env=HARD, ratio=0.0),
}
# Demonstrations of a hasty teacher. Easy questions need few of them.
SHOWN = dataclasses.replace(
  QUESTIONS,
  data=dataclasses.replace(DATABASES, eval_databases=0),
  teacher=schema.SqlTeacher(haste=0.6),
)
TAUGHT = {
  'easy': schema.EnvEntry(
    env=dataclasses.replace(SHOWN, difficulties=('easy',)), ratio=0.2
  ),
  'medium': schema.EnvEntry(
    env=dataclasses.replace(SHOWN, difficulties=('medium',)), ratio=0.8
  ),
}

# How episodes are decoded and measured, in both stages. Turns are short, so
# the slots are checked often.
ROLLOUT = schema.Rollout(slots=128, prefill_rows=32, prefill_tokens=16, chunk=4)
# The suite is answered in one turn: about a table that is told, with steps left
# and with none but the last, and a question without a table.
EVAL = schema.Eval(
  prompts=400,
  samples=1,
  max_tokens=40,
  max_episode_tokens=144,
  suite=(
    'how many books are there\ntables: books\nleft: 8',
    'how many books are there\ntables: books\nleft: 1',
    'what is the number of the highest',
  ),
)

# Stage 1: SFT, on whole episodes.
SFT = schema.Stage(
  init='random',
  envs={**TAUGHT, **MEASURED},
  rollout=ROLLOUT,
  steps=500,
  batch=schema.Batch(
    prompts_per_step=64, row_tokens=128, joined_rows=2, micro_batch_tokens=1024
  ),
  optim=schema.Optim(lr=2e-3, schedule='cosine', warmup_steps=10),
  eval=dataclasses.replace(EVAL, every=250),
)

# Stage 2: GRPO, on as many hard questions as others.
EXPLORED = schema.EnvEntry(
  env=QUESTIONS,
  algorithm=schema.Grpo(),
  sampler=schema.Policy(temperature=1.0, max_tokens=40),
  group_size=8,
)
# Instead, mostly on medium questions: easy ones are always right by then, and
# hard ones are guessed.
MEDIUM = {
  'medium': dataclasses.replace(EXPLORED, env=TAUGHT['medium'].env, ratio=0.75),
  'sql_hard': dataclasses.replace(EXPLORED, env=HARD, ratio=0.25),
  'sql': MEASURED['sql'],
}
GRPO = schema.Stage(
  init='stage:sft',
  envs={'sql': EXPLORED, 'sql_hard': dataclasses.replace(EXPLORED, env=HARD)},
  rollout=ROLLOUT,
  steps=40,
  batch=schema.Batch(
    prompts_per_step=96, row_tokens=128, joined_rows=2, micro_batch_tokens=1024
  ),
  loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
  optim=schema.Optim(
    lr=3e-4, schedule='linear', warmup_steps=3, beta2=0.99, weight_decay=0.0
  ),
  eval=dataclasses.replace(EVAL, every=20),
)


# Instead, a critic, and as many episodes of as many questions.
PPO = dataclasses.replace(
  GRPO,
  envs={
    name: dataclasses.replace(entry, algorithm=schema.Ppo(), group_size=1)
    for name, entry in GRPO.envs.items()
  },
  batch=dataclasses.replace(GRPO.batch, prompts_per_step=8 * 96),
  critic=schema.Critic(kind='model', lr=5e-4, warmup_steps=3),
)
VARIANTS = {'medium': dataclasses.replace(GRPO, envs=MEDIUM), 'ppo': PPO}


def get_config(argument: str = '', grpo: schema.Stage = GRPO):
  variants = VARIANTS if grpo is GRPO else {}
  arguments.check_word(argument, 'tiny', 'sft', *variants)
  stages = {'sft': SFT, 'grpo': variants.get(argument, grpo)}
  if argument == 'sft':
    del stages['grpo']
  config = machinery.config_dict(
    schema.Run(
      model=schema.PRESETS['small'],
      tokenizer=TOKENIZER,
      checkpoint=schema.Checkpoint(every=100),
      stages=stages,
    )
  )
  if argument == 'tiny':
    shrink(config)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  config.model = machinery.node(schema.PRESETS['tiny'])
  config.checkpoint.every = 10
  for stage in (config.sft, config.grpo):
    for entry in stage.envs.values():
      entry.env.data.train_databases = 40
    stage.envs.sql.env.data.eval_databases = 20
    stage.envs.sql_hard.env.data.eval_databases = 20
    stage.rollout.slots = 16
    stage.rollout.prefill_rows = 8
    stage.steps = 20
    stage.batch.micro_batch_tokens = 512
    stage.eval.every = 10
    stage.eval.prompts = 10
  config.sft.batch.prompts_per_step = 8
  for entry in config.grpo.envs.values():
    # No answer is right: with pruning, no token would train.
    entry.algorithm.prune_zero_advantage = False
    entry.group_size = 4
  config.grpo.batch.prompts_per_step = 4
