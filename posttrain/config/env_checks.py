"""Checks that span several options of one environment, see `checks`."""

import dataclasses
import inspect
import re
import warnings
from collections.abc import Mapping
from typing import Any

from posttrain import algorithms, schema
from posttrain.envs import registry
from posttrain.util import foreign, imports

# Algorithms of rewards alone.
# Names that metrics have in the place of an environment's.
_TAKEN = {'pairs': 'held-out pairs', 'suite': 'eval.suite'}
_NEED_REWARDS = (schema.Grpo, schema.MaxRl, schema.Rloo, schema.Reward)


def check(
  entry: schema.EnvEntry,
  stage: schema.Stage,
  earlier: Mapping[str, str],
  path: str,
) -> None:
  """Checks an environment's entry in a stage of kind 'tokens'.

  Args:
    entry: the environment's options.
    stage: the stage's options.
    earlier: name -> kind of the stages before this one.
    path: the entry's dotted key.

  Raises:
    ValueError: one line with the dotted key and what to do.
  """
  name = path.rpartition('.')[2]
  check_name(name, path)
  if name in _TAKEN:
    raise ValueError(
      f'{path} must have another name: eval/{name}/* are metrics of '
      f'{_TAKEN[name]}'
    )
  _check_sampler(entry, stage, path)
  check_env(entry, path)
  _check_group(entry, path)
  _check_references(entry, earlier, path)
  _check_rewards(entry, path)
  _check_functions(entry, path)
  if len(stage.envs) == 1:
    unread(entry, 'ratio', path, 'there is one environment')


def component(entry: schema.EnvEntry) -> str:
  """Returns the loss component that the entry's algorithm trains."""
  return algorithms.TYPES[entry.algorithm.type].component


def _check_sampler(
  entry: schema.EnvEntry, stage: schema.Stage, path: str
) -> None:
  """Refuses samplers that the algorithm cannot learn from."""
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
      f'{kind!r}; rollouts of other models have no sampler logprobs of the '
      "policy; algorithm 'sft' imitates them"
    )
  if kind == 'dataset':
    return
  batch = stage.batch
  if entry.sampler.max_tokens >= batch.row_tokens:
    multiple = (
      ', and batch.micro_batch_tokens to a multiple of it'
      if batch.micro_batch_tokens is not None
      else ''
    )
    raise ValueError(
      f'{path}.sampler.max_tokens must be below batch.row_tokens='
      f'{batch.row_tokens}, which holds the prompt too: got '
      f'{entry.sampler.max_tokens}; raise row_tokens above both{multiple}'
    )


def _check_group(entry: schema.EnvEntry, path: str) -> None:
  """Refuses group sizes that the sampler or the algorithm cannot use."""
  if entry.sampler.type == 'dataset' and entry.group_size != 1:
    raise ValueError(
      f'{path}.group_size must be 1 with a dataset sampler: got '
      f'{entry.group_size}; a data set has one demonstration per task'
    )
  algorithm, kind = entry.algorithm, entry.algorithm.type
  has_baseline = algorithms.TYPES[kind].group_relative and getattr(
    algorithm, 'baseline', True
  )
  if not (has_baseline and entry.group_size < 2 and entry.ratio):
    return
  why = (
    f"at least 2 for algorithm {kind!r}: got {entry.group_size}; a rollout's "
    "baseline is its group's mean reward, so that alone its advantage is 0"
  )
  if kind == 'echo' or getattr(algorithm, 'kl_beta', 0):
    warnings.warn(f'{path}.group_size should be {why}', stacklevel=3)
  else:
    raise ValueError(
      f"{path}.group_size must be {why} and nothing trains; algorithm 'reward' "
      'has no baseline'
    )


def _check_references(
  entry: schema.EnvEntry, earlier: Mapping[str, str], path: str
) -> None:
  """Refuses references to stages that are not earlier ones."""
  named = {
    'algorithm.reference': getattr(entry.algorithm, 'reference', None),
    'sampler.model': getattr(entry.sampler, 'model', None),
    'judge': entry.judge,
    **{f'rewards.{k}.judge': x.judge for k, x in entry.rewards.items()},
  }
  for key, name in named.items():
    check_earlier(name, earlier, f'{path}.{key}')
  for key, reward in entry.rewards.items():
    check_earlier(reward.model, earlier, f'{path}.rewards.{key}.model', True)


def _check_rewards(entry: schema.EnvEntry, path: str) -> None:
  """Refuses rewards and judges that nothing would read."""
  if entry.rewards and entry.sampler.type == 'dataset':
    raise ValueError(
      f'{path}.rewards must be left empty: got {sorted(entry.rewards)}, but '
      'nothing reads them where sampler replays a data set'
    )
  if (
    isinstance(entry.env, schema.Rows)
    and isinstance(entry.algorithm, _NEED_REWARDS)
    and entry.ratio
    and not entry.rewards
  ):
    raise ValueError(
      f'{path}.rewards must have an entry: got none, and nothing else grades '
      f'answers to rows; name a function, as in --{path}.rewards='
      """'{"short": {"fn": "rewards:short"}}', or after the recipe's name: """
      'grpo:DIR,PROMPTS.jsonl,rewards:short; in Python by `rewards` of api.load'
    )
  if entry.judge is not None and not _uses_judge(entry, path):
    raise ValueError(
      f'{path}.judge must be left out: got {foreign.quote(str(entry.judge))}, '
      f'but environment {entry.env.type!r} grades without one, as its '
      f'uses_judge is False; {path}.rewards.NAME.judge is for reward functions'
    )


