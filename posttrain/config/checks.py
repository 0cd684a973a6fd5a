"""Cross-checks of a run's options: what spans nodes.

Impossible combinations, and keys that were set although nothing would read
them. Each is one line with the dotted key and what to do.
"""

from collections.abc import Mapping

from posttrain import schema
from posttrain.config import env_checks


def check(run: schema.Run) -> None:
  """Checks what spans nodes: impossible combinations and unread keys.

  Raises:
    ValueError: one line with the dotted key and what to do.
  """
  earlier = {}
  for name, stage in run.stages.items():
    path = f'config.{name}'
    env_checks.check_name(name, path)
    env_checks.check_earlier(stage.init, earlier, f'{path}.init')
    if stage.optim.schedule == 'constant':
      env_checks.unread(
        stage.optim,
        'final_lr_fraction',
        f'{path}.optim',
        "schedule is 'constant'",
      )
    updates = stage.steps * stage.updates_per_rollout
    if stage.optim.warmup_steps >= updates:
      raise ValueError(
        f"{path}.optim.warmup_steps must be < the stage's {updates} "
        f'updates: got {stage.optim.warmup_steps}; lower it too'
      )
    _check_kind(stage, path)
    _check_losses(stage, path)
    _check_lora(stage, path)
    if stage.kind != 'tokens':
      _check_pairs(stage, earlier, path)
    for env_name, entry in stage.envs.items() if stage.kind == 'tokens' else ():
      env_checks.check(entry, stage, earlier, f'{path}.envs.{env_name}')
    earlier[name] = stage.kind


def _check_kind(stage: schema.Stage, path: str) -> None:
  """What stages of other kinds read."""
  why = f'kind is {stage.kind!r}'
  for kind in ('preference', 'ranking'):
    if stage.kind != kind:
      env_checks.unread(stage.loss, kind, f'{path}.loss', why)
  if stage.kind == 'tokens':
    env_checks.unread(stage, 'pairs', path, why)


def _check_pairs(
  stage: schema.Stage, earlier: Mapping[str, str], path: str
) -> None:
  """A stage on pairs: nobody's rollouts train, and no reward is read."""
  why = f'kind is {stage.kind!r}'
  for name, entry in stage.envs.items():
    here = f'{path}.envs.{name}'
    env_checks.check_name(name, here)
    env_checks.check_env(entry, here)
    for field in ('algorithm', 'sampler', 'rewards', 'judge', 'group_size'):
      env_checks.unread(entry, field, here, why)
  if stage.kind == 'preference':
    reference = getattr(stage.loss.preference, 'reference', None)
    path += '.loss.preference.reference'
    env_checks.check_earlier(reference, earlier, path)
    return
  for field in ('prompts', 'samples', 'ks', 'suite', 'kl', 'max_tokens'):
    env_checks.unread(
      stage.eval, field, f'{path}.eval', f'{why}, which has no words'
    )
  if stage.lora.rank:
    raise ValueError(
      f"{path}.lora.rank must be 0 where kind is 'ranking': got "
      f'{stage.lora.rank}; the head of a reward model trains with the rest'
    )


def _check_losses(stage: schema.Stage, path: str) -> None:
  """A loss that no algorithm of the stage trains by is read by nobody."""
  entries = stage.envs.values() if stage.kind == 'tokens' else ()
  trained = {env_checks.component(entry) for entry in entries}
  if 'rl' not in trained:
    env_checks.unread(
      stage.loss, 'rl', f'{path}.loss', 'no algorithm trains rl'
    )
  if 'ref_kl' not in trained and not any(
    getattr(entry.algorithm, 'kl_beta', 0) for entry in entries
  ):
    env_checks.unread(
      stage.loss, 'ref_kl', f'{path}.loss', 'no algorithm has a kl_beta'
    )
  rl, path = stage.loss.rl, f'{path}.loss.rl'
  if rl.sampler_is_mode != 'none' and stage.updates_per_rollout > 1:
    raise ValueError(
      f"{path}.sampler_is_mode must be 'none' where updates_per_rollout is "
      f'{stage.updates_per_rollout}: got {rl.sampler_is_mode!r}; after the '
      'first update the policy is no longer the old one that it stands for; '
      'set updates_per_rollout to 1'
    )
  if isinstance(rl, schema.CustomRl):
    path += '.import_path'
    env_checks.check_takes('inputs', rl.import_path, rl.kwargs, path)


def _check_lora(stage: schema.Stage, path: str) -> None:
  """What a correction is made of, and of what."""
  if not stage.lora.rank:
    for field in ('alpha', 'rslora', 'targets'):
      env_checks.unread(stage.lora, field, f'{path}.lora', 'rank is 0')
  elif stage.init == 'random':
    raise ValueError(
      f"{path}.lora.rank must be 0 where init is 'random': got "
      f'{stage.lora.rank}; a correction of random weights learns little, and '
      'they would be frozen'
    )
