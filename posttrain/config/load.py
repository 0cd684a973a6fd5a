"""ConfigDict <-> schema, and overrides from the command line.

1. `load(path)` runs a recipe file and returns its ConfigDict.
2. `override(config, 'sft.optim.lr', '1e-4')` changes one key or node.
3. `build(config)` turns it into `schema.Run`: unknown keys name the nearest
   one, every value has the declared type, every node passes its own checks.

Checks that span several options are in `checks`.
"""

import ast
import dataclasses
import difflib
import json
import os
import re
import types
import typing
from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

from posttrain import schema
from posttrain.config import recipes
from posttrain.models import hf_config
from posttrain.util import foreign, json_files

RECIPE_PREFIX = recipes.PREFIX
_SHOWN = 20  # changed options in a message
# Keys that may differ when a run is resumed: the number of steps (and with it
# the rest of a decaying schedule), logging, saving, evaluation cadence.
RESUMABLE = (
  r'^[^.]+\.steps$',
  r'^[^.]+\.eval\.every$',
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
  *parents, leaf = key.split('.')
  node, path = config, 'config'
  for name in parents:
    node = _child(node, name, path)
    path += f'.{name}'
    if not isinstance(node, config_dict.ConfigDict):
      raise ValueError(
        f'{path} must be a node to have a key {foreign.quote(leaf)}'
      )
  now = _child(node, leaf, path)
  if leaf == 'type' and now != text:
    parent = '.'.join(parents)
    raise ValueError(
      f'{path} must be set whole to be of another type, its options with it: '
      f'got .type={text}, expected --config.{parent}={text}, or '
      f"""--config.{parent}='{{"type": "{text}", ...}}'"""
    )
  value = (
    text if node.get_type(leaf) is str else _literal(text, f'{path}.{leaf}')
  )
  value = None if text == 'None' else value
  if leaf == 'model' and len(parents) < 2 and isinstance(value, str):
    named = _named_model(value, f'{path}.{leaf}', node[leaf])
    value = dataclasses.asdict(named)
  if isinstance(value, dict):
    value = config_dict.ConfigDict(value)
  with node.unlocked(), node.ignore_type():
    node[leaf] = value


def _child(node: Any, name: str, path: str) -> Any:
  if name not in node:
    raise ValueError(_unknown(path, name, node))
  return node[name]


def _unknown(path: str, name: str, known: Any) -> str:
  """Returns the error of an unknown key, with the nearest known one."""
  inner = known.to_dict() if isinstance(known, config_dict.ConfigDict) else {}
  below = [key for key in _flat(inner) if key.endswith(f'.{name}')]
  near = below or difflib.get_close_matches(name, list(known), 1)
  if near:
    hint = f'did you mean {path}.{near[0]}?'
  elif known:
    hint = f'the keys of {path} are {foreign.text(", ".join(known))}'
  else:
    hint = (
      f'it has none yet: --config{path.removeprefix("config")}='
      f"""'{{"{foreign.text(name)}": {{...}}}}' sets it"""
    )
  key = f'{path}.{foreign.text(name)}'
  return f'{key} must be a key of the schema: it is unknown; {hint}'


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


def build(config: config_dict.ConfigDict) -> schema.Run:
  """Turns a ConfigDict into the checked `schema.Run`.

  Raises:
    ValueError: one line with the dotted key, what it must be, what it is.
  """
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
  shared = {field.name for field in dataclasses.fields(schema.Run)}
  for name in values.keys() - shared:
    if isinstance(values[name], config_dict.ConfigDict):
      raise ValueError(
        f'config.{foreign.text(name)} must be listed in config.stages: got '
        f'{foreign.quote(names)}; nothing reads a stage that does not run'
      )
  values['stages'] = stages
  return _absolute(_build(values, schema.Run, 'config'))


def _absolute(run: schema.Run) -> schema.Run:
  """Makes the paths of `init` and of the tokenizer absolute."""

  def absolute(path):
    name = path and path != 'random' and os.path.expanduser(path)
    return os.path.abspath(name) if name and os.path.exists(name) else path

  names = ('path', 'chat_template')
  tokenizer = {name: absolute(getattr(run.tokenizer, name)) for name in names}
  return dataclasses.replace(
    run,
    tokenizer=dataclasses.replace(run.tokenizer, **tokenizer),
    stages={
      name: dataclasses.replace(stage, init=absolute(stage.init))
      for name, stage in run.stages.items()
    },
  )


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
      raise ValueError(f'{path} must be a tuple: got {foreign.quote(value)}')
    item = typing.get_args(kind)[0]
    return tuple(_build(v, item, f'{path}[{i}]') for i, v in enumerate(value))
  if kind is float and type(value) is int and abs(value) < 2**1023:
    value = float(value)
  # bool is an int to Python, but not here.
  if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
    raise ValueError(
      f'{path} must be of type {kind.__name__}: got {foreign.quote(value)} '
      f'({type(value).__name__})'
    )
  return value


def _pick(value: Any, kinds: tuple[type, ...], path: str) -> type:
  """Returns the option class that the value's `type` names."""
  by_type = {kind.type: kind for kind in kinds}
  is_node = isinstance(value, dict | config_dict.ConfigDict)
  name = value.get('type') if is_node else value
  if not isinstance(name, str) or name not in by_type:
    raise ValueError(
      f'{path}.type must be one of {tuple(by_type)}: got {foreign.quote(name)}'
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
  hints = typing.get_type_hints(kind)
  for name in value:
    if name not in hints:
      raise ValueError(_unknown(path, name, hints))
  fields = {k: _build(v, hints[k], f'{path}.{k}') for k, v in value.items()}
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
  folder = os.path.expanduser(name)
  if not os.path.isdir(folder):
    raise ValueError(
      f'{path} must be one of {tuple(schema.PRESETS)}, or a HuggingFace '
      f'directory: got {foreign.quote(name)}'
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

  Further stages may follow those of the workdir's run.

  Args:
    old: `to_dict` of the workdir's run.
    new: `to_dict` of the run that resumes it.
  """
  old = _with_defaults(old)
  known, names = (list(x.get('stages') or ()) for x in (old, new))
  if known and names[: len(known)] == known:
    added = names[len(known) :]
    new = {k: v for k, v in new.items() if k not in added}
    new['stages'] = old.get('stages')
  if lines := changes(old, new, RESUMABLE):
    raise ValueError(
      f'a resumed run must keep its config: changed {lines}; use another '
      '--workdir, or undo the change'
    )


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
