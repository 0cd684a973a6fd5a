"""ConfigDict <-> schema, and overrides from the command line.

1. `load(path)` runs a recipe file and returns its ConfigDict.
2. `override(config, 'sft.optim.lr', '1e-4')` changes one key or node.
3. `build(config)` turns it into `schema.Run`: unknown keys name the nearest
   one, every value has the declared type (`conversion`), every node passes its
   own checks.

Checks that span several options are in `checks`.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

from posttrain import schema
from posttrain.config import conversion, hints, paths, recipes
from posttrain.util import foreign, json_files

RECIPE_PREFIX = recipes.PREFIX
_SHOWN = 20  # changed options in a message
# Keys that may differ when a run is resumed: logging, saving. See
# `_schedule_keys` for the number of steps and the cadence of evaluation.
RESUMABLE = (
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
    ValueError: the file is missing, cannot be read, or is no config.
  """
  path, argument = recipes.split(spec)
  if is_json(spec):  # a workdir's config.json, with all options
    return from_dict(json_files.read_object(path), path)
  return recipes.run(path, argument)


def is_json(spec: str) -> bool:
  """Returns whether a config is data, and no recipe."""
  return recipes.split(spec)[0].endswith('.json')


def override(config: config_dict.ConfigDict, key: str, text: str) -> None:
  """Sets the dotted `key` of `config`, in place, to the value in `text`.

  Scalars and tuples are read as Python or JSON literals, anything else is a
  string. A node takes a JSON object, whose missing keys take their defaults, or
  the name of its type; later overrides may set any of its options.
  The model also takes a preset's name, or a HuggingFace directory, and keeps
  its dtype, remat and attention.
  """
  key = _with_stage(config, key)
  node, now = _find(config, key)
  *parents, leaf = key.split('.')
  path, parent = f'config.{key}', '.'.join(parents)
  if leaf == 'type' and now != text:
    _check_type(config, parent, text)
    raise ValueError(
      f'{path} must be set whole to be of another type, its options with it: '
      f'got .type={text}, expected --config.{parent}={text}, or '
      f"""--config.{parent}='{{"type": "{text}", ...}}'"""
    )
  value = text if node.get_type(leaf) is str else conversion.literal(text, path)
  value = None if text == 'None' else value
  if leaf == 'model' and len(parents) < 2 and isinstance(value, str):
    named = conversion.named_model(value, path, node[leaf])
    value = dataclasses.asdict(named)
  if parents and parents[0] in config.stages:
    value = conversion.with_defaults(value, schema.Stage, key.split('.')[1:])
  if isinstance(value, dict):
    value = conversion.as_node(value, path)
  with node.unlocked(), node.ignore_type():
    left_out = ()
    if key == 'stages':
      _check_names(value, config['stages'])
      left_out = _left_out(config, value)
    for name in left_out:
      del config[name]
    node[leaf] = value


def _is_node(value: Any) -> bool:
  return isinstance(value, config_dict.ConfigDict)


def _check_type(config: config_dict.ConfigDict, parent: str, text: str) -> None:
  """Refuses a node's type that does not exist."""
  trial = config.copy_and_resolve_references()
  override(trial, parent, text)
  try:
    build(trial)
  except ValueError as error:
    if str(error).startswith(f'config.{parent}.type must be one of'):
      raise


def _with_stage(config: config_dict.ConfigDict, key: str) -> str:
  """Adds the name of the stage, which may be left out where there is one."""
  names, first = config.get('stages'), key.partition('.')[0]
  if first in config or not isinstance(names, tuple | list) or len(names) != 1:
    return key
  stage = config.get(names[0])
  in_stage = _is_node(stage) and first in stage
  return f'{names[0]}.{key}' if in_stage else key


def _find(config: config_dict.ConfigDict, key: str) -> tuple[Any, Any]:
  """Returns the node that has a dotted key, and its value."""
  node, value, path = config, config, 'config'
  parts = key.split('.')
  for i, name in enumerate(parts):
    node = value
    is_node = _is_node(node)
    if not is_node and node is not None:
      raise ValueError(
        f'{path} must be a node to have a key {foreign.quote(name)}: got '
        f'{foreign.quote(node)}; it is set as a whole, with --{path}=VALUE'
      )
    if not is_node or name not in node:
      rest, known = '.'.join(parts[i + 1 :]), node if is_node else ()
      raise ValueError(hints.unknown(config, path, name, known, rest))
    value, path = node[name], f'{path}.{name}'
  return node, value


def _check_names(names: Any, known: Sequence[str]) -> None:
  """Refuses stages that are no tuple of names.

  Args:
    names: the value of `config.stages`.
    known: the recipe's stages; () = unknown.
  """
  is_tuple = isinstance(names, tuple | list)
  if is_tuple and names and all(isinstance(x, str) for x in names):
    return
  words = names.replace(' ', '').split(',') if isinstance(names, str) else ()
  meant = [x for x in words if x in known] or list(known) or ['sft']
  text = ', '.join(f'"{x}"' for x in meant) + (',' if len(meant) == 1 else '')
  raise ValueError(
    'config.stages must be a tuple of at least one name: got '
    f"{foreign.quote(names)}; write --config.stages='({foreign.text(text)})'"
  )


