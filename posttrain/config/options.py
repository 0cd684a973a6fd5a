"""ConfigDict <-> schema, and overrides from the command line.

1. `load(spec)` runs a recipe file, or reads a config.json, into a ConfigDict.
2. `override(config, 'sft.optim.lr', '1e-4')` changes one key or node.
3. `build(config)` turns it into `schema.Run`: unknown keys name the nearest
   one, every value has the declared type (`conversion`), every node passes its
   own checks.

A recipe is code: it may do whatever Python can, as the user who runs it. Checks
that span several options are in `checks`.
"""

import dataclasses
import json
import os
import pathlib
import re
import runpy
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import config_dict

from posttrain import schema
from posttrain.config import conversion, names
from posttrain.util import disk, errors

RECIPE_PREFIX = 'recipe_'  # begins the module name of a recipe file
_FOLDER = pathlib.Path(__file__).parents[2] / 'configs'
_SHOWN = 20  # changed options in a message
# Keys that may differ when a run is resumed: logging, saving. See
# `_schedule_keys` for the number of steps and the cadence of evaluation.
_RESUMABLE = (
  r'^metrics\.',
  r'^checkpoint\.',
  r'^watchdog\.',
  r'^compilation_cache$',
  # Other devices: arrays are split anew, and numbers agree up to rounding.
  r'^mesh\.',
  # An implementation that the devices of another machine need.
  r'^([^.]+\.)?model\.attention$',
  # A server's address and retries, but not its model; the time limits and the
  # permitted faults of reward functions and environments.
  r'\.(base_url|api_key_env|timeout|tries|concurrency|max_faults)$',
  r'\.rollout\.(env_timeout|max_errors)$',
  # Where environments are called.
  r'\.rollout\.(workers|num_workers)$',
)


def load(spec: str) -> config_dict.ConfigDict:
  """Loads `FILE.py`, `FILE.py:ARGUMENT`, or the config.json of a workdir.

  Raises:
    ValueError: the file is missing, fails, or is no config.
  """
  path, argument = _split(spec)
  if path.endswith('.json'):
    return from_dict(disk.read_json_object(path), path)
  name = os.path.splitext(os.path.basename(path))[0]
  try:
    recipe = runpy.run_path(path, run_name=RECIPE_PREFIX + name)
    config = recipe['get_config'](*([argument] if argument else []))
  except (Exception, SystemExit) as error:
    # Errors of options, raised by the schema or by configs/, name the key.
    is_own = isinstance(error, ValueError | RuntimeError)
    if is_own and errors.is_expected(error, 'configs.'):
      raise
    raise ValueError(
      f'{path} must be a recipe with get_config: {errors.describe(error)} '
      f'({errors.place(error)})'
    ) from error
  if not _is_node(config):
    raise ValueError(
      f'{path}: get_config must return a ConfigDict: got {errors.quote(config)}'
    )
  return config


def is_json(spec: str) -> bool:
  """Returns whether a config is data, and no recipe."""
  return _split(spec)[0].endswith('.json')


def _split(spec: str) -> tuple[str, str]:
  """Splits `FILE` or `FILE:ARGUMENT` into the file and '' or the argument.

  A recipe of the installed package `configs` is found from any folder, as
  `configs/grpo.py` or as `grpo`; a file of that path comes first.
  """
  path, _, argument = spec.partition(':')
  if os.path.isfile(spec):  # a path may have colons
    path, argument = spec, ''
  recipe = path.removeprefix('configs/').removesuffix('.py')
  installed = _FOLDER / f'{recipe}.py'
  if not os.path.isfile(path) and installed.is_file():
    path = str(installed)
  if os.path.isfile(path) and path.endswith(('.py', '.json')):
    return path, argument
  known = sorted(
    x.relative_to(_FOLDER).with_suffix('').as_posix()
    for x in _FOLDER.rglob('*.py')
    if 'def get_config(' in x.read_text()
  )
  raise ValueError(
    '--config must name a file FILE.py, the config.json of a workdir, or a '
    f'recipe of the package: got {path!r}'
    + (errors.nearest(recipe, known) or f'; the recipes are {", ".join(known)}')
  )


