"""Options and reward functions of a Python program, as a config has them.

The command line gives texts by dotted key; a program gives numbers, dicts,
paths, functions and classes. `overrides` makes texts of them.
"""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
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
  if options is None:
    return []
  if not isinstance(options, Mapping):
    raise ValueError(
      'options must be a dict of keys and values: got '
      f"{errors.quote(options)}; write {{'grpo.steps': 3}}"
    )
  found = []
  for key, value in options.items():
    if not isinstance(key, str):
      raise ValueError(
        f'options must have keys of the config: got {errors.quote(key)}; '
        "write {'grpo.steps': 3}"
      )
    key = key.removeprefix('config.')  # as errors print it
    found.append((key, _text(value, key, kept)))
  return found


def _text(value: Any, key: str, kept: dict[str, Any]) -> str:
  """Returns a value as the command line has it."""
  value = _plain(value, key, kept)
  if isinstance(value, str):
    return value
  if not isinstance(value, dict):
    return repr(value)
  try:
    return json.dumps(value)
  except TypeError as error:
    raise ValueError(
      f'config.{errors.text(key)} must hold plain values: got '
      f'{errors.quote(value)}; write numbers, texts, lists, dicts, functions'
    ) from error


def _plain(value: Any, key: str, kept: dict[str, Any]) -> Any:
  """Returns a plain value for a path, a function, or an array's scalar."""
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if isinstance(value, Mapping):
    return {k: _plain(child, key, kept) for k, child in value.items()}
  if isinstance(value, list | tuple):
    items = [_plain(child, key, kept) for child in value]
    return items if isinstance(value, list) else tuple(items)
  if callable(value):
    try:
      return imports.path(value, kept)
    except ValueError as error:
      raise ValueError(f'config.{errors.text(key)}: {error}') from error
  is_scalar = getattr(value, 'shape', None) == () and hasattr(value, 'item')
  return value.item() if is_scalar else value


@contextlib.contextmanager
def explained(options: Options | None) -> Iterator[None]:
  """Rewrites errors of the command for its function.

  A flag loses its dashes, and a dict that replaces a stage is named as such.
  """
  try:
    yield
  except ValueError as error:
    text = str(error).removeprefix('--')
    for key, value in (options or {}).items():
      key = key.removeprefix('config.')
      if isinstance(value, Mapping) and text.startswith(f'config.{key}.'):
        text += _replaces(key, value)
    if text == str(error):
      raise
    raise ValueError(text) from error


def _replaces(key: str, value: Any) -> str:
  """Returns what a dict for a stage did, and its first option alone; or ''."""
  if '.' in key or key in {x.name for x in dataclasses.fields(schema.Run)}:
    return ''
  stage = key
  while isinstance(value, Mapping) and value:
    name, value = next(iter(value.items()))
    key = f'{key}.{name}'
  option = f'{errors.quote(key)}: {errors.quote(value)}'
  if key == stage:
    option = errors.quote(f'{key}.OPTION') + ': VALUE'
  return (
    '; a dict replaces the whole stage: to change one option write '
    f'{{{option}}}'
  )


def named(rewards: Rewards | None) -> Mapping[str, Function]:
  """Returns reward functions by name.

  Raises:
    ValueError: they are no functions, or have no names of their own.
  """
  if rewards is None:
    return {}
  if isinstance(rewards, Mapping):
    if wrong := [x for x in rewards if not isinstance(x, str)]:
      raise ValueError(
        f'rewards must have texts as names: got {errors.quote(wrong[0])}; '
        "write {'NAME': FUNCTION}"
      )
    return rewards
  functions = rewards if isinstance(rewards, list | tuple) else [rewards]
  found: dict[str, Function] = {}
  for function in functions:
    if not callable(function):
      raise ValueError(
        'rewards must be a dict of names and functions, a function, or a list '
        f"of functions: got {errors.quote(function)}; write {{'NAME': "
        'FUNCTION}'
      )
    name = str(getattr(function, '__name__', ''))
    if not name.isidentifier() or name in found:
      fault = f'two of {name!r}' if name in found else errors.quote(function)
      raise ValueError(
        'rewards must be functions with names of their own, where they are no '
        f"dict: got {fault}; use a dict of functions that def defines, {{'NAME'"
        ': FUNCTION}'
      )
    found[name] = function
  return found


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
    path = imports.path(function, kept)
    *place, name = key.split('.')
    places = [tuple(place)] if place else sampled
    if not sampled:
      raise ValueError(
        f'rewards[{key!r}] must be for an environment whose answers the policy '
        'samples: this recipe samples no answers; use grpo'
      )
    if not set(places) <= set(sampled):
      raise ValueError(
        f'rewards[{key!r}] must be for an environment whose answers the policy '
        f'samples: expected a name alone, or STAGE.ENVIRONMENT.NAME with one '
        f'of {[".".join(x) for x in sampled]}'
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
