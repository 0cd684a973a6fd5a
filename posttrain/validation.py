"""Cross-checks of a run's options: what spans nodes.

Impossible combinations, and keys that were set although nothing would read
them. Each is one line with the dotted key and what to do.
"""

import dataclasses
import inspect
import re
import warnings
from collections.abc import Sequence
from typing import Any

from posttrain import algorithms, envs, imports, schema


def check(run: schema.Run) -> None:
  """Checks what spans nodes: impossible combinations and unread keys.

  Raises:
    ValueError: one line with the dotted key and what to do.
  """
  earlier = []
  for name, stage in run.stages.items():
    path = f'config.{name}'
    _check_name(name, path)
    kind, _, target = stage.init.partition(':')
    if kind == 'stage' and target not in earlier:
      raise ValueError(
          f"{path}.init must name an earlier stage: got {stage.init!r}, "
          f'expected one of {tuple(earlier)}'
      )
    earlier.append(name)
    if stage.optim.schedule == 'constant':
      _unread(stage.optim, 'final_lr_fraction', f'{path}.optim',
              "schedule is 'constant'")
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
      continue
    for env_name, entry in stage.envs.items():
      _check_name(env_name, f'{path}.envs.{env_name}')
      _check_sampler(entry, stage, f'{path}.envs.{env_name}')
      _check_env(entry, f'{path}.envs.{env_name}')
      _check_group(entry, f'{path}.envs.{env_name}')
      _check_references(entry, earlier, f'{path}.envs.{env_name}')
      _check_rewards(entry, f'{path}.envs.{env_name}')
      _check_functions(entry, f'{path}.envs.{env_name}')
      if len(stage.envs) == 1:
        _unread(entry, 'ratio', f'{path}.envs.{env_name}',
                'there is one environment')


def _check_name(name: str, path: str) -> None:
  if not re.fullmatch(r'[A-Za-z0-9_-]+', name):
    raise ValueError(
        f'{path} must be named with letters, digits, _ and -: metric names '
        'and file names are made of it'
    )


def _check_kind(stage: schema.Stage, path: str) -> None:
  """What stages of other kinds read."""
  why = f'kind is {stage.kind!r}'
  for kind in ('preference', 'ranking'):
    if stage.kind != kind:
      _unread(stage.loss, kind, f'{path}.loss', why)
  if stage.kind == 'tokens':
    _unread(stage, 'pairs', path, why)


def _check_pairs(
    stage: schema.Stage, stages: Sequence[str], path: str
) -> None:
  """A stage on pairs: nobody's rollouts train, and no reward is read."""
  why = f'kind is {stage.kind!r}'
  for name, entry in stage.envs.items():
    here = f'{path}.envs.{name}'
    _check_name(name, here)
    _check_env(entry, here)
    for field in ('algorithm', 'sampler', 'rewards', 'judge', 'group_size'):
      _unread(entry, field, here, why)
  if stage.kind == 'preference':
    reference = getattr(stage.loss.preference, 'reference', None)
    _check_earlier(reference, stages, f'{path}.loss.preference.reference')
    return
  for field in ('prompts', 'samples', 'ks', 'suite', 'kl', 'max_tokens'):
    _unread(stage.eval, field, f'{path}.eval', f'{why}, which has no words')
  if stage.lora.rank:
    raise ValueError(
        f"{path}.lora.rank must be 0 where kind is 'ranking': got "
        f'{stage.lora.rank}; the head of a reward model trains with the rest'
    )