def override(config: config_dict.ConfigDict, key: str, text: str) -> None:
  """Sets the dotted `key` of `config`, in place, to the value in `text`.

  Scalars and tuples are read as Python or JSON literals, anything else is a
  string. A node takes a JSON object, whose missing keys take their defaults, or
  the name of its type; later overrides may set any of its options.
  The model also takes a preset's name, or a HuggingFace directory, and keeps
  its dtype, remat and attention. The name of the only stage may be left out.
  """
  stages, first = config.get('stages') or (), key.partition('.')[0]
  if first not in config and len(stages) == 1 and first in config[stages[0]]:
    key = f'{stages[0]}.{key}'
  *parents, leaf = key.split('.')
  path, node = f'config.{key}', _node_of(config, key)
  if leaf == 'type' and node[leaf] != text:
    parent = path.removesuffix('.type')
    raise ValueError(
      f'{path} must be set with its options: got {text!r}; write '
      f"""--{parent}={text}, or --{parent}='{{"type": "{text}", ...}}'"""
    )
  value = text if node.get_type(leaf) is str else conversion.literal(text, path)
  value = None if text == 'None' else value
  if leaf == 'model' and len(parents) < 2 and isinstance(value, str):
    named = conversion.named_model(value, path, node[leaf])
    value = dataclasses.asdict(named)
  if parents and parents[0] in stages:
    value = conversion.with_defaults(value, schema.Stage, key.split('.')[1:])
  if isinstance(value, dict):
    try:
      value = config_dict.ConfigDict(value)
    except ValueError as error:  # a dot, which separates the keys of nodes
      raise ValueError(
        f'{path} must have keys without dots: got {errors.quote(value)}'
      ) from error
  with node.unlocked(), node.ignore_type():
    if key == 'stages':
      _check_stages(value, stages)
      for name in set(stages) - set(value):
        del config[name]
    node[leaf] = value


def _is_node(value: Any) -> bool:
  return isinstance(value, config_dict.ConfigDict)


def _node_of(config: config_dict.ConfigDict, key: str) -> Any:
  """Returns the node that has a dotted key."""
  node, value, path = config, config, 'config'
  parts = key.split('.')
  for i, name in enumerate(parts):
    node = value
    if not _is_node(node) and node is not None:
      raise ValueError(
        f'{path} must be a node to have a key {name!r}: got '
        f'{errors.quote(node)}; it is set as a whole, with --{path}=VALUE'
      )
    if node is None or name not in node:
      rest = '.'.join(parts[i:])
      near = names.hint(path, rest, [f'config.{x}' for x in _flat(config)])
      own = list(node or ())
      raise ValueError(
        f'{path} has no option {name!r}'
        + (near or f'; its options are {errors.text(", ".join(own), 400)}')
      )
    value, path = node[name], f'{path}.{name}'
  return node


def _check_stages(stages: Any, known: Sequence[str]) -> None:
  """Refuses stages that are no tuple of known names, once each."""
  ok = isinstance(stages, tuple | list) and len(stages) > 0
  if not ok or len(set(stages)) < len(stages) or set(stages) - set(known):
    raise ValueError(
      'config.stages must be a tuple of names of stages, once each: got '
      f"""{errors.quote(stages)}; write --config.stages='("{known[0]}",)'"""
    )


def build(config: config_dict.ConfigDict) -> schema.Run:
  """Turns a ConfigDict into the checked `schema.Run`.

  Raises:
    ValueError: one line with the dotted key, the requirement, the value given.
  """
  values = dict(config.items())
  stages = values.get('stages')
  _check_stages(stages, [k for k, x in values.items() if _is_node(x)] or ['s'])
  values['stages'] = {
    name: conversion.to_type(values.pop(name), schema.Stage, f'config.{name}')
    for name in stages
  }
  return conversion.to_type(values, schema.Run, 'config')


