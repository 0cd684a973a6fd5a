"""ConfigDict <-> schema, and overrides from the command line.

1. `load(path)` runs a recipe file and returns its ConfigDict.
2. `override(config, 'sft.optim.lr', '1e-4')` changes one key or node.
3. `build(config)` turns it into `schema.Run`: unknown keys name the nearest
   one, every value has the declared type, every node passes its own checks.

Checks that span several options are in `checks`.
"""

import ast
import dataclasses
import json
import os
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

from posttrain import schema
from posttrain.config import hints, paths, recipes
from posttrain.models import hf_config
from posttrain.util import foreign, hub, json_files, spelling

RECIPE_PREFIX = recipes.PREFIX
# Type of an option -> how a value is written.
_EXAMPLES = {
  int: 'a whole number, as in 100',
  float: 'a number, as in 1e-4',
  bool: 'true or false',
  str: 'a text',
}
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
  string. A node takes a JSON object, whose missing keys take their defaults.
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
  value = text if node.get_type(leaf) is str else _literal(text, path)
  value = None if text == 'None' else value
  if leaf == 'model' and len(parents) < 2 and isinstance(value, str):
    named = _named_model(value, path, node[leaf])
    value = dataclasses.asdict(named)
  if isinstance(value, dict):
    value = _as_node(value, path)
  with node.unlocked(), node.ignore_type():
    left_out = _left_out(config, value) if key == 'stages' else ()
    for name in left_out:
      del config[name]
    node[leaf] = value


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
  in_stage = isinstance(stage, config_dict.ConfigDict) and first in stage
  return f'{names[0]}.{key}' if in_stage else key


def _find(config: config_dict.ConfigDict, key: str) -> tuple[Any, Any]:
  """Returns the node that has a dotted key, and its value."""
  node, value, path = config, config, 'config'
  parts = key.split('.')
  for i, name in enumerate(parts):
    node = value
    is_node = isinstance(node, config_dict.ConfigDict)
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


def _as_node(value: dict[str, Any], path: str) -> config_dict.ConfigDict:
  try:
    return config_dict.ConfigDict(value)
  except ValueError as error:  # a dot, which separates the keys of nodes
    raise ValueError(
      f'{path} must have keys without dots: got {foreign.quote(value)}'
    ) from error


def _left_out(config: config_dict.ConfigDict, names: Any) -> list[str]:
  """Returns the stages of a config that a new tuple of names lacks."""
  if not isinstance(names, tuple | list):
    return []
  if wrong := [x for x in names if x not in config['stages']]:
    raise ValueError(
      f'config.stages must name stages of the recipe: got '
      f'{foreign.quote(wrong[0])}, expected some of {config["stages"]}'
    )
  return [x for x in config['stages'] if x not in names and x in config]


def _literal(text: str, key: str) -> Any:
  """Returns an override's value: JSON, a Python literal, or the text itself."""
  try:
    return json_files.parse(text, key)
  except ValueError as error:
    problem = error
    if _is_json(text):  # beyond the limits
      raise
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, RecursionError, MemoryError):
    if text.lstrip().startswith(('{', '[')):
      raise problem from None
    return text


def _is_json(text: str) -> bool:
  try:
    json.loads(text)
  except (ValueError, RecursionError):
    return False
  return True


class _UnknownKey(Exception):
  """A node has a key that its class lacks: its path, the key, known keys."""


def build(config: config_dict.ConfigDict) -> schema.Run:
  """Turns a ConfigDict into the checked `schema.Run`.

  Raises:
    ValueError: one line with the dotted key, what it must be, what it is.
  """
  try:
    return _build_run(config)
  except _UnknownKey as error:
    raise ValueError(hints.unknown(config, *error.args)) from None


def _build_run(config: config_dict.ConfigDict) -> schema.Run:
  values = dict(config.items())
  names = values.get('stages') or ()
  is_tuple = isinstance(names, tuple | list)
  if not is_tuple or not names or not all(isinstance(x, str) for x in names):
    raise ValueError(
      f'config.stages must be a tuple of names: got {foreign.quote(names)}'
    )
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
    stages[name] = _build(
      values.pop(name), schema.Stage, f'config.{foreign.text(name)}'
    )
  if isinstance(values.get('metrics'), config_dict.ConfigDict):
    values['metrics'] = _without_removed(values['metrics'])
  shared = {field.name for field in dataclasses.fields(schema.Run)}
  for name in values.keys() - shared:
    if isinstance(values[name], config_dict.ConfigDict):
      raise ValueError(
        f'config.{foreign.text(name)} must be listed in config.stages: got '
        f'{foreign.quote(names)}; nothing reads a stage that does not run'
      )
  values['stages'] = stages
  return paths.absolute(_build(values, schema.Run, 'config'))


