"""Pieces that the recipes of this folder share: environments, stages, the run.

A byte-level transformer of 0.6 M parameters on two-digit sums. The stages
`teacher` and `start` imitate demonstrations, the latter some with mistakes; the
stage `main` trains by the recipe's algorithm.
"""

import ml_collections

from configs import common, machinery
from posttrain import schema

# What is learned: sums and differences, three demonstrations of ten with a
# mistake, or none.
SUMS = schema.Arithmetic(
  ops=('+',), mistakes=0.3, train_tasks=4000, eval_tasks=250
)
DIFFERENCES = schema.Arithmetic(
  ops=('-',), mistakes=0.3, train_tasks=4000, eval_tasks=250
)
RIGHT_SUMS = schema.Arithmetic(
  ops=('+',), mistakes=0.0, train_tasks=4000, eval_tasks=250
)

# How answers are sampled in training.
SAMPLER = schema.Policy(temperature=1.0, max_tokens=40)


def imitation(
  steps: int, *, row_tokens: int = 64, **envs: schema.Env
) -> schema.Stage:
  """Returns SFT from random weights on the demonstrations of environments."""
  return _stage(
    init='random',
    envs={name: schema.EnvEntry(env=env) for name, env in envs.items()},
    steps=steps,
    prompts=64,
    row_tokens=row_tokens,
    lr=2e-3,
    kl=False,  # to random weights
  )


def trial(
  steps: int,
  *,
  prompts: int,
  row_tokens: int = 64,
  lr: float = 1e-4,
  **envs: schema.EnvEntry,
) -> schema.Stage:
  """Returns the stage of an algorithm, with `prompts` tasks per step."""
  return _stage(
    init='stage:start',
    envs=envs,
    steps=steps,
    prompts=prompts,
    row_tokens=row_tokens,
    lr=lr,
    kl=True,
  )


def _stage(*, init, envs, steps, prompts, row_tokens, lr, kl) -> schema.Stage:
  return schema.Stage(
    init=init,
    envs=envs,
    rollout=schema.Rollout(slots=256, prefill_rows=32),
    steps=steps,
    batch=schema.Batch(
      prompts_per_step=prompts,
      row_tokens=row_tokens,
      micro_batch_tokens=16 * row_tokens,
    ),
    optim=schema.Optim(
      lr=lr, schedule='cosine', warmup_steps=10, beta2=0.99, weight_decay=0.0
    ),
    eval=schema.Eval(
      prompts=250,
      samples=8,
      max_tokens=40,
      kl=kl,
      suite=common.ARITHMETIC_SUITE,
    ),
  )


def config_dict(**stages: schema.Stage) -> ml_collections.ConfigDict:
  """Returns the ConfigDict of a recipe, with its stages in order."""
  return machinery.config_dict(
    schema.Run(
      model=schema.PRESETS['small'],
      checkpoint=schema.Checkpoint(every=1000),
      stages=stages,
    )
  )


def shrink(config: ml_collections.ConfigDict, *, unpruned: str = '') -> None:
  """Sets sizes that run in seconds, in every stage.

  Args:
    config: the run's config.
    unpruned: an environment of `main` none of whose answers is right, so that
      with pruning no token of it would train; '' = none.
  """
  config.model = machinery.node(schema.PRESETS['tiny'])
  for name in config.stages:
    stage = config[name]
    stage.rollout.slots = 16
    stage.rollout.prefill_rows = 8
    stage.steps = 4
    stage.batch.prompts_per_step = 8
    stage.optim.warmup_steps = 1
    stage.eval.prompts = 8
    stage.eval.samples = 2
  if unpruned:
    config.main.envs[unpruned].algorithm.prune_zero_advantage = False
