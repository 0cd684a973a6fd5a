"""Models of the HuggingFace hub that are in its local cache; downloads none.

`folder` finds the snapshot of an id such as `Qwen/Qwen3-0.6B`: a directory
whose name is the commit, so that a config that holds it names the weights. A
run that continues keeps its commit (`keeping`), even if the cache has
a newer one. The variables HF_HOME and HF_HUB_CACHE move the cache.
"""

import contextlib
import json
import os
import re
from collections.abc import Iterator

from posttrain.util import disk

_ID = re.compile(r'[A-Za-z0-9][\w.-]*/[\w.-]+', re.ASCII)
_SNAPSHOT = re.compile(r'.*/models--([^/]+)/snapshots/([^/]+)')
_kept: dict[str, str] = {}  # id -> the folder of the commit to use


def folder(name: str) -> str | None:
  """Returns the folder of an id's newest snapshot, or of the kept one.

  None if the text is a path that exists, is no id, or is not in the cache.

  Raises:
    ValueError: the kept snapshot is not in the cache any more.
  """
  if not is_id(name):
    return None
  if name in _kept:
    kept = _kept[name]
    if not os.path.isdir(kept):
      raise ValueError(
        f'{name} must be in the cache as when the run began: got no {kept!r}; '
        f'`hf download {name} --revision {os.path.basename(kept)}` gets it'
      )
    return kept
  import huggingface_hub

  file = huggingface_hub.try_to_load_from_cache(name, 'config.json')
  return os.path.dirname(file) if isinstance(file, str) else None


@contextlib.contextmanager
def keeping(workdir: str | None) -> Iterator[None]:
  """Makes `folder` return the snapshots that a run began with, in the block.

  Args:
    workdir: the run's folder; None, or one without a config.json: a new run.
  """
  old, path = dict(_kept), os.path.join(workdir or '', 'config.json')
  is_stored = workdir is not None and os.path.isfile(path)
  config = disk.read_json(path) if is_stored else None
  text = json.dumps(config, ensure_ascii=False)
  for stored in re.findall('"([^"]*/snapshots/[^"]*)"', text):
    if (name := id_of(stored)) is not None:
      _kept.setdefault(name, stored)
  try:
    yield
  finally:
    _kept.clear()
    _kept.update(old)


def hint(name: str) -> str:
  """Returns what to do about an id that is not in the cache, else ''."""
  is_path = os.path.isdir(os.path.dirname(name))
  if is_path or not is_id(name) or folder(name) is not None:
    return ''
  from huggingface_hub import constants

  return (
    f"; the hub's cache {constants.HF_HUB_CACHE} holds no model of this name; "
    f'`hf download {name}` gets one from the hub'
  )


def id_of(path: str) -> str | None:
  """Returns the model id of a snapshot's folder, OWNER/NAME, else None."""
  parts = _SNAPSHOT.fullmatch(path)
  return parts[1].replace('--', '/', 1) if parts else None


def commit(path: str) -> str | None:
  """Returns the commit of a snapshot's folder; None for another path."""
  parts = _SNAPSHOT.fullmatch(path)
  return parts[2] if parts else None


def is_id(name: str) -> bool:
  """Returns whether a text has the form OWNER/NAME and no path of it exists.

  The hub's library has further rules, as that a name has no two hyphens in a
  row.
  """
  if not _ID.fullmatch(name) or os.path.exists(name):
    return False
  from huggingface_hub import errors, utils

  try:
    utils.validate_repo_id(name)
  except errors.HFValidationError:
    return False
  return True
