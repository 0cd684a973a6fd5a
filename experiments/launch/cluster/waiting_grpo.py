"""A few steps of GRPO on an environment and a reward that wait; learns nothing.

python -m posttrain.main --config=experiments/launch/cluster/waiting_grpo.py
    --workdir=DIR [--config.grpo.rollout.workers=ray]
"""

import dataclasses

from configs import arguments, machinery
from posttrain import schema

ENTRY = schema.EnvEntry(
  env=schema.CustomEnv(
    import_path='experiments.launch.cluster.waiting:Waiting',
    kwargs={'options': {'turns': 3}, 'seconds': 0.02},
  ),
  algorithm=schema.Grpo(),
  sampler=schema.Policy(max_tokens=12),
  rewards={
    'env': schema.RewardFn(),
    'letters': schema.RewardFn(
      fn='experiments.launch.cluster.waiting:letters', kwargs={'seconds': 0.02}
    ),
  },
  group_size=4,
)
GRPO = schema.Stage(
  init='random',
  envs={'sort': ENTRY},
  rollout=schema.Rollout(slots=8, prefill_rows=8, chunk=4, num_workers=2),
  steps=20,
  batch=schema.Batch(
    prompts_per_step=4, row_tokens=256, micro_batch_tokens=1024
  ),
  optim=schema.Optim(lr=1e-3),
  eval=schema.Eval(prompts=8, samples=2, max_tokens=12, every=10),
)


def get_config(argument: str = ''):
  """Returns the recipe; 'ray': in two Ray workers, '' = in threads."""
  arguments.check_word(argument, 'ray')
  rollout = dataclasses.replace(GRPO.rollout, workers='ray')
  if not argument:
    rollout = dataclasses.replace(GRPO.rollout, num_workers=4)
  return machinery.config_dict(
    schema.Run(
      model=schema.PRESETS['tiny'],
      checkpoint=schema.Checkpoint(every=5),
      stages={'grpo': dataclasses.replace(GRPO, rollout=rollout)},
    )
  )
