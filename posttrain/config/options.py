"""ConfigDict <-> schema, and overrides from the command line.

1. `load(spec)` runs a recipe file, or reads a config.json, into a ConfigDict.
2. `override(config, 'sft.optim.lr', '1e-4')` changes one key or node.
3. `build(config)` turns it into `schema.Run`: unknown keys name the nearest
   one, every value has the declared type (`to_type`), every node passes its
   own checks.

A recipe is code: it may do whatever Python can, as the user who runs it. Checks
that span several options are in `checks`.
"""

import ast
import contextlib
import dataclasses
import json
import os
import pathlib
import re
import runpy
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from ml_collections import config_dict

from posttrain import schema
from posttrain.config import names
from posttrain.schema import bounds
from posttrain.util import disk, errors, hub

_FOLDER = pathlib.Path(__file__).parents[2] / 'configs'
# Keys that may differ when a run is resumed, besides those of the schedule.
_RESUMABLE = (
  r'^(metrics|checkpoint|watchdog)\.|^compilation_cache$',
  # Other devices: arrays are split anew, and numbers agree up to rounding.
  r'^mesh\.',
  # An implementation that the devices of another machine need.
  r'^([^.]+\.)?model\.attention$',
  # A server's address and retries, but not its model; the time limits and the
  # permitted faults of reward functions and environments.
  r'\.(base_url|api_key_env|timeout|tries|concurrency|probe)$',
  r'\.rollout\.(env_timeout|max_error_share)$',
  # Whether batches are sampled beside the updates, and a check of them.
  r'\.rollout\.(in_turns|rounding_share)$',
  # Where environments are called.
  r'\.rollout\.(workers|num_workers)$',
)
# Paths of data whose contents checkpoints name.
_DATA = r'\.(env|pairs)\.(path|eval_path)$|\.eval\.suite_path$'


def load(spec: str) -> config_dict.ConfigDict:
  """Loads `FILE.py`, `FILE.py:ARGUMENT`, or the config.json of a workdir.

  Raises:
    ValueError: the file is missing, fails, or is no config.
  """
  path, argument = _split(spec)
  if path.endswith('.json'):
    return from_dict(disk.read_json_object(path), path)
  name = pathlib.Path(path).stem
  try:
    recipe = runpy.run_path(path, run_name=errors.RECIPE + name)
    config = recipe['get_config'](*([argument] if argument else []))
    if not _is_node(config):
      raise TypeError(f'{errors.quote(config)} is no ConfigDict')
  except (Exception, SystemExit) as error:
    # Errors of options, raised by the schema or by configs/, name the key.
    is_own = isinstance(error, ValueError | RuntimeError)
    if is_own and errors.is_expected(error):
      raise
    raise ValueError(
      f'{path} must be a recipe with get_config: {errors.describe(error)} '
      f'({errors.place(error)})'
    ) from error
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
    '--config must name a recipe, as in sft:DIR,data.jsonl, or a file (FILE.py '
    f'or the config.json of a workdir; YAML is not read): got {path!r}'
    + (errors.nearest(recipe, known) or f'; the recipes are {", ".join(known)}')
  )


def override(config: config_dict.ConfigDict, key: str, text: str) -> None:
  """Sets the dotted `key` of `config`, in place, to the value in `text`.

  Scalars and tuples are read as Python or JSON literals, anything else is a
  string. A node takes a JSON object, whose missing keys take their defaults, or
  the name of its type; later overrides may set any of its options.
  The model also takes a preset's name, a run, or a HuggingFace directory, see
  `named_model`. The name of the only stage may be left out.
  """
  stages, first = config.get('stages') or (), key.partition('.')[0]
  if first not in config and len(stages) == 1 and first in config[stages[0]]:
    key = f'{stages[0]}.{key}'
  *parents, leaf = key.split('.')
  path, node = f'config.{key}', _node_of(config, key)
  if leaf == 'type' and node[leaf] != text:
    raise ValueError(
      f'{path} must be set by --{path[:-5]}={text}, or with other options of a '
      f'JSON object: got {text!r}'
    )
  value = text if node.get_type(leaf) is str else literal(text, path)
  value = None if text == 'None' else value
  if leaf == 'model' and len(parents) < 2 and isinstance(value, str):
    named = named_model(value, path, node[leaf])
    value = dataclasses.asdict(named)
  if parents and parents[0] in stages:
    value = with_defaults(value, schema.Stage, key.split('.')[1:])
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


