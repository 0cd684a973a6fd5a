"""Paths of a config, made absolute: config.json names the same from any folder.

Fields whose annotation is `base.File`, `base.Folder`, `base.Compiled` or a
reference hold paths; no list of them is kept here.
"""

import dataclasses
import os
import typing
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
  hints = typing.get_type_hints(type(node), include_extras=True)
  changed = {}
  for field in dataclasses.fields(node):
    value = getattr(node, field.name)
    (kind,) = getattr(hints[field.name], '__metadata__', (None,))
    is_default = value == field.default  # of the cache: ~ is another on a host
    if isinstance(value, str) and kind in _KINDS and value and not is_default:
      new = _KINDS[kind](value)
    else:
      new = absolute(value)
    if new != value:
      changed[field.name] = new
  return dataclasses.replace(node, **changed) if changed else node


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
