"""SFT, then GRPO, on SQL exploration, from random weights, on a laptop.

An agent is asked about a database that it cannot see, and has eight steps to
find the answer: DESCRIBE, SAMPLE, QUERY, ANSWER. A word-level transformer of
0.7 M parameters imitates a teacher in a hurry, who answers three medium
questions of five with a value that a sample of rows has shown; then it plays by
itself, and learns to look what the columns are called, and to query.

    python -m posttrain.main --config=configs/sql.py --workdir=DIR

Measured on two cores of an Intel Xeon (2.5 GHz), 400 unseen questions, seeds 0,
1 and 2: greedy pass rate 0.532, 0.542, 0.545 after SFT, then 0.932, 0.945,
0.842 after GRPO; hard questions 0.060, 0.095, 0.072, then 0.038, 0.032, 0.030;
eleven minutes with everything.

The names that are used elsewhere, and ours (NAME is `grpo`, the stage):

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
`--config.sft.envs.medium.env.teacher.haste=0.0` for a teacher with time).
`:tiny` runs every part of it and learns nothing.
"""

import dataclasses
import pathlib

from configs import common
from posttrain import schema

# Words of the generated databases; see `posttrain.envs.sql.tokenizer`.
TOKENIZER = schema.Tokenizer(
  path=str(pathlib.Path(__file__).with_name('sql_tokenizer.json')),
  eos='<|end|>',
)
GRPO = schema.Grpo(kl_beta=0.01)


def get_config(argument: str = '', algorithm: schema.Grpo | schema.Echo = GRPO):
  if argument not in ('', 'tiny', 'sft'):
    raise ValueError(
      f"the argument must be '', 'tiny' or 'sft': got {argument!r}"
    )
  tiny = argument == 'tiny'

  sql, measured, taught = _environments(tiny)
  # How episodes are played: short turns, so looks at the slots are frequent.
  rollout = schema.Rollout(
    slots=16 if tiny else 128,
    prefill_rows=8 if tiny else 32,
    prefill_tokens=16,
    chunk=4,
  )
  evaluation = schema.Eval(
    prompts=10 if tiny else 400,
    samples=1,
    max_tokens=40,
    max_episode_tokens=144,
  )
  # First by example, whole episodes.
  sft = schema.Stage(
    init='random',
    steps=20 if tiny else 500,
    envs={**taught, **measured},
    batch=schema.Batch(
      prompts_per_step=8 if tiny else 64,
      row_tokens=128,
      micro_batch_tokens=512 if tiny else 1024,
    ),
    optim=schema.Optim(lr=2e-3, schedule='cosine', warmup_steps=10),
    rollout=rollout,
    eval=dataclasses.replace(evaluation, every=10 if tiny else 250),
  )
  # Then by trial, near what it was.
  grpo = schema.Stage(
    init='stage:sft',
    steps=20 if tiny else 24,
    envs={
      **measured,
      'sql': schema.EnvEntry(
        env=sql,
        # No answer of the tiny one is right: pruned, nothing would be left.
        algorithm=dataclasses.replace(algorithm, prune_zero_advantage=not tiny),
        sampler=schema.Policy(temperature=1.0, max_tokens=40),
        group_size=4 if tiny else 8,
      ),
    },
    batch=schema.Batch(
      prompts_per_step=4 if tiny else 48,
      row_tokens=128,
      micro_batch_tokens=512 if tiny else 1024,
    ),
    loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
    optim=schema.Optim(
      lr=3e-4, schedule='linear', warmup_steps=3, beta2=0.99, weight_decay=0.0
    ),
    rollout=rollout,
    eval=dataclasses.replace(evaluation, every=10 if tiny else 12),
  )
  return common.get_config(
    schema.Run(
      model=schema.PRESETS['tiny' if tiny else 'small'],
      tokenizer=TOKENIZER,
      checkpoint=schema.Checkpoint(every=10 if tiny else 100),
      stages={'sft': sft} if argument == 'sft' else {'sft': sft, 'grpo': grpo},
    )
  )


def _environments(tiny: bool):
  """Returns what is asked, what is measured alone, and what is taught."""
  # What is asked, of thousands of databases; evaluation has its own.
  data = schema.SqlSynth(
    train_databases=40 if tiny else 4000, eval_databases=20 if tiny else 200
  )
  sql = schema.Sql(data=data, difficulties=('easy', 'medium'))
  measured = {
    'sql': schema.EnvEntry(env=sql, ratio=0.0),
    'sql_hard': schema.EnvEntry(
      env=dataclasses.replace(sql, difficulties=('hard',)), ratio=0.0
    ),
  }
  # Who shows how: a teacher in a hurry, who mostly answers with something that
  # a sample of rows has shown. Easy questions need few demonstrations.
  shown = dataclasses.replace(
    sql,
    data=dataclasses.replace(data, eval_databases=0),
    teacher=schema.SqlTeacher(haste=0.6),
  )
  taught = {
    'easy': schema.EnvEntry(
      env=dataclasses.replace(shown, difficulties=('easy',)), ratio=0.2
    ),
    'medium': schema.EnvEntry(
      env=dataclasses.replace(shown, difficulties=('medium',)), ratio=0.8
    ),
  }
  return sql, measured, taught
