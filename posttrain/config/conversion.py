"""Conversion of values to the types of their options, and errors by key.

1. `literal(text, path)` reads the text of an override.
2. `to_type(value, kind, path)` returns a value as an annotation declares it: a
   dataclass of the schema for a node (the one that its `type` names, if there
   are several), a plain value for anything else.

An error is one line with the dotted key, the requirement and the value.
"""

import ast
import dataclasses
import json
import os
import types
import typing
from collections.abc import Sequence
from typing import Any

from ml_collections import config_dict

from posttrain import schema
from posttrain.config.aliases import values
from posttrain.models import hf_config
from posttrain.util import foreign, hub, json_files

# Type of an option -> how a value is written.
_EXAMPLES = {
  int: 'a whole number, as in 100',
  float: 'a number, as in 1e-4',
  bool: 'true or false',
  str: 'a text',
}


class UnknownKey(Exception):
  """A node has a key that its class lacks: its path, the key, known keys."""


def literal(text: str, key: str) -> Any:
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


def as_node(value: dict[str, Any], path: str) -> config_dict.ConfigDict:
  """Returns a JSON object as a node."""
  try:
    return config_dict.ConfigDict(value)
  except ValueError as error:  # a dot, which separates the keys of nodes
    raise ValueError(
      f'{path} must have keys without dots: got {foreign.quote(value)}'
    ) from error


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
  options = typing.get_args(kind)
  if isinstance(value, str) and str in options:  # another name, as of a stage
    return value
  for option in options:
    if dataclasses.is_dataclass(option) and getattr(option, 'type', 0) == name:
      given = value if isinstance(value, dict) else {}
      return _defaults(option) | given
  return value


def _child(kind: Any, key: str) -> Any:
  """Returns the annotation of a key below one, None if there is none."""
  union = isinstance(kind, types.UnionType)
  for option in typing.get_args(kind) if union else (kind,):
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
    ValueError: the value is of another type.
    UnknownKey: a node has a key that its class lacks.
  """
  union = isinstance(kind, types.UnionType)
  kinds = typing.get_args(kind) if union else (kind,)
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
  return read(value, kind, path)


def _dict(value: Any, kind: Any, path: str) -> dict[str, Any]:
  if not isinstance(value, dict | config_dict.ConfigDict):
    raise ValueError(f'{path} must be a node: got {foreign.quote(value)}')
  _, child = typing.get_args(kind)
  return {
    k: to_type(v, child, f'{path}.{foreign.text(k)}') for k, v in value.items()
  }


def _tuple(value: Any, kind: Any, path: str) -> tuple[Any, ...]:
  if not isinstance(value, tuple | list):
    raise ValueError(
      f'{path} must be a tuple: got {foreign.quote(value)}; write '
      f'"{foreign.text((value,))}", with the comma'
    )
  item = typing.get_args(kind)[0]
  return tuple(to_type(v, item, f'{path}[{i}]') for i, v in enumerate(value))


def _scalar(value: Any, kind: type, path: str) -> Any:
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
    hint = values.hint(path, name, by_type) if isinstance(name, str) else ''
    raise ValueError(
      f'{path}.type must be one of {tuple(by_type)}: got {foreign.quote(name)}'
      f'{hint}'
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
    raise ValueError(f'{path} must be a node: got {foreign.quote(value)}')
  kinds = typing.get_type_hints(kind)
  for name in value:
    if name not in kinds:
      raise UnknownKey(path, name, kinds)
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
      f'directory: got {foreign.quote(name)}{hub.hint(name)}'
    )
  model = hf_config.read(folder)
  if now is None:
    return model
  kept = {name: now[name] for name in ('dtype', 'remat', 'attention')}
  return dataclasses.replace(model, **kept)
