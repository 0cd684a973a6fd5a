"""SFT on arithmetic from random weights, on a laptop.

    python -m posttrain.main --config=configs/arithmetic_sft.py --workdir=DIR
"""

from configs import common
from posttrain import schema


def get_config(argument: str = ''):
  tiny = argument == 'tiny'
  env = schema.Arithmetic()
  sft = schema.Stage(
      steps=500,
      envs={
          'arithmetic': schema.EnvEntry(
              env=env, algorithm=schema.Sft(), sampler=schema.Dataset()
          )
      },
      batch=schema.Batch(prompts_per_step=64),
      optim=schema.Optim(lr=3e-3, warmup_steps=20),
      eval=schema.Eval(),
  )
  del tiny
  return common.get_config(schema.Run(stages={'sft': sft}))