def _left_out(config: config_dict.ConfigDict, names: Any) -> list[str]:
  """Returns the stages of a config that a new tuple of names lacks."""
  if wrong := [x for x in names if x not in config['stages']]:
    raise ValueError(
      f'config.stages must name stages of the recipe: got '
      f'{foreign.quote(wrong[0])}, expected some of {config["stages"]}'
    )
  return [x for x in config['stages'] if x not in names and x in config]


def build(config: config_dict.ConfigDict) -> schema.Run:
  """Turns a ConfigDict into the checked `schema.Run`.

  Raises:
    ValueError: one line with the dotted key, what it must be, what it is.
  """
  try:
    return _build_run(config)
  except conversion.UnknownKey as error:
    raise ValueError(hints.unknown(config, *error.args)) from None


def _build_run(config: config_dict.ConfigDict) -> schema.Run:
  values = dict(config.items())
  names = values.get('stages') or ()
  _check_names(names, ())
  if len(set(names)) < len(names):
    raise ValueError(
      f'config.stages must name each stage once: got {foreign.quote(names)}'
    )
  stages = {}
  for name in names:
    if name not in values:
      raise ValueError(
        f'config.stages must name subtrees: no config.{foreign.text(name)}'
      )
    stages[name] = conversion.to_type(
      values.pop(name), schema.Stage, f'config.{foreign.text(name)}'
    )
  if _is_node(values.get('metrics')):
    values['metrics'] = _without_removed(values['metrics'])
  shared = {field.name for field in dataclasses.fields(schema.Run)}
  for name in values.keys() - shared:
    if _is_node(values[name]):
      raise ValueError(
        f'config.{foreign.text(name)} must be listed in config.stages: got '
        f'{foreign.quote(names)}; nothing reads a stage that does not run'
      )
  values['stages'] = stages
  return paths.absolute(conversion.to_type(values, schema.Run, 'config'))


def _without_removed(metrics: config_dict.ConfigDict) -> dict[str, Any]:
  """Returns the node `metrics` with the keys of today.

  Runs of older versions have `tensorboard`, true or false.
  """
  values = dict(metrics.items())
  if values.pop('tensorboard', False):
    values['trackers'] = ('tensorboard', *values.get('trackers', ()))
  return values


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
  stages = values.get('stages')
  if not isinstance(stages, list | tuple):
    raise ValueError(
      f'{where} must hold the options of a run, with a list of stages: got '
      f'{foreign.quote(stages)}'
    )
  try:
    node = config_dict.ConfigDict(values)
    node.stages = tuple(stages)
  except (AttributeError, KeyError, TypeError, ValueError) as error:
    raise ValueError(
      f'{where} must hold the options of a run: {foreign.error(error)}'
    ) from error
  return node.lock()


def check_resume(old: dict[str, Any], new: dict[str, Any]) -> None:
  """Refuses to resume with options that would change the numbers.

  Further stages may follow those of the workdir's run. A relative path, as
  older versions stored, may be the absolute one of today (`paths.resolved`).

  Args:
    old: `to_dict` of the workdir's run.
    new: `to_dict` of the run that resumes it.
  """
  old = _with_defaults(old)  # its paths are absolute if they are here
  known, names = (list(x.get('stages') or ()) for x in (old, new))
  if known and names[: len(known)] != known:
    raise ValueError(
      'a resumed run must keep its config: changed config.stages '
      f'({foreign.quote(tuple(known))} -> {foreign.quote(tuple(names))}), as '
      'the workdir holds a run with other stages; use another --workdir'
    )
  if known:
    added = names[len(known) :]
    new = {k: v for k, v in new.items() if k not in added}
    new['stages'] = old.get('stages')
  schedules = [
    key
    for name in names
    if name in new
    for key in _schedule_keys(name, old.get(name) or new[name])
  ]
  same = (*RESUMABLE, *schedules)
  if changes(old, new, same):
    same += _resolved(old, new)
  if lines := changes(old, new, same):
    raise ValueError(
      f'a resumed run must keep its config: changed {lines}; use another '
      '--workdir, or undo the change'
    )


def _resolved(old: dict[str, Any], new: dict[str, Any]) -> tuple[str, ...]:
  """Returns regular expressions of the keys whose path is only relative."""
  names = paths.named(build(from_dict(new)))
  names = {key.removeprefix('stages.'): path for key, path in names.items()}
  keys = paths.resolved(_flat(old), names)
  return tuple(f'^{re.escape(key)}$' for key in keys)


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
  before, after = _flat(old), _flat(new)
  changed = [
    key
    for key in sorted(before | after)
    if before.get(key) != after.get(key)
    and not any(re.search(rule, key) for rule in but)
  ]
  lines = ', '.join(
    f'config.{foreign.text(k)} ({foreign.quote(before.get(k))} -> '
    f'{foreign.quote(after.get(k))})'
    for k in changed[:_SHOWN]
  )
  if len(changed) > _SHOWN:
    lines += f' and {len(changed) - _SHOWN} more'
  return lines


def _with_defaults(values: dict[str, Any]) -> dict[str, Any]:
  """Adds the defaults of options that are newer than the values."""
  try:
    return to_dict(build(from_dict(values)))
  except ValueError:  # they have options that exist no more
    return values


def _flat(tree: dict[str, Any], prefix: str = '') -> dict[str, Any]:
  flat = {}
  for key, value in tree.items():
    inner = isinstance(value, dict)
    flat |= _flat(value, f'{prefix}{key}.') if inner else {prefix + key: value}
  return flat