def override_all(
  config: config_dict.ConfigDict, overrides: Sequence[tuple[str, str]]
) -> None:
  """Applies overrides in their order.

  Where they name other weights to begin with, the model, the tokenizer and the
  template of these come along, unless an override sets them too. A warm-up that
  the recipe sets, and that the stage is too short for, is a tenth of it.
  """
  for key, text in overrides:
    override(config, key, text)
  for name in config.get('stages', ()):
    # `build` reports what is missing, or of another type.
    with contextlib.suppress(AttributeError, KeyError, TypeError):
      stage = config[name]
      updates = stage.steps * stage.updates_per_rollout
      if (
        'warmup_steps' not in str(overrides)
        and stage.optim.warmup_steps >= updates
      ):
        stage.optim.warmup_steps = updates // 10
  first = config.get('stages', ('',))[0]
  given = dict(overrides)
  path = given.get(f'{first}.init', given.get('init', 'random'))
  if not schema.is_path(path):
    return
  try:
    start = read_weights(path)
  except ValueError:  # the run's own checks report it
    return
  nodes = {
    'model': _model_of(start, config.model),
    'tokenizer': start.tokenizer,
  }
  with config.unlocked(), config.ignore_type():
    for key, node in nodes.items():
      config[key] = config_dict.ConfigDict(dataclasses.asdict(node))
  for key, text in overrides:
    if key.startswith(('model', 'tokenizer')):
      override(config, key, text)


def read_weights(path: str) -> Any:
  """Returns the `weights.Checkpoint` of a run, or of another directory.

  Raises:
    ValueError: the path has no weights.
  """
  from posttrain.checkpoints import weights  # imports jax

  return weights.read(weights.find(path))


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
        f'{errors.quote(node)}'
      )
    if node is None or name not in node:
      keys = [f'config.{x}' for x, _ in _flat(config)]
      error = _no_option(path, '.'.join(parts[i:]), keys, list(node or ()))
      if node is None and 'did you mean' not in str(error):
        raise ValueError(
          f'{path} must be a node to have a key {name!r}: got None; set it to '
          f'a JSON object, as --{path}=\'{{"{name}": ...}}\''
        )
      raise error
    value, path = node[name], f'{path}.{name}'
  return node


def _check_stages(stages: Any, known: Sequence[str]) -> None:
  """Refuses stages that are no tuple of known names, once each."""
  ok = isinstance(stages, tuple | list) and len(stages) > 0
  if not ok or len(set(stages)) < len(stages) or set(stages) - set(known):
    raise ValueError(
      f'config.stages must be a tuple of names of {known}, once each: got '
      f'{errors.quote(stages)}'
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
    name: to_type(values.pop(name), schema.Stage, f'config.{name}')
    for name in stages
  }
  return to_type(values, schema.Run, 'config')


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


def check_resume(
  old: dict[str, Any], new: dict[str, Any], moved: bool = False
) -> None:
  """Refuses to resume with options that would change the numbers.

  Further stages may follow those of the workdir's run.

  Args:
    old: `to_dict` of the workdir's run.
    new: `to_dict` of the run that resumes it.
    moved: whether files of rows and pairs may have other paths: the caller
      compares their contents.
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
  # The schedule may change: the number of steps, and with it the rest of a
  # decaying learning rate, and the cadence of evaluation. With `eval.best`
  # another cadence would select other weights, and so would more steps if the
  # last one has an evaluation that the cadence has not.
  allowed = [*_RESUMABLE] + [_DATA] * moved
  for name in known:
    stage = old.get(name, {})
    evaluation, key = stage.get('eval', {}), f'^{re.escape(name)}'
    every, selects = evaluation.get('every'), evaluation.get('best') is not None
    if not selects or (every and stage['steps'] % every == 0):
      allowed.append(rf'{key}\.steps$')
    if not selects:
      allowed.append(rf'{key}\.eval\.every$')
    # Before, a sample that was too long ended the run.
    for env, entry in (stage.get('envs') or {}).items():
      if entry['sampler'].get('too_long') == 'error':
        allowed.append(rf'{key}\.envs\.{re.escape(env)}\.sampler\.too_long$')
  if lines := changes(old, new, allowed):
    raise ValueError(
      f'a resumed run must keep its config: changed {lines}; use another '
      '--workdir'
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
  before, after = (
    {k: x for k, x in _flat(tree) if not isinstance(x, dict)}
    for tree in (old, new)
  )
  lines = [
    f'config.{k} ({errors.quote(before.get(k))} -> '
    f'{errors.quote(after.get(k))})'
    for k in sorted(before | after)
    if before.get(k) != after.get(k) and not any(re.search(x, k) for x in but)
  ]
  return errors.text(', '.join(lines), 2000)


def _flat(tree: Any, prefix: str = '') -> Iterator[tuple[str, Any]]:
  """Yields the dotted key and the value of each node and option."""
  for key, value in tree.items():
    yield prefix + key, value
    if _is_node(value) or isinstance(value, dict):
      yield from _flat(value, f'{prefix}{key}.')


# --- values by their annotations ---------------------------------------------


def literal(text: str, key: str) -> Any:
  """Returns an override's value: JSON, a Python literal, or the text itself."""
  try:
    return disk.parse_json(text, key)
  except ValueError as error:
    problem = error
  try:
    return ast.literal_eval(text)
  except (ValueError, SyntaxError, RecursionError, MemoryError):
    if text.lstrip().startswith(('{', '[')):
      raise problem from None
    return text