def to_dict(run: schema.Run) -> dict[str, Any]:
  """Returns the resolved config as plain JSON types, stages by name."""
  values = dataclasses.asdict(run)
  stages = values.pop('stages')
  return json.loads(json.dumps({**values, 'stages': list(stages), **stages}))


def from_dict(
  values: dict[str, Any], where: str = 'config'
) -> config_dict.ConfigDict:
  """Returns the ConfigDict of a result of `to_dict`.

  Args:
    values: the options.
    where: the name of their place in errors.

  Raises:
    ValueError: they are not those of a run.
  """
  try:
    node = config_dict.ConfigDict(values)
    node.stages = tuple(values['stages'])
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{where} must hold the options of a run: {errors.describe(error)}'
    ) from error
  return node.lock()


def check_resume(old: dict[str, Any], new: dict[str, Any]) -> None:
  """Refuses to resume with options that would change the numbers.

  Further stages may follow those of the workdir's run.

  Args:
    old: `to_dict` of the workdir's run.
    new: `to_dict` of the run that resumes it.
  """
  try:  # adds the defaults of options that are newer than the run
    old = to_dict(build(from_dict(old)))
  except ValueError:
    pass  # it has options that exist no more
  known, stages = old.get('stages') or [], new['stages']
  if stages[: len(known)] != known:
    old, new = {'stages': known}, {'stages': stages}
  else:
    new = {k: x for k, x in new.items() if k not in stages[len(known) :]}
    new['stages'] = known
  schedules = [
    key
    for name in known
    if name in old
    for key in _schedule_keys(name, old[name])
  ]
  if lines := changes(old, new, (*_RESUMABLE, *schedules)):
    raise ValueError(
      f'a resumed run must keep its config: changed {lines}; use another '
      '--workdir, or undo the change'
    )


def _schedule_keys(name: str, stage: dict[str, Any]) -> list[str]:
  """Returns regular expressions of the schedule's keys that may change.

  The number of steps, and with it the rest of a decaying learning rate, and the
  cadence of evaluation. With `eval.best` another cadence would select other
  weights, and so would more steps if the last one has an evaluation that the
  cadence has not.
  """
  evaluation, steps = stage.get('eval', {}), rf'^{re.escape(name)}\.steps$'
  if evaluation.get('best') is None:
    return [steps, rf'^{re.escape(name)}\.eval\.every$']
  every = evaluation.get('every')
  return [steps] if every and stage['steps'] % every == 0 else []


def changes(
  old: dict[str, Any], new: dict[str, Any], but: Sequence[str] = ()
) -> str:
  """Returns 'config.KEY (OLD -> NEW), ...' of two `to_dict`; '' = none.

  Args:
    old: options.
    new: other options.
    but: regular expressions of keys that may differ.
  """
  before, after = dict(_leaves(old)), dict(_leaves(new))
  lines = [
    f'config.{k} ({errors.quote(before.get(k))} -> '
    f'{errors.quote(after.get(k))})'
    for k in sorted(before | after)
    if before.get(k) != after.get(k) and not any(re.search(x, k) for x in but)
  ]
  more = len(lines) - _SHOWN
  rest = f' and {more} more' if more > 0 else ''
  return ', '.join(lines[:_SHOWN]) + rest


def _flat(node: Any, prefix: str = '') -> Iterator[str]:
  """Yields the dotted keys of all nodes and options."""
  for key, value in node.items():
    yield prefix + key
    if _is_node(value):
      yield from _flat(value, f'{prefix}{key}.')


def _leaves(
  tree: dict[str, Any], prefix: str = ''
) -> Iterator[tuple[str, Any]]:
  """Yields the dotted key and the value of each option."""
  for key, value in tree.items():
    if isinstance(value, dict):
      yield from _leaves(value, f'{prefix}{key}.')
    else:
      yield prefix + key, value