def _uses_judge(entry: schema.EnvEntry, path: str) -> bool:
  env_class = registry.TYPES[entry.env.type]
  if isinstance(entry.env, schema.CustomEnv):
    key = f'{path}.env.import_path'
    env_class = imports.function(entry.env.import_path, key)
  return getattr(env_class, 'uses_judge', False)


def _check_functions(entry: schema.EnvEntry, path: str) -> None:
  """Imports the functions of import paths; checks that their kwargs fit."""
  algorithm, key = entry.algorithm, f'{path}.algorithm'
  if isinstance(algorithm, schema.Custom):
    check_takes(
      'inputs', algorithm.import_path, algorithm.kwargs, f'{key}.import_path'
    )
  if isinstance(algorithm, schema.Echo) and algorithm.filter.import_path:
    cfg = algorithm.filter
    check_takes(
      'rollout', cfg.import_path, cfg.kwargs, f'{key}.filter.import_path'
    )
  if isinstance(algorithm, schema.Opsd) and ':' in algorithm.demonstration:
    check_takes('task', algorithm.demonstration, {}, f'{key}.demonstration')
  for name, reward in entry.rewards.items():
    check_name(name, f'{path}.rewards.{name}')
    if reward.fn is not None:
      judge = {} if reward.judge is None else {'judge': reward.judge}
      kwargs = {**reward.kwargs, **judge}
      _check_reward(reward.fn, kwargs, f'{path}.rewards.{name}.fn')


def check_takes(what: str, name: str, kwargs: dict[str, Any], key: str) -> None:
  """Refuses a function that does not take one argument and its kwargs.

  Args:
    what: name of the argument, for the error.
    name: import path of the function.
    kwargs: its keyword arguments.
    key: dotted key of the import path.
  """
  signature = inspect.signature(imports.function(name, key))
  try:
    signature.bind(None, **kwargs)
  except TypeError as error:
    raise ValueError(
      f'{key} must be a function of ({what}, **kwargs): got {name}'
      f'{signature}, kwargs {foreign.quote(kwargs)}; {foreign.text(error)}'
    ) from None


def _check_reward(name: str, kwargs: dict[str, Any], key: str) -> None:
  """Refuses a reward function that does not take each of its kwargs."""
  parameters = inspect.signature(imports.function(name, key)).parameters
  if any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
    return
  if wrong := sorted(kwargs.keys() - parameters.keys()):
    raise ValueError(
      f'{key} must take its kwargs: got {wrong}, expected some of '
      f'{tuple(parameters)}'
    )


def check_env(entry: schema.EnvEntry, path: str) -> None:
  """Refuses options of an environment that it would not read."""
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
  """Refuses names that cannot be part of metric and file names."""
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
  """Refuses 'stage:NAME' unless it is an earlier stage of the right kind.

  Args:
    name: a reference; only 'stage:NAME' is checked.
    earlier: name -> kind of the stages before this one.
    key: dotted key of the reference.
    reward: whether the stage must train a reward model, or must not.
  """
  kind, _, target = name.partition(':') if isinstance(name, str) else [''] * 3
  if kind != 'stage':
    return
  if target not in earlier:
    raise ValueError(
      f'{key} must name an earlier stage: got {foreign.quote(name)}, '
      f'{_expected(earlier, reward)}, or name {_instead(key, reward)}'
    )
  if (earlier[target] == 'ranking') != reward:
    wanted = "of kind 'ranking'" if reward else 'that trains a policy'
    raise ValueError(
      f'{key} must name a stage {wanted}: got {foreign.quote(name)}, of kind '
      f'{earlier[target]!r}'
    )


def _expected(earlier: Mapping[str, str], reward: bool) -> str:
  """Returns which earlier stages a reference may name."""
  fitting = [x for x, kind in earlier.items() if (kind == 'ranking') == reward]
  if fitting:
    return f'expected one of {tuple(fitting)}, which are before it'
  what = 'none that trains a reward model' if reward and earlier else 'none'
  return f'but config.stages has {what} before it; list that stage first'


def _instead(key: str, reward: bool) -> str:
  """Returns what a reference may name in place of a stage."""
  if reward:
    return f'the workdir of a reward model, --{key}=RUN'
  if not key.endswith('.init'):
    return f'a workdir or a HuggingFace directory, --{key}=PATH'
  return (
    f'a workdir of this recipe, --{key}=RUN, or a HuggingFace directory, '
    f'--{key}=DIR, with its config.model, config.tokenizer.path and '
    'config.tokenizer.eos'
  )


def unread(node: Any, field: str, path: str, why: str) -> None:
  """Refuses a key that is set although nothing reads it.

  Args:
    node: the options that have the field.
    field: its name.
    path: dotted key of the node.
    why: the condition under which nothing reads it.
  """
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
    # Of nodes, the types; a node of another type says no more.
    default, value = (getattr(x, 'type', x) for x in (default, value))
    raise ValueError(
      f'{path}.{field} must be left at {foreign.quote(default)}: got '
      f'{foreign.quote(value)}, but nothing reads it where {why}'
    )