def with_defaults(value: Any, kind: Any, keys: Sequence[str]) -> Any:
  """Returns a node of a type with all its options, so that each can be set.

  Args:
    value: the name of a type, or a JSON object with its `type`.
    kind: class of the schema.
    keys: the keys below it that lead to the node.

  Returns:
    A dict of plain values; `value` itself where a node has no types, or not
    this one.
  """
  for key in keys:
    for option in _options(kind):
      if typing.get_origin(option) is dict:
        kind = typing.get_args(option)[1]
        break
      is_node = dataclasses.is_dataclass(option)
      hints = typing.get_type_hints(option) if is_node else {}
      if key in hints:
        kind = hints[key]
        break
    else:
      return value
  name = value.get('type') if isinstance(value, dict) else value
  options = _options(kind)
  if isinstance(value, str) and str in options:  # another name, as of a stage
    return value
  for option in options:
    if dataclasses.is_dataclass(option) and getattr(option, 'type', 0) == name:
      defaults = {}
      for field in dataclasses.fields(option):
        make = field.default_factory
        default = field.default if make is dataclasses.MISSING else make()
        is_node = dataclasses.is_dataclass(default)
        plain = dataclasses.asdict(default) if is_node else default
        defaults[field.name] = plain
      return defaults | (value if isinstance(value, dict) else {})
  return value


def _options(kind: Any) -> tuple[Any, ...]:
  """Returns the types of a union, without annotations; or the one type."""
  if typing.get_origin(kind) is typing.Annotated:
    kind = typing.get_args(kind)[0]
  if typing.get_origin(kind) in (types.UnionType, typing.Union):
    return tuple(x for y in typing.get_args(kind) for x in _options(y))
  return (kind,)


def to_type(value: Any, kind: Any, path: str) -> Any:
  """Returns a value as an annotation declares it.

  A node becomes a dataclass of the schema (the one that its `type` names, if
  there are several), whose own checks refuse values of other types. A path
  (`schema.bounds.File`, `Folder`, `Compiled`) becomes absolute, so that
  config.json names the same file from any folder.

  Args:
    value: a plain value, a ConfigDict or a dict.
    kind: the annotation.
    path: dotted key of the value, for errors.

  Raises:
    ValueError: a node has an unknown key, or a value that the schema refuses.
  """
  reach, kinds = bounds.reach(kind), _options(kind)
  if value is None and type(None) in kinds:
    return None
  nodes = [k for k in kinds if dataclasses.is_dataclass(k)]
  if str in kinds and isinstance(value, str):  # a name, or a node's JSON
    value = literal(value, path) if nodes and value[:1] == '{' else value
    nodes = [] if isinstance(value, str) else nodes
  if nodes:
    return _node(value, nodes, path)
  kind = next(k for k in kinds if k is not type(None))
  origin, args = typing.get_origin(kind), typing.get_args(kind)
  if kind is Any:  # JSON, without the containers of ConfigDict
    return value.to_dict() if _is_node(value) else value
  if origin is dict and isinstance(value, dict | config_dict.ConfigDict):
    items = value.items()
    return {k: to_type(v, args[1], f'{path}.{k}') for k, v in items}
  if origin is tuple and isinstance(value, tuple | list):
    return tuple(to_type(x, args[0], path) for x in value)
  if kind is float and type(value) is int and abs(value) < 2**1023:
    return float(value)
  return _absolute(value, reach) if reach and isinstance(value, str) else value


