"""Options and reward functions of a Python program, as a config has them.

The command line gives texts by dotted key; a program gives numbers, dicts,
paths, functions and classes. `overrides` makes texts of them.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from posttrain import schema
from posttrain.util import errors, imports

Options = Mapping[str, Any]  # dotted key of the config -> value
Function = Callable[..., Any]  # a reward function
# Reward functions by name; one alone, or a list, has the functions' own names.
Rewards = Mapping[str, Function] | Function | Sequence[Function]


def overrides(
  options: Options | None, kept: dict[str, Any]
) -> list[tuple[str, str]]:
  """Returns options as the command line has them.

  Args:
    options: values by key.
    kept: the functions that `imports` keeps for this call; adds to them.

  Raises:
    ValueError: they are no dict, or a value has no text.
  """
  if not isinstance(options, Mapping | None):
    raise ValueError(f'options must be a dict: got {errors.quote(options)}')
  texts = []
  for key, value in (options or {}).items():
    key = key.removeprefix('config.')  # as errors print it
    try:
      value = _plain(value, kept, key)
      text = json.dumps(value) if isinstance(value, dict) else repr(value)
    except (TypeError, ValueError) as error:
      raise ValueError(
        f'config.{key} must hold plain values and functions with names: got '
        f'{errors.quote(value)}; {error}'
      ) from error
    texts.append((key, value if isinstance(value, str) else text))
  return texts


def _plain(value: Any, kept: dict[str, Any], key: str) -> Any:
  """Returns a plain value for a path, a function, or an array's scalar."""
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if isinstance(value, Mapping):
    return {k: _plain(x, kept, f'{key}.{k}') for k, x in value.items()}
  if isinstance(value, list | tuple):
    items = [_plain(child, kept, key) for child in value]
    return items if isinstance(value, list) else tuple(items)
  if callable(value):
    return imports.path(value, kept, key)
  return value.item() if getattr(value, 'shape', None) == () else value


def named(rewards: Rewards | None) -> Mapping[str, Function]:
  """Returns reward functions by name.

  Raises:
    ValueError: they are no functions, or have no names of their own.
  """
  if rewards is None:
    return {}
  if isinstance(rewards, Mapping):
    by_name = dict(rewards)
  else:
    functions = rewards if isinstance(rewards, list | tuple) else [rewards]
    by_name = {getattr(x, '__name__', '?'): x for x in functions}
    if len(by_name) < len(functions) or not all(map(str.isidentifier, by_name)):
      by_name = {'?': None}
  if not all(isinstance(k, str) and callable(x) for k, x in by_name.items()):
    raise ValueError(
      'rewards must be functions with names of their own, or a dict of names '
      f"and functions, {{'NAME': FUNCTION}}: got {errors.quote(rewards)}"
    )
  return by_name


def with_rewards(
  run: schema.Run, rewards: Mapping[str, Function], kept: dict[str, Any]
) -> schema.Run:
  """Returns a run with reward functions, see `train` and `overrides`."""
  sampled = [
    (stage, env)
    for stage, options in run.stages.items()
    for env, entry in options.envs.items()
    if isinstance(entry.sampler, schema.Policy)
  ]
  entries: dict[tuple[str, str], dict[str, schema.RewardFn]] = {}
  for key, function in rewards.items():
    *place, name = key.split('.')
    path = imports.path(function, kept, name)
    places = [tuple(place)] if place else sampled
    if not sampled or not set(places) <= set(sampled):
      raise ValueError(
        f'rewards[{key!r}] must be for an environment whose answers the policy '
        f'samples, NAME or STAGE.ENVIRONMENT.NAME with one of '
        f'{[".".join(x) for x in sampled]}'
      )
    for chosen in places:
      entries.setdefault(chosen, {})[name] = schema.RewardFn(
        fn=path, isolate=False
      )
  stages = dict(run.stages)
  for (stage, env), functions in entries.items():
    envs = dict(stages[stage].envs)
    envs[env] = dataclasses.replace(envs[env], rewards=functions)
    stages[stage] = dataclasses.replace(stages[stage], envs=envs)
  return dataclasses.replace(run, stages=stages)
