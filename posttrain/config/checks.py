"""Checks that span several options of a run.

They refuse impossible combinations, and keys that nothing would read. Each
error is one line with the dotted key and what to do.
"""

from collections.abc import Mapping

from posttrain import schema
from posttrain.config import env_checks, selection_checks


def check(run: schema.Run) -> None:
  """Refuses impossible combinations of options, and keys that nothing reads.

  Raises:
    ValueError: one line with the dotted key and what to do.
  """
  earlier = {}
  for name, stage in run.stages.items():
    path = f'config.{name}'
    env_checks.check_name(name, path)
    env_checks.check_earlier(stage.init, earlier, f'{path}.init')
    _check_optim(stage, path)
    for field in _UNREAD_LOSSES[stage.kind]:
      env_checks.unread(
        stage.loss, field, f'{path}.loss', f'kind is {stage.kind!r}'
      )
    _check_lora(stage, path)
    selection_checks.check(stage, path)
    _check_workers(stage, path)
    _check_draws(stage, path)
    _KINDS[stage.kind](stage, earlier, path)
    earlier[name] = stage.kind
  selection_checks.check_apart(run.stages)


def check_makes_pairs(stage: schema.Stage, path: str) -> None:
  """Checks that a stage has an environment whose answers form pairs.

  Raises:
    ValueError: one line with the dotted key.
  """
  try:
    stage.require_envs()
  except schema.FieldError as error:
    raise ValueError(f'{path}.{error.field} {error.detail}') from None


def _check_optim(stage: schema.Stage, path: str) -> None:
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


def _check_tokens(
  stage: schema.Stage, earlier: Mapping[str, str], path: str
) -> None:
  env_checks.unread(stage, 'pairs', path, f'kind is {stage.kind!r}')
  _check_losses(stage, path)
  for name, entry in stage.envs.items():
    env_checks.check(entry, stage, earlier, f'{path}.envs.{name}')


def _check_pair_envs(stage: schema.Stage, path: str) -> None:
  """Checks environments whose rollouts do not train."""
  if isinstance(stage.pairs, schema.MadePairs):
    check_makes_pairs(stage, path)
  for name, entry in stage.envs.items():
    key = f'{path}.envs.{name}'
    env_checks.check_name(name, key)
    env_checks.check_env(entry, key)
    for field in ('algorithm', 'sampler', 'rewards', 'judge', 'group_size'):
      env_checks.unread(entry, field, key, f'kind is {stage.kind!r}')


def _check_preference(
  stage: schema.Stage, earlier: Mapping[str, str], path: str
) -> None:
  _check_pair_envs(stage, path)
  env_checks.check_earlier(
    getattr(stage.loss.preference, 'reference', None),
    earlier,
    f'{path}.loss.preference.reference',
  )


def _check_ranking(
  stage: schema.Stage, earlier: Mapping[str, str], path: str
) -> None:
  del earlier
  _check_pair_envs(stage, path)
  for field in ('prompts', 'samples', 'ks', 'suite', 'kl', 'max_tokens'):
    env_checks.unread(
      stage.eval,
      field,
      f'{path}.eval',
      f'kind is {stage.kind!r}, whose model generates no text',
    )
  if stage.lora.rank:
    raise ValueError(
      f"{path}.lora.rank must be 0 where kind is 'ranking': got "
      f'{stage.lora.rank}; the head of a reward model trains with the rest'
    )


_KINDS = {
  'tokens': _check_tokens,
  'preference': _check_preference,
  'ranking': _check_ranking,
}
# Fields of `loss` that stages of a kind do not read.
_UNREAD_LOSSES = {
  'tokens': ('preference', 'ranking'),
  'preference': ('ranking', 'rl', 'ref_kl'),
  'ranking': ('preference', 'rl', 'ref_kl'),
}


def _check_losses(stage: schema.Stage, path: str) -> None:
  """Refuses losses that no algorithm of the stage trains."""
  components = {env_checks.component(entry) for entry in stage.envs.values()}
  if 'rl' not in components:
    _check_algorithm_named(stage, path)
    env_checks.unread(
      stage.loss, 'rl', f'{path}.loss', 'no algorithm trains rl'
    )
  if 'ref_kl' not in components and not any(
    getattr(entry.algorithm, 'kl_beta', 0) for entry in stage.envs.values()
  ):
    env_checks.unread(
      stage.loss, 'ref_kl', f'{path}.loss', 'no algorithm has a kl_beta'
    )
  rl, path = stage.loss.rl, f'{path}.loss.rl'
  if rl.sampler_is_mode != 'none' and stage.updates_per_rollout > 1:
    raise ValueError(
      f"{path}.sampler_is_mode must be 'none' where updates_per_rollout is "
      f'{stage.updates_per_rollout}: got {rl.sampler_is_mode!r}; after the '
      'first update the policy is no longer the one that sampled; set '
      'updates_per_rollout to 1'
    )
  if isinstance(rl, schema.CustomRl):
    path += '.import_path'
    env_checks.check_takes('inputs', rl.import_path, rl.kwargs, path)


def _check_algorithm_named(stage: schema.Stage, path: str) -> None:
  """Refuses a default algorithm beside a loss that it would not train.

  A recipe of rl has such a loss, whose environments may be replaced.
  """
  rl, default = stage.loss.rl, schema.Loss().rl
  left = [
    name
    for name, entry in stage.envs.items()
    if entry.algorithm == schema.Sft() and entry.sampler == schema.Dataset()
  ]
  if left and rl.type != default.type:
    raise ValueError(
      f'{path}.envs.{left[0]}.algorithm must train rl where loss.rl is '
      f"{rl.type!r}: got 'sft', the default; name one that does, such as "
      '"algorithm": {"type": "grpo"}, with "sampler": {"type": "policy"}; '
      f'for SFT, {path}.loss.rl must be left at {default.type!r}, as no '
      'algorithm trains rl'
    )


def _check_workers(stage: schema.Stage, path: str) -> None:
  """Refuses a number of workers without workers."""
  if stage.rollout.workers == 'threads':
    env_checks.unread(
      stage.rollout, 'num_workers', f'{path}.rollout', "workers is 'threads'"
    )


def _check_draws(stage: schema.Stage, path: str) -> None:
  """Refuses dynamic sampling where no group can lack credit."""
  if stage.kind != 'tokens' or not any(
    entry.ratio and env_checks.component(entry) == 'rl'
    for entry in stage.envs.values()
  ):
    env_checks.unread(
      stage.batch, 'max_draws', f'{path}.batch', 'no algorithm trains rl'
    )


def _check_lora(stage: schema.Stage, path: str) -> None:
  """Refuses LoRA on random weights, and its options without LoRA."""
  if not stage.lora.rank:
    for field in ('alpha', 'rslora', 'targets'):
      env_checks.unread(stage.lora, field, f'{path}.lora', 'rank is 0')
  elif stage.init == 'random':
    raise ValueError(
      f"{path}.lora.rank must be 0 where init is 'random': got "
      f'{stage.lora.rank}; an adapter of frozen random weights learns '
      'little; name a directory with weights, as in '
      '--config=RECIPE:DIR,data.jsonl, or with --config.model=DIR '
      f'--config.tokenizer.path=DIR --{path}.init=DIR'
    )
