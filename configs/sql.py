"""SFT, then GRPO, on SQL exploration, from random weights, on a laptop."""

import dataclasses
import pathlib

from configs import common
from posttrain import schema

# Words of the generated databases; see `posttrain.envs.sql.tokenizer`.
TOKENIZER = schema.Tokenizer(
    path=str(pathlib.Path(__file__).with_name('sql_tokenizer.json')),
    eos='<|end|>',
)


def get_config(argument: str = ''):
  if argument not in ('', 'tiny'):
    raise ValueError(f"the argument must be '' or 'tiny': got {argument!r}")
  tiny = argument == 'tiny'

  data = schema.SqlSynth(
      train_databases=40 if tiny else 4000, eval_databases=20 if tiny else 400
  )
  env = schema.Sql(data=data, difficulties=('easy', 'medium'))
  hard = dataclasses.replace(env, difficulties=('hard',))
  rollout = schema.Rollout(
      slots=16 if tiny else 256, prefill_rows=8 if tiny else 64,
      prefill_tokens=16, chunk=8,
  )  # fmt: skip
  evaluation = schema.Eval(
      every=10 if tiny else 20, prompts=10 if tiny else 400,
      samples=2 if tiny else 4, max_tokens=24,
  )  # fmt: skip
  sft = schema.Stage(
      init='random',
      steps=20 if tiny else 600,
      envs={
          'sql': schema.EnvEntry(env=env, algorithm=schema.Sft(),
                                 sampler=schema.Dataset()),
          'sql_hard': schema.EnvEntry(env=hard, ratio=0.0),
      },
      batch=schema.Batch(
          prompts_per_step=8 if tiny else 64, row_tokens=128,
          micro_batch_tokens=512 if tiny else 1024,
      ),
      optim=schema.Optim(lr=2e-3, schedule='cosine', warmup_steps=10),
      rollout=rollout, eval=dataclasses.replace(evaluation, every=None),
  )  # fmt: skip
  grpo = schema.Stage(
      init='stage:sft',
      steps=20 if tiny else 60,
      envs={
          'sql': schema.EnvEntry(
              env=env,
              algorithm=schema.Grpo(
                  kl_beta=0.01, prune_zero_advantage=not tiny
              ),
              sampler=schema.Policy(temperature=1.0, max_tokens=24),
              group_size=4 if tiny else 8,
          ),
          'sql_hard': schema.EnvEntry(env=hard, ratio=0.0),
      },
      batch=schema.Batch(
          prompts_per_step=4 if tiny else 48, row_tokens=128,
          micro_batch_tokens=512 if tiny else 1024,
      ),
      loss=schema.Loss(rl=schema.Clip(low=0.2, high=0.28)),
      optim=schema.Optim(
          lr=3e-4, schedule='linear', warmup_steps=5, beta2=0.99,
          weight_decay=0.0,
      ),
      rollout=rollout, eval=evaluation,
  )  # fmt: skip
  return common.get_config(schema.Run(
      model=schema.PRESETS['tiny' if tiny else 'small'], tokenizer=TOKENIZER,
      checkpoint=schema.Checkpoint(every=10 if tiny else 100),
      stages={'sft': sft, 'grpo': grpo},
  ))
