"""The folders of steps in a stage's folder: `<stage>/<step>/{state,host}`."""

import os
import re
import warnings

from etils import epath

from posttrain import processes
from posttrain.util import foreign


def local(path: str) -> epath.Path:
  """Returns an absolute path; Orbax takes no other.

  Raises:
    ValueError: epath would ask a remote host for it, as for /gs/BUCKET.
  """
  text = os.path.realpath(os.path.expanduser(path))
  folder = epath.Path(text)
  if os.fspath(folder) != text:
    raise ValueError(
      f'a checkpoint path must be of a local folder: got {foreign.quote(path)}'
    )
  return folder


def steps(stage: epath.Path) -> list[epath.Path]:
  """Returns the folders that are named by a step, oldest first."""
  folders = stage.iterdir() if stage.is_dir() else ()
  numbered = (x for x in folders if re.fullmatch('0|[1-9][0-9]*', x.name))
  return sorted((x for x in numbered if x.is_dir()), key=lambda x: int(x.name))


def newest(stage: epath.Path) -> epath.Path | None:
  """Returns the newest step; warns of newer folders that hold none."""
  for step in reversed(steps(stage)):
    if is_step(step):
      return step
    warnings.warn(f'{step} is not used: it holds no step', stacklevel=3)
  return None


def is_step(folder: epath.Path) -> bool:
  """Returns whether a folder has both items of a step."""
  return (folder / 'state').exists() and (folder / 'host').exists()


def move_strays(stage: epath.Path) -> None:
  """Renames files that have a step's name, with a warning.

  A step of that name could not be saved.
  """
  for path in stage.iterdir() if stage.is_dir() else ():
    if not re.fullmatch('[0-9]+', path.name) or path.is_dir():
      continue
    target = _free(stage / f'{path.name}.stray')
    warnings.warn(
      f'{path} is no folder of a step; it is renamed to {target.name}',
      stacklevel=3,
    )
    if processes.is_first():
      path.rename(target)


def _free(path: epath.Path) -> epath.Path:
  """Returns the path, with a number after it if there is a file of the name."""
  names = (path.name, *(f'{path.name}{i}' for i in range(2, 1000)))
  return next(
    path.parent / name
    for name in names
    if not os.path.lexists(path.parent / name)
  )
