"""Paths of a config, made absolute: config.json names the same from any folder.

Fields whose annotation is `base.File`, `base.Folder`, `base.Compiled` or a
reference hold paths; no list of them is kept here.

Older versions stored paths as they were given. `resolved` finds those that are
relative, and may be the paths of a run that continues in another folder.
"""

import dataclasses
import itertools
import os
import typing
from collections.abc import Mapping
from typing import Any

from posttrain import schema
from posttrain.util import hub


def absolute(node: Any) -> Any:
  """Returns options with absolute paths.

  A path that starts with an address (gs://...), or with a variable that holds
  an absolute path ($POSTTRAIN_DATA/...), stays as it is; so does one that names
  nothing, which the run refuses later. The id of a model in the hub's cache
  becomes the folder of its commit.

  Args:
    node: a dataclass of the schema, or a value in one.
  """
  if isinstance(node, dict):
    return {key: absolute(value) for key, value in node.items()}
  if not dataclasses.is_dataclass(node) or isinstance(node, type):
    return node
  changed, kinds = {}, _kinds(node)
  for field in dataclasses.fields(node):
    value, kind = getattr(node, field.name), kinds.get(field.name)
    is_default = value == field.default  # of the cache: ~ is another on a host
    if isinstance(value, str) and kind in _KINDS and value and not is_default:
      new = _KINDS[kind](value)
    else:
      new = absolute(value)
    if new != value:
      changed[field.name] = new
  return dataclasses.replace(node, **changed) if changed else node


def named(node: Any, key: str = '') -> dict[str, str]:
  """Returns the paths and other references in options: dotted key -> path.

  Args:
    node: a dataclass of the schema, or a value in one.
    key: its dotted key.
  """
  if isinstance(node, dict):
    children, kinds = node, {}
  elif dataclasses.is_dataclass(node) and not isinstance(node, type):
    children, kinds = vars(node), _kinds(node)
  else:
    return {}
  paths = {}
  for name, value in children.items():
    own = f'{key}.{name}' if key else name
    if isinstance(value, str) and name in kinds:
      paths[own] = value
    paths |= named(value, own)
  return paths


def resolved(old: Mapping[str, Any], new: Mapping[str, str]) -> set[str]:
  """Returns the keys whose old path is relative, and may be the new one.

  They may be if there is a folder in which all these relative paths are the new
  absolute ones: where the run began is not stored.

  Args:
    old: dotted key -> value, of a config with relative paths.
    new: dotted key -> path, see `named`.
  """
  folders = {}
  for key, path in new.items():
    folder = _began_in(old.get(key), path)
    if folder is not None:
      folders[key] = folder
  for (up, folder), (more, above) in itertools.pairwise(
    sorted(folders.values())
  ):
    for _ in range(up, more):
      folder = os.path.dirname(folder)
    if folder != above:
      return set()
  return set(folders)


def _began_in(old: Any, new: str) -> tuple[int, str] | None:
  """Returns where a relative path is an absolute one; None if nowhere.

  (0, '/a') for 'b/c' and '/a/b/c'; (1, '/a') for '../b' and '/a/b': the parent
  of the folder is /a.
  """
  if not isinstance(old, str) or not old or not os.path.isabs(new):
    return None
  if os.path.isabs(old) or not schema.is_path(old):
    return None
  parts = os.path.normpath(old).split(os.sep)
  up = parts.count(os.pardir)
  tail = os.sep + os.sep.join(parts[up:])
  if not new.endswith(tail):
    return None
  return up, new.removesuffix(tail) or os.sep


def _kinds(node: Any) -> dict[str, str]:
  """Returns the kind of path that each field of a dataclass holds."""
  hints = typing.get_type_hints(type(node), include_extras=True)
  kinds = {
    name: getattr(hint, '__metadata__', (None,))[0]
    for name, hint in hints.items()
  }
  return {name: kind for name, kind in kinds.items() if kind in _KINDS}


def _file(path: str) -> str:
  text = os.path.expandvars(path)
  if text != path and os.path.isabs(text):
    return path
  text = os.path.expanduser(text)
  return os.path.abspath(text) if os.path.exists(text) else path


def _folder(path: str) -> str:
  """Returns the path of weights or of a tokenizer, or another reference."""
  return _file(hub.folder(path) or path) if schema.is_path(path) else path


def _new_folder(path: str) -> str:
  """Returns the path of a folder that may not exist yet."""
  return path if '://' in path else os.path.abspath(os.path.expanduser(path))


_KINDS = {'file': _file, 'folder': _folder, 'compiled': _new_folder}