def _node(value: Any, kinds: Sequence[Any], path: str) -> Any:
  """Returns a dataclass of the schema, whose own checks pass."""
  kind = kinds[0]
  if dataclasses.is_dataclass(value):  # a stage from `build`
    return value
  if kind is schema.Model and isinstance(value, str):
    return named_model(value, path)
  is_node = isinstance(value, dict | config_dict.ConfigDict)
  if hasattr(kind, 'type'):
    by_type = {kind.type: kind for kind in kinds}
    name = value.get('type') if is_node else value
    if not isinstance(name, str) or name not in by_type:
      raise ValueError(
        f'{path}.type must be one of {tuple(by_type)}: got {errors.quote(name)}'
        f'{errors.nearest(str(name), by_type)}'
      )
    # A type's name stands for its defaults.
    kind, value, is_node = by_type[name], value if is_node else {}, True
  hints = typing.get_type_hints(kind, include_extras=True)
  if not is_node:
    raise ValueError(
      f'{path} must be a node, as the JSON object {{"{next(iter(hints))}": '
      f'...}}: got {errors.quote(value)}'
    )
  for name in value:
    if name not in hints:
      raise _no_option(path, name, [f'{path}.{x}' for x in hints], list(hints))
  fields = {k: to_type(v, hints[k], f'{path}.{k}') for k, v in value.items()}
  try:
    node = kind(**fields)
  except schema.FieldError as error:
    raise ValueError(f'{path}.{error.field} {error.detail}') from None
  folder = node.path or '' if kind is schema.Tokenizer else ''
  if os.path.isdir(folder) and 'tokenizer.json' not in os.listdir(folder):
    with contextlib.suppress(ValueError):  # the renderer reports it
      tokens, kept = read_weights(folder).tokenizer, vars(kind()).items()
      own = dict(fields.items() - kept - {('path', folder)})
      node = dataclasses.replace(tokens, **own)
  return node


def _no_option(
  path: str, name: str, keys: Sequence[str], own: Sequence[str]
) -> ValueError:
  """Returns the error of a key that a node lacks, with what it may mean.

  Args:
    path: dotted key of the node.
    name: the key below it.
    keys: dotted keys that exist.
    own: the node's options.
  """
  near = names.hint(path, name, keys)
  options = f'; its options are {errors.text(", ".join(own), 400)}'
  return ValueError(
    f'{path} has no option {name.partition(".")[0]!r}{near or options}'
  )


def _absolute(path: str, reach: str) -> str:
  """Returns a path made absolute; another text as it is.

  A path that starts with an address (gs://...), or with a variable that holds
  an absolute path ($POSTTRAIN_DATA/...), stays as it is; so does one that names
  nothing, which the run refuses later. The id of a model in the hub's cache
  becomes the folder of its commit.
  """
  if reach == 'compiled':  # a folder that may not exist yet
    is_fixed = '://' in path or path.startswith('~')
    return path if is_fixed else os.path.abspath(path)
  if reach == 'folder' and schema.is_path(path):
    path = hub.folder(path) or path
  elif reach != 'file':
    return path
  text = os.path.expandvars(path)
  if not path or (text != path and os.path.isabs(text)):
    return path
  text = os.path.expanduser(text)
  return os.path.abspath(text) if os.path.exists(text) else path


def named_model(name: str, path: str, now: Any = None) -> schema.Model:
  """Returns the model of a preset, of a run or of a HuggingFace directory.

  Args:
    name: the preset's name, or the directory.
    path: dotted key of the model, for errors.
    now: the replaced node; a directory's model keeps its dtype,
      remat, rope_length and attention, a run's its attention.
  """
  if name in schema.PRESETS:
    return schema.PRESETS[name]
  folder = hub.folder(name) or os.path.expanduser(name)
  if not os.path.isdir(folder):
    raise ValueError(
      f'{path} must be one of {tuple(schema.PRESETS)}, or a run or HuggingFace '
      f'directory: got {name!r}{hub.hint(name)}'
    )
  return _model_of(read_weights(folder), now)


def _model_of(start: Any, now: Any) -> schema.Model:
  """Returns the model of weights, with what they leave open as it is `now`."""
  is_run = start.kind == 'run'
  names = schema.FREE if is_run else schema.UNSAVED
  kept = {name: now[name] for name in names if now is not None}
  return dataclasses.replace(start.model, **kept)