def _check_losses(stage: schema.Stage, path: str) -> None:
  """A loss that no algorithm of the stage trains by is read by nobody."""
  entries = stage.envs.values() if stage.kind == 'tokens' else ()
  trained = {_component(entry) for entry in entries}
  if 'rl' not in trained:
    _unread(stage.loss, 'rl', f'{path}.loss', 'no algorithm trains rl')
  if 'ref_kl' not in trained and not any(
      getattr(entry.algorithm, 'kl_beta', 0) for entry in entries
  ):
    _unread(stage.loss, 'ref_kl', f'{path}.loss', 'no algorithm has a kl_beta')
  rl, path = stage.loss.rl, f'{path}.loss.rl'
  if rl.sampler_is_mode != 'none' and stage.updates_per_rollout > 1:
    raise ValueError(
        f"{path}.sampler_is_mode must be 'none' where updates_per_rollout is "
        f'{stage.updates_per_rollout}: got {rl.sampler_is_mode!r}; after the '
        'first update the policy is no longer the old one that it stands for; '
        'set updates_per_rollout to 1'
    )
  if isinstance(rl, schema.CustomRl):
    _check_takes('inputs', rl.import_path, rl.kwargs, f'{path}.import_path')


def _check_lora(stage: schema.Stage, path: str) -> None:
  """What a correction is made of, and of what."""
  if not stage.lora.rank:
    for field in ('alpha', 'rslora', 'targets'):
      _unread(stage.lora, field, f'{path}.lora', 'rank is 0')
  elif stage.init == 'random':
    raise ValueError(
        f"{path}.lora.rank must be 0 where init is 'random': got "
        f'{stage.lora.rank}; a correction of random weights learns little, and '
        'they would be frozen'
    )


def _component(entry: schema.EnvEntry) -> str:
  return algorithms.TYPES[entry.algorithm.type].component


def _check_sampler(
    entry: schema.EnvEntry, stage: schema.Stage, path: str
) -> None:
  """Which algorithm learns from whose rollouts, and whether they fit."""
  imitates, kind = _component(entry) == 'ce', entry.sampler.type
  name = entry.algorithm.type
  if imitates and kind == 'policy':
    raise ValueError(
        f"{path}.sampler.type must be 'dataset' or 'frozen' for algorithm "
        f'{name!r}: got {kind!r}; the policy would imitate its own samples'
    )
  if not imitates and kind != 'policy':
    raise ValueError(
        f"{path}.sampler.type must be 'policy' for algorithm {name!r}: got "
        f'{kind!r}; what others said has no probability under the policy that '
        "said it; algorithm 'sft' imitates it"
    )
  if kind == 'dataset':
    return
  if entry.sampler.max_tokens >= stage.batch.row_tokens:
    raise ValueError(
        f'{path}.sampler.max_tokens must be below batch.row_tokens='
        f'{stage.batch.row_tokens}, which holds the prompt too: got '
        f'{entry.sampler.max_tokens}; raise row_tokens'
    )


def _check_group(entry: schema.EnvEntry, path: str) -> None:
  """Whether a group is what its algorithm and its sampler make of it."""
  if entry.sampler.type == 'dataset' and entry.group_size != 1:
    raise ValueError(
        f'{path}.group_size must be 1 with a dataset sampler: got '
        f'{entry.group_size}; a data set has one demonstration per task'
    )
  algorithm = algorithms.TYPES[entry.algorithm.type]
  if algorithm.group_relative and entry.group_size < 2:
    warnings.warn(
        f'{path}.group_size should be at least 2 for algorithm '
        f'{entry.algorithm.type!r}: got {entry.group_size}; a rollout alone is '
        'its own baseline, and its advantage 0: no reward is learned from',
        stacklevel=3,
    )


def _check_references(
    entry: schema.EnvEntry, stages: list[str], path: str
) -> None:
  """A reference may be what an earlier stage ended with; or this one began."""
  named = {
      'algorithm.reference': getattr(entry.algorithm, 'reference', None),
      'sampler.model': getattr(entry.sampler, 'model', None),
      'judge': entry.judge,
      **{f'rewards.{k}.judge': one.judge for k, one in entry.rewards.items()},
  }
  for key, name in named.items():
    _check_earlier(name, stages, f'{path}.{key}')


def _check_earlier(
    name: schema.Reference | None, stages: Sequence[str], key: str
) -> None:
  """A stage that a reference names must come before the last one."""
  kind, _, target = name.partition(':') if isinstance(name, str) else [''] * 3
  if kind == 'stage' and target not in stages[:-1]:
    raise ValueError(
        f'{key} must name an earlier stage: got {name!r}, expected one of '
        f'{tuple(stages[:-1])}'
    )


