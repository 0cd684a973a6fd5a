"""Cross-checks of one environment's entry in a stage, see `validation`."""

import dataclasses
import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any

from posttrain import algorithms, schema
from posttrain.util import imports


def check(
  entry: schema.EnvEntry,
  stage: schema.Stage,
  earlier: Mapping[str, str],
  path: str,
) -> None:
  """Checks what spans nodes of an entry of a stage of kind 'tokens'.

  Args:
    entry: of the environment.
    stage: it is of.
    earlier: name -> kind of the stages before this one.
    path: the entry's dotted key.

  Raises:
    ValueError: one line with the dotted key and what to do.
  """
  check_name(path.rpartition('.')[2], path)
  _check_sampler(entry, stage, path)
  check_env(entry, path)
  _check_group(entry, path)
  _check_references(entry, earlier, path)
  _check_rewards(entry, path)
  _check_functions(entry, path)
  if len(stage.envs) == 1:
    unread(entry, 'ratio', path, 'there is one environment')


def component(entry: schema.EnvEntry) -> str:
  return algorithms.TYPES[entry.algorithm.type].component


def _check_sampler(
  entry: schema.EnvEntry, stage: schema.Stage, path: str
) -> None:
  """Which algorithm learns from whose rollouts, and whether they fit."""
  imitates, kind = component(entry) == 'ce', entry.sampler.type
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
  entry: schema.EnvEntry, earlier: Mapping[str, str], path: str
) -> None:
  """A reference may be what an earlier stage ended with; or this one began."""
  named = {
    'algorithm.reference': getattr(entry.algorithm, 'reference', None),
    'sampler.model': getattr(entry.sampler, 'model', None),
    'judge': entry.judge,
    **{f'rewards.{k}.judge': one.judge for k, one in entry.rewards.items()},
  }
  for key, name in named.items():
    check_earlier(name, earlier, f'{path}.{key}')
  for key, one in entry.rewards.items():
    check_earlier(one.model, earlier, f'{path}.rewards.{key}.model', True)


def _check_rewards(entry: schema.EnvEntry, path: str) -> None:
  """Who grades, and whether anybody asks."""
  if entry.rewards and entry.sampler.type == 'dataset':
    raise ValueError(
      f'{path}.rewards must be left empty: got {sorted(entry.rewards)}, but '
      'nothing reads them where sampler replays a data set'
    )
  if entry.judge is not None and not isinstance(entry.env, schema.CustomEnv):
    raise ValueError(
      f'{path}.judge must be left out: got {str(entry.judge)!r}, but '
      f'environment {entry.env.type!r} grades without one; '
      f'{path}.rewards.NAME.judge hands it to a reward function'
    )


def _check_functions(entry: schema.EnvEntry, path: str) -> None:
  """Imports what the config names, and sees whether its kwargs fit."""
  algorithm, key = entry.algorithm, f'{path}.algorithm'
  if isinstance(algorithm, schema.Custom):
    check_takes(
      'inputs', algorithm.import_path, algorithm.kwargs, f'{key}.import_path'
    )
  if isinstance(algorithm, schema.Echo) and algorithm.filter.import_path:
    of = algorithm.filter
    check_takes(
      'rollout', of.import_path, of.kwargs, f'{key}.filter.import_path'
    )
  if isinstance(algorithm, schema.Opsd) and ':' in algorithm.demonstration:
    check_takes('task', algorithm.demonstration, {}, f'{key}.demonstration')
  for name, one in entry.rewards.items():
    check_name(name, f'{path}.rewards.{name}')
    if one.fn is not None:
      judge = {} if one.judge is None else {'judge': one.judge}
      _check_reward(
        one.fn, {**one.kwargs, **judge}, f'{path}.rewards.{name}.fn'
      )


def check_takes(what: str, name: str, kwargs: dict[str, Any], key: str) -> None:
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


def check_env(entry: schema.EnvEntry, path: str) -> None:
  if isinstance(entry.env, schema.CustomEnv):
    check_takes(
      'name', entry.env.import_path, entry.env.kwargs, f'{path}.env.import_path'
    )
  if isinstance(entry.env, schema.Arithmetic):
    for end in ('min', 'max'):
      if 'x' not in entry.env.ops:
        unread(entry.env, f'{end}_factor', f'{path}.env', "ops has no 'x'")
      if entry.env.ops == ('x',):
        unread(entry.env, f'{end}_operand', f'{path}.env', "ops is ('x',)")


def check_name(name: str, path: str) -> None:
  if not re.fullmatch(r'[A-Za-z0-9_-]+', name):
    raise ValueError(
      f'{path} must be named with letters, digits, _ and -: metric names '
      'and file names are made of it'
    )


def check_earlier(
  name: schema.Reference | None,
  earlier: Mapping[str, str],
  key: str,
  reward: bool = False,
) -> None:
  """A stage that is named must come before this one, and be of the right kind.

  Args:
    name: of a model; of one that is no stage nothing is checked.
    earlier: name -> kind of the stages before this one.
    key: that names it.
    reward: whether it must be a reward model, or must not.
  """
  kind, _, target = name.partition(':') if isinstance(name, str) else [''] * 3
  if kind != 'stage':
    return
  if target not in earlier:
    raise ValueError(
      f'{key} must name an earlier stage: got {name!r}, expected one of '
      f'{tuple(earlier)}'
    )
  if (earlier[target] == 'ranking') != reward:
    wanted = "of kind 'ranking'" if reward else 'whose model speaks'
    raise ValueError(
      f'{key} must name a stage {wanted}: got {name!r}, of kind '
      f'{earlier[target]!r}'
    )


def unread(node, field: str, path: str, why: str) -> None:
  """Refuses a key that was set although nothing would read it."""
  (declared,) = (f for f in dataclasses.fields(node) if f.name == field)
  default, value = declared.default, getattr(node, field)
  if declared.default_factory is not dataclasses.MISSING:
    default = declared.default_factory()
  if (
    value != default
    and type(value) is type(default)
    and (dataclasses.is_dataclass(value))
  ):
    for part in dataclasses.fields(value):  # name the key that was set
      unread(value, part.name, f'{path}.{field}', why)
  if value != default:
    raise ValueError(
      f'{path}.{field} must be left at {default!r}: got {value!r}, but '
      f'nothing reads it where {why}'
    )