def _without_removed(metrics: config_dict.ConfigDict) -> dict[str, Any]:
  """Returns the node `metrics` with the keys of today.

  Runs of older versions have `tensorboard`, true or false.
  """
  values = dict(metrics.items())
  if values.pop('tensorboard', False):
    values['trackers'] = ('tensorboard', *values.get('trackers', ()))
  return values


def _build(value: Any, kind: Any, path: str) -> Any:
  """Returns a value as its annotation `kind` declares it, or refuses it."""
  union = isinstance(kind, types.UnionType)
  kinds = typing.get_args(kind) if union else (kind,)
  if type(None) in kinds and value is None:
    return None
  kinds = tuple(k for k in kinds if k is not type(None))
  nodes = tuple(k for k in kinds if hasattr(k, 'type'))
  if str in kinds and nodes:  # a name, or a node as a JSON object
    is_object = isinstance(value, str) and value.startswith('{')
    value = _literal(value, path) if is_object else value
    nodes = () if isinstance(value, str) else nodes
  kind = _pick(value, nodes, path) if nodes else kinds[0]
  if kind is Any:  # JSON, without the containers of ConfigDict
    is_node = isinstance(value, config_dict.ConfigDict)
    return value.to_dict() if is_node else value
  if dataclasses.is_dataclass(kind):
    return _build_node(value, kind, path)
  origin = typing.get_origin(kind)
  if origin is dict:
    if not isinstance(value, dict | config_dict.ConfigDict):
      raise ValueError(f'{path} must be a node: got {foreign.quote(value)}')
    _, child = typing.get_args(kind)
    return {
      k: _build(v, child, f'{path}.{foreign.text(k)}') for k, v in value.items()
    }
  if origin is tuple:
    if not isinstance(value, tuple | list):
      raise ValueError(
        f'{path} must be a tuple: got {foreign.quote(value)}; write '
        f'"{foreign.text((value,))}", with the comma'
      )
    item = typing.get_args(kind)[0]
    return tuple(_build(v, item, f'{path}[{i}]') for i, v in enumerate(value))
  if kind is float and type(value) is int and abs(value) < 2**1023:
    value = float(value)
  # bool is an int to Python, but not here.
  if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
    raise ValueError(
      f'{path} must be of type {kind.__name__}: got {foreign.quote(value)} '
      f'({type(value).__name__}); write {_EXAMPLES.get(kind, "a value of it")}'
    )
  return value


def _pick(value: Any, kinds: tuple[type, ...], path: str) -> type:
  """Returns the option class that the value's `type` names."""
  by_type = {kind.type: kind for kind in kinds}
  is_node = isinstance(value, dict | config_dict.ConfigDict)
  name = value.get('type') if is_node else value
  if not isinstance(name, str) or name not in by_type:
    near = spelling.near(name, by_type) if isinstance(name, str) else []
    hint = f'; did you mean {near[0]}?' if near else ''
    raise ValueError(
      f'{path}.type must be one of {tuple(by_type)}: got {foreign.quote(name)}'
      f'{hint}'
    )
  return by_type[name]


def _build_node(value: Any, kind: type, path: str) -> Any:
  if dataclasses.is_dataclass(value):  # a stage from `build`
    return value
  if isinstance(value, str) and hasattr(kind, 'type'):
    value = {}  # a type's name stands for its defaults
  if kind is schema.Model and isinstance(value, str):
    return _named_model(value, path)
  if not isinstance(value, dict | config_dict.ConfigDict):
    raise ValueError(f'{path} must be a node: got {foreign.quote(value)}')
  kinds = typing.get_type_hints(kind)
  for name in value:
    if name not in kinds:
      raise _UnknownKey(path, name, kinds)
  fields = {k: _build(v, kinds[k], f'{path}.{k}') for k, v in value.items()}
  try:
    return kind(**fields)
  except schema.FieldError as error:
    raise ValueError(f'{path}.{error.field} {error.detail}') from None


def _named_model(name: str, path: str, now: Any = None) -> schema.Model:
  """Returns the model of a preset or of a HuggingFace directory.

  Args:
    name: the preset's name, or the directory.
    path: dotted key of the model, for errors.
    now: the replaced node; a directory's model keeps its dtype,
      remat and attention.
  """
  if name in schema.PRESETS:
    return schema.PRESETS[name]
  folder = hub.folder(name) or os.path.expanduser(name)
  if not os.path.isdir(folder):
    raise ValueError(
      f'{path} must be one of {tuple(schema.PRESETS)}, or a HuggingFace '
      f'directory: got {foreign.quote(name)}{hub.hint(name)}'
    )
  model = hf_config.read(folder)
  if now is None:
    return model
  kept = {name: now[name] for name in ('dtype', 'remat', 'attention')}
  return dataclasses.replace(model, **kept)


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
  if known and names[: len(known)] == known:
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
