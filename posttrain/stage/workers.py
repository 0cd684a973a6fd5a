"""The worker processes of a stage, from its options."""

from collections.abc import Mapping

from posttrain import schema
from posttrain.envs import base
from posttrain.rollout import ray_workers, remote


def make(
  name: str, stage: schema.Stage, envs: Mapping[str, base.Env]
) -> remote.Remote | None:
  """Builds the workers of a stage, None if it has none; starts nothing.

  Args:
    name: the stage's name.
    stage: its options.
    envs: its environments.

  Raises:
    ValueError: Ray is not installed, nothing would use the workers, or an
      environment needs what this process alone has.
  """
  if stage.rollout.workers == 'threads':
    return None
  key = f'config.{name}.rollout.workers'
  ray_workers.check(key)
  options = {k: stage.envs[k].env for k, env in envs.items() if env.blocking}
  for env in options:
    judge = stage.envs[env].judge
    if judge is not None:
      raise ValueError(
        f"config.{name}.envs.{env}.judge must be None where {key}='ray': got "
        f'{str(judge)!r}, a model of this process that its workers cannot '
        "call; set workers='threads'"
      )
  functions = [
    reward
    for entry in stage.envs.values()
    for reward in entry.rewards.values()
    if reward.fn is not None and reward.judge is None
  ]
  if not options and not functions:
    raise ValueError(
      f"{key} must be 'threads' where no environment is blocking and no "
      f"reward function is called without a judge: got 'ray'; nothing would "
      'use the workers'
    )
  return remote.Remote(stage.rollout, options, ray_workers.start)