def _check_rewards(entry: schema.EnvEntry, path: str) -> None:
  """Who grades, and whether anybody asks."""
  if entry.rewards and entry.sampler.type == 'dataset':
    raise ValueError(
        f'{path}.rewards must be left empty: got {sorted(entry.rewards)}, but '
        'nothing reads them where sampler replays a data set'
    )
  grades = hasattr(envs.TYPES[type(entry.env)], 'judge')
  if entry.judge is not None and not grades:
    raise ValueError(
        f'{path}.judge must be left out: got {str(entry.judge)!r}, but '
        f'environment {entry.env.type!r} grades without one; '
        f'{path}.rewards.NAME.judge hands it to a reward function'
    )


def _check_functions(entry: schema.EnvEntry, path: str) -> None:
  """Imports what the config names, and sees whether its kwargs fit."""
  algorithm, key = entry.algorithm, f'{path}.algorithm'
  if isinstance(algorithm, schema.Custom):
    _check_takes(
        'inputs', algorithm.import_path, algorithm.kwargs, f'{key}.import_path'
    )
  if isinstance(algorithm, schema.Echo) and algorithm.filter.import_path:
    of = algorithm.filter
    _check_takes(
        'rollout', of.import_path, of.kwargs, f'{key}.filter.import_path'
    )
  if isinstance(algorithm, schema.Opsd) and ':' in algorithm.demonstration:
    _check_takes('task', algorithm.demonstration, {}, f'{key}.demonstration')
  for name, one in entry.rewards.items():
    _check_name(name, f'{path}.rewards.{name}')
    if one.fn is not None:
      judge = {} if one.judge is None else {'judge': one.judge}
      _check_reward(
          one.fn, {**one.kwargs, **judge}, f'{path}.rewards.{name}.fn'
      )


def _check_takes(
    what: str, name: str, kwargs: dict[str, Any], key: str
) -> None:
  """A function must take one thing, and its kwargs."""
  signature = inspect.signature(imports.function(name, key))
  try:
    signature.bind(None, **kwargs)
  except TypeError as error:
    raise ValueError(
        f'{key} must be a function of ({what}, **kwargs): got {name}'
        f'{signature}, kwargs {kwargs}; {error}'
    ) from None


def _check_reward(name: str, kwargs: dict[str, Any], key: str) -> None:
  """A reward function must take each of its kwargs."""
  parameters = inspect.signature(imports.function(name, key)).parameters
  if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return
  if wrong := sorted(kwargs.keys() - parameters.keys()):
    raise ValueError(
        f'{key} must take its kwargs: got {wrong}, expected some of '
        f'{tuple(parameters)}'
    )


def _check_env(entry: schema.EnvEntry, path: str) -> None:
  if isinstance(entry.env, schema.Arithmetic):
    for end in ('min', 'max'):
      if 'x' not in entry.env.ops:
        _unread(entry.env, f'{end}_factor', f'{path}.env', "ops has no 'x'")
      if entry.env.ops == ('x',):
        _unread(entry.env, f'{end}_operand', f'{path}.env', "ops is ('x',)")


def _unread(node, field: str, path: str, why: str) -> None:
  """Refuses a key that was set although nothing would read it."""
  (declared,) = (f for f in dataclasses.fields(node) if f.name == field)
  default, value = declared.default, getattr(node, field)
  if declared.default_factory is not dataclasses.MISSING:
    default = declared.default_factory()
  if value != default and type(value) is type(default) and (
      dataclasses.is_dataclass(value)
  ):
    for part in dataclasses.fields(value):  # name the key that was set
      _unread(value, part.name, f'{path}.{field}', why)
  if value != default:
    raise ValueError(
        f'{path}.{field} must be left at {default!r}: got {value!r}, but '
        f'nothing reads it where {why}'
    )
