"""The full ConfigDict of a run.

Every key of the schema exists in the ConfigDict, once, with its default. The
ConfigDict is locked, so a misspelt key is an error and not a new key.
"""

import dataclasses
import types
import typing
from typing import Any

import ml_collections

from posttrain import schema


def config_dict(run: schema.Run) -> ml_collections.ConfigDict:
  """Returns the locked ConfigDict of a run.

  `run.stages` becomes the tuple `stages` (names, in order) and one subtree
  per stage under its own name.

  Raises:
    ValueError: a stage has the name of a shared key.
  """
  config = _node(run)
  del config['stages']
  config['stages'] = tuple(run.stages)
  for name, stage in run.stages.items():
    if name in config:
      raise ValueError(
        f'a stage must not be named like a shared key: got {name!r}'
      )
    config[name] = _node(stage)
  return config.lock()


def node(options: Any) -> ml_collections.ConfigDict:
  """Returns one dataclass of the schema as a locked ConfigDict."""
  return _node(options).lock()


def unset(config: ml_collections.ConfigDict, key: str) -> None:
  """Sets an optional key to None; the key keeps its type."""
  config.get_ref(key).set(None)


def _node(options: Any) -> ml_collections.ConfigDict:
  """Returns a dataclass as a ConfigDict; None becomes a typed placeholder."""
  hints = typing.get_type_hints(type(options))
  config = ml_collections.ConfigDict()
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    if value is None:
      kind = _type(hints[field.name])
      config[field.name] = ml_collections.config_dict.placeholder(kind)
    elif dataclasses.is_dataclass(value):
      config[field.name] = _node(value)
    elif isinstance(value, dict):
      config[field.name] = ml_collections.ConfigDict(
        {
          key: _node(child) if dataclasses.is_dataclass(child) else child
          for key, child in value.items()
        }
      )
    else:
      config[field.name] = value
  return config


def _type(hint: Any) -> type:
  """Returns the type of an optional field's values other than None."""
  assert isinstance(hint, types.UnionType), hint
  kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
  plain = [kind for kind in kinds if not dataclasses.is_dataclass(kind)]
  return plain[0] if plain else ml_collections.ConfigDict
