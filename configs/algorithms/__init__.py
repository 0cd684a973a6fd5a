"""What the recipes of this folder have in common: a model, a start, a shape.

A byte-level transformer of 0.6 M parameters on two-digit sums, small enough
for a laptop. `warm` imitates a teacher who errs, and leaves room for an
algorithm; `trial` is the stage that an algorithm gets.
"""

import dataclasses
from typing import Any

from configs import common
from posttrain import schema

SUMS = schema.Arithmetic(
  ops=('+',), mistakes=0.3, train_tasks=4000, eval_tasks=250
)
DIFFERENCES = dataclasses.replace(SUMS, ops=('-',))
RIGHT = dataclasses.replace(SUMS, mistakes=0.0)  # shown without a mistake
SAMPLED = schema.Policy(temperature=1.0, max_tokens=40)


def is_tiny(argument: str) -> bool:
  """Reads the word behind a recipe's name: `:tiny` runs it in seconds."""
  if argument not in ('', 'tiny'):
    raise ValueError(f"the argument must be '' or 'tiny': got {argument!r}")
  return argument == 'tiny'


def warm(
  tiny: bool, steps: int, *, row_tokens: int = 64, **envs: Any
) -> schema.Stage:
  """Supervised fine-tuning on the demonstrations of some environments."""
  return _stage(
    tiny,
    init='random',
    steps=steps,
    prompts=64,
    row_tokens=row_tokens,
    lr=2e-3,
    envs={name: schema.EnvEntry(env=env) for name, env in envs.items()},
  )


def trial(
  tiny: bool,
  steps: int,
  *,
  init: str = 'stage:start',
  prompts: int = 64,
  row_tokens: int = 64,
  lr: float = 5e-4,
  **envs: schema.EnvEntry,
) -> schema.Stage:
  """The stage of an algorithm, with so many tasks a step."""
  return _stage(
    tiny,
    init=init,
    steps=steps,
    prompts=prompts,
    row_tokens=row_tokens,
    lr=lr,
    envs=envs,
  )


def _stage(tiny, *, init, steps, prompts, row_tokens, lr, envs) -> schema.Stage:
  return schema.Stage(
    init=init,
    steps=4 if tiny else steps,
    envs=envs,
    batch=schema.Batch(
      prompts_per_step=8 if tiny else prompts,
      row_tokens=row_tokens,
      micro_batch_tokens=16 * row_tokens,
    ),
    optim=schema.Optim(
      lr=lr,
      schedule='cosine',
      warmup_steps=1 if tiny else 10,
      beta2=0.99,
      weight_decay=0.0,
    ),
    rollout=schema.Rollout(
      slots=16 if tiny else 256, prefill_rows=8 if tiny else 32
    ),
    eval=schema.Eval(
      prompts=8 if tiny else 250, samples=2 if tiny else 8, max_tokens=40
    ),
  )


def run(tiny: bool, **stages: schema.Stage):
  """The ConfigDict of a recipe, with its stages in order."""
  return common.get_config(
    schema.Run(
      model=schema.PRESETS['tiny' if tiny else 'small'],
      checkpoint=schema.Checkpoint(every=1000),
      stages=stages,
    )
  )
