"""SFT on two-digit arithmetic, from random weights, on a laptop.

    python -m posttrain.main --config=configs/arithmetic_sft.py --workdir=DIR

A byte-level transformer of 0.6 M parameters sees demonstrations that show
their work (`47 + 85`: `40+80=120, 7+5=12, 120+12=\\boxed{132}`) and is asked
500 questions that it has not seen. Expected, measured on two cores: format
rate >= 0.99, pass rate >= 0.98 (0.90 after 200 of the 350 steps), in two
minutes with everything, 0.8 GB of memory.

`:tiny` runs every part of it in seconds and learns next to nothing.
"""

from configs import common
from posttrain import schema


def get_config(argument: str = ''):
  if argument not in ('', 'tiny'):
    raise ValueError(f"the argument must be '' or 'tiny': got {argument!r}")
  tiny = argument == 'tiny'

  # What is learned: the questions, and how their answers are shown.
  arithmetic = schema.EnvEntry(
    env=schema.Arithmetic(ops=('+', '-'), max_operand=99, worked=True),
    algorithm=schema.Sft(),
    sampler=schema.Dataset(),
  )
  # How much of it at a time. No demonstration is longer than 57 tokens.
  batch = schema.Batch(
    prompts_per_step=8 if tiny else 64,
    row_tokens=64,
    micro_batch_tokens=256 if tiny else 1024,
  )
  # How it is learned.
  sft = schema.Stage(
    init='random',
    steps=20 if tiny else 350,
    envs={'arithmetic': arithmetic},
    batch=batch,
    optim=schema.Optim(lr=3e-3, schedule='cosine', warmup_steps=10),
    eval=schema.Eval(
      every=10 if tiny else 100,
      prompts=20 if tiny else 500,
      samples=2 if tiny else 8,
      max_tokens=40,
    ),
    rollout=schema.Rollout(slots=16 if tiny else 256),
  )
  run = schema.Run(
    model=schema.PRESETS['tiny' if tiny else 'small'],
    checkpoint=schema.Checkpoint(every=10 if tiny else 100),
    stages={'sft': sft},
  )
  return common.get_config(run)
