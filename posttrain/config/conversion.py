"""Conversion of values to the types of their options, and errors by key.

1. `literal(text, path)` reads the text of an override.
2. `to_type(value, kind, path)` returns a value as an annotation declares it: a
   dataclass of the schema for a node (the one that its `type` names, if there
   are several), a plain value for anything else. A path (`schema.bounds.File`,
   `Folder`, `Compiled`) becomes absolute, so that config.json names the same
   file from any folder.

An error is one line with the dotted key, the requirement and the value.
"""

import ast
import dataclasses
import os
import types
import typing
from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

from posttrain import schema
from posttrain.config import names
from posttrain.models import hf_config
from posttrain.schema import bounds
from posttrain.util import disk, errors, hub

# Type of an option -> how a value is written.
_EXAMPLES = {
  int: 'a whole number, as in 100',
  float: 'a number, as in 1e-4',
  bool: 'true or false',
  str: 'a text',
}


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
    kind = _child(kind, key)
  name = value.get('type') if isinstance(value, dict) else value
  options = _options(kind)
  if isinstance(value, str) and str in options:  # another name, as of a stage
    return value
  for option in options:
    if dataclasses.is_dataclass(option) and getattr(option, 'type', 0) == name:
      given = value if isinstance(value, dict) else {}
      return _defaults(option) | given
  return value


def _options(kind: Any) -> tuple[Any, ...]:
  """Returns the types of a union, without annotations; or the one type."""
  if typing.get_origin(kind) is typing.Annotated:
    kind = typing.get_args(kind)[0]
  if typing.get_origin(kind) in (types.UnionType, typing.Union):
    return tuple(x for y in typing.get_args(kind) for x in _options(y))
  return (kind,)


def _child(kind: Any, key: str) -> Any:
  """Returns the annotation of a key below one, None if there is none."""
  for option in _options(kind):
    if typing.get_origin(option) is dict:
      return typing.get_args(option)[1]
    if dataclasses.is_dataclass(option):
      hints = typing.get_type_hints(option)
      if key in hints:
        return hints[key]
  return None


def _defaults(kind: Any) -> dict[str, Any]:
  """Returns the options of a class that have defaults, as plain values."""
  defaults = {}
  for field in dataclasses.fields(kind):
    if field.default_factory is not dataclasses.MISSING:
      default = field.default_factory()
    else:
      default = field.default
    if dataclasses.is_dataclass(default):
      default = dataclasses.asdict(default)
    if default is not dataclasses.MISSING:
      defaults[field.name] = default
  return defaults


def to_type(value: Any, kind: Any, path: str) -> Any:
  """Returns a value as an annotation declares it.

  Args:
    value: a plain value, a ConfigDict or a dict.
    kind: the annotation.
    path: dotted key of the value, for errors.

  Raises:
    ValueError: the value is of another type, or a node has an unknown key.
  """
  reach = bounds.reach(kind)
  kinds = _options(kind)
  if type(None) in kinds and value is None:
    return None
  kinds = tuple(k for k in kinds if k is not type(None))
  nodes = tuple(k for k in kinds if hasattr(k, 'type'))
  if str in kinds and nodes:  # a name, or a node as a JSON object
    is_object = isinstance(value, str) and value.startswith('{')
    value = literal(value, path) if is_object else value
    nodes = () if isinstance(value, str) else nodes
  kind = _pick(value, nodes, path) if nodes else kinds[0]
  if kind is Any:  # JSON, without the containers of ConfigDict
    is_node = isinstance(value, config_dict.ConfigDict)
    return value.to_dict() if is_node else value
  if dataclasses.is_dataclass(kind):
    return _node(value, kind, path)
  containers = {dict: _dict, tuple: _tuple}
  read = containers.get(typing.get_origin(kind), _scalar)
  value = read(value, kind, path)
  return _absolute(value, reach) if reach and isinstance(value, str) else value


def _absolute(path: str, reach: Any) -> str:
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


def _dict(value: Any, kind: Any, path: str) -> dict[str, Any]:
  if not isinstance(value, dict | config_dict.ConfigDict):
    raise ValueError(f'{path} must be a node: got {errors.quote(value)}')
  _, child = typing.get_args(kind)
  return {k: to_type(v, child, f'{path}.{k}') for k, v in value.items()}


def _tuple(value: Any, kind: Any, path: str) -> tuple[Any, ...]:
  if not isinstance(value, tuple | list):
    raise ValueError(
      f'{path} must be a tuple: got {errors.quote(value)}; write '
      f'"{errors.text((value,))}", with the comma'
    )
  item = typing.get_args(kind)[0]
  return tuple(to_type(v, item, f'{path}[{i}]') for i, v in enumerate(value))


def _scalar(value: Any, kind: type, path: str) -> Any:
  if kind is float and type(value) is int and abs(value) < 2**1023:
    value = float(value)
  # bool is an int to Python, but not here.
  if not isinstance(value, kind) or isinstance(value, bool) != (kind is bool):
    raise ValueError(
      f'{path} must be of type {kind.__name__}: got {errors.quote(value)} '
      f'({type(value).__name__}); write {_EXAMPLES.get(kind, "a value of it")}'
    )
  return value


def _pick(value: Any, kinds: tuple[type, ...], path: str) -> type:
  """Returns the option class that the value's `type` names."""
  by_type = {kind.type: kind for kind in kinds}
  is_node = isinstance(value, dict | config_dict.ConfigDict)
  name = value.get('type') if is_node else value
  if not isinstance(name, str) or name not in by_type:
    raise ValueError(
      f'{path}.type must be one of {tuple(by_type)}: got {errors.quote(name)}'
      f'{errors.nearest(str(name), by_type)}'
    )
  return by_type[name]


def _node(value: Any, kind: type, path: str) -> Any:
  """Returns a dataclass of the schema, whose own checks pass."""
  if dataclasses.is_dataclass(value):  # a stage from `build`
    return value
  if isinstance(value, str) and hasattr(kind, 'type'):
    value = {}  # a type's name stands for its defaults
  if kind is schema.Model and isinstance(value, str):
    return named_model(value, path)
  if not isinstance(value, dict | config_dict.ConfigDict):
    raise ValueError(f'{path} must be a node: got {errors.quote(value)}')
  kinds = typing.get_type_hints(kind, include_extras=True)
  for name in value:
    if name not in kinds:
      near = names.hint(path, name, [f'{path}.{x}' for x in kinds])
      raise ValueError(
        f'{path} has no option {name!r}'
        + (near or f'; its options are {", ".join(kinds)}')
      )
  fields = {k: to_type(v, kinds[k], f'{path}.{k}') for k, v in value.items()}
  try:
    return kind(**fields)
  except schema.FieldError as error:
    raise ValueError(f'{path}.{error.field} {error.detail}') from None


def named_model(name: str, path: str, now: Any = None) -> schema.Model:
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
      f'directory: got {name!r}{hub.hint(name)}'
    )
  model = hf_config.read(folder)
  if now is None:
    return model
  kept = {name: now[name] for name in ('dtype', 'remat', 'attention')}
  return dataclasses.replace(model, **kept)
