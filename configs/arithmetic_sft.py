"""SFT on two-digit arithmetic, from random weights.

    python -m posttrain.main --config=configs/arithmetic_sft.py --workdir=DIR

A byte-level transformer of 0.6 M parameters imitates demonstrations that show
their work (`47 + 85`: `40+80=120, 7+5=12, 120+12=\\boxed{132}`), without
mistakes, and answers 500 unseen questions.

Expected, seeds 0 to 2: greedy pass rate 1.000, 0.992, 0.998, format rate 1.000,
0.998, 1.000; seed 0 after 100, 200, 300, 350 steps: 0.176, 0.918, 0.996, 1.000.
Two cores of an AMD EPYC (Zen 4): 116 s with five evaluations, 0.8 GB, some
21,000 trained tokens per second.

Tried:
  Mistakes in three demonstrations of ten, lr 2e-3 (`--config.sft.envs.
    arithmetic.env.mistakes=0.3`), seed 0: sampled pass rate 0.597, 0.694, 0.749
    after 500, 1,000, 1,500 steps, greedy 1.000 in the end.

`:tiny` runs every part in seconds and learns next to nothing.
"""

import ml_collections

from configs import arguments, common, machinery
from posttrain import schema

SFT = schema.Stage(
  init='random',
  # What is learned: the questions, and the demonstrations of their answers.
  envs={
    'arithmetic': schema.EnvEntry(
      env=schema.Arithmetic(ops=('+', '-'), max_operand=99, worked=True),
      algorithm=schema.Sft(),
      sampler=schema.Dataset(),
    )
  },
  # How answers are decoded.
  rollout=schema.Rollout(slots=256),
  # How it trains. No demonstration is longer than 57 tokens.
  steps=350,
  batch=schema.Batch(
    prompts_per_step=64, row_tokens=64, micro_batch_tokens=1024
  ),
  optim=schema.Optim(lr=3e-3, schedule='cosine', warmup_steps=10),
  # Evaluation.
  eval=schema.Eval(
    every=100,
    prompts=500,
    samples=8,
    max_tokens=40,
    suite=common.ARITHMETIC_SUITE,
  ),
)


def get_config(argument: str = ''):
  arguments.check_word(argument, 'tiny')
  config = machinery.config_dict(
    schema.Run(
      model=schema.PRESETS['small'],
      checkpoint=schema.Checkpoint(every=100),
      stages={'sft': SFT},
    )
  )
  if argument == 'tiny':
    shrink(config)
  return config


def shrink(config: ml_collections.ConfigDict) -> None:
  """Sets sizes that run in seconds."""
  config.model = machinery.node(schema.PRESETS['tiny'])
  config.checkpoint.every = 10
  config.sft.rollout.slots = 16
  config.sft.steps = 20
  config.sft.batch.prompts_per_step = 8
  config.sft.batch.micro_batch_tokens = 256
  config.sft.eval.every = 10
  config.sft.eval.prompts = 20
  config.sft.eval.samples = 2
