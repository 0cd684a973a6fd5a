"""The full ConfigDict of a run.

Every key of the schema exists in the ConfigDict, once, with its default. The
ConfigDict is locked, so a misspelt key is an error and not a new key.
"""

import dataclasses
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import ml_collections

from configs import arguments
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


def keep(
  config: ml_collections.ConfigDict, key: str, own: arguments.Own
) -> ml_collections.ConfigDict:
  """Returns a config whose node `key` cannot lose what the user has named.

  Data and rewards of the argument after the recipe's name are in that node. An
  override that replaces the node, or one above it, is refused unless the new
  one has them too. Overrides of keys below the node are free.

  Args:
    config: the locked config.
    key: dotted key of the node.
    own: the argument.
  """
  rewards = (x.fn or x.model for x in own.rewards.values())
  names = [x for x in (own.data, own.held_out, *rewards) if x]
  return _keep(config, key, 'config', names) if names else config


def _keep(
  config: ml_collections.ConfigDict, key: str, path: str, names: Sequence[str]
) -> ml_collections.ConfigDict:
  """Returns a node whose child with the first part of `key` is kept."""
  first, _, rest = key.partition('.')
  kept = _Keeping(config)
  if rest:
    kept[first] = _keep(config[first], rest, f'{path}.{first}', names)
  object.__setattr__(kept, '_kept', (first, f'{path}.{first}', names))
  return kept.lock()


class _Keeping(ml_collections.ConfigDict):
  """A node with a child that must have certain texts, see `keep`."""

  _kept = ('', '', ())  # the child's key, its dotted key, the texts

  def __setitem__(self, key: str, value: Any) -> None:
    kept, path, names = self._kept
    if key == kept:
      texts = {
        form for x in _texts(value) for form in (x, arguments.absolute(x))
      }
      if lost := [x for x in names if x not in texts]:
        raise ValueError(
          f'{path} must keep the data and rewards in {arguments.NAME}: got a '
          f'node without {", ".join(map(repr, lost))}; add them to it, or '
          'leave them out of the argument'
        )
    super().__setitem__(key, value)


def _texts(value: Any) -> Iterator[str]:
  """Yields the texts in a node."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, ml_collections.ConfigDict | dict):
    for child in value.values():
      yield from _texts(child)


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
