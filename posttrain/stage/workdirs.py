"""The files and folders of a workdir, as they must be before a run begins."""

import os

from posttrain import schema

FILES = (
  'about.json',
  'config.json',
  'metrics.jsonl',
  'report.html',
  'trackers.json',
)
FOLDERS = (
  'pairs',
  'profiles',
  'rollouts',
  'tensorboard',
  'token_exports',
  'wandb',
)


def check(workdir: str, run: schema.Run) -> None:
  """Refuses a workdir in which something else has the name of a run's file.

  A link must end inside the workdir, because a workdir may come from elsewhere;
  `checkpoints` may link to another disk.

  Raises:
    ValueError: with the path that is in the way.
  """
  for name in FILES:
    path = os.path.join(workdir, name)
    if os.path.lexists(path):
      _require(os.path.isfile(path), path, 'a file')
      _require(_is_inside(path, workdir), path, 'a file in the workdir')
  for name in FOLDERS:
    path = os.path.join(workdir, name)
    if os.path.lexists(path):
      _require(os.path.isdir(path), path, 'a folder')
      _require(_is_inside(path, workdir), path, 'a folder in the workdir')
  for name in ('', *run.stages):
    path = os.path.join(workdir, 'checkpoints', name).rstrip(os.sep)
    if os.path.lexists(path):
      _require(os.path.isdir(path), path, 'a folder')


def _is_inside(path: str, workdir: str) -> bool:
  root = os.path.realpath(workdir)
  return os.path.commonpath([os.path.realpath(path), root]) == root


def _require(ok: bool, path: str, must: str) -> None:
  if ok:
    return
  kind = 'a folder' if os.path.isdir(path) else 'a file'
  if os.path.islink(path):
    kind = f'a link to {os.path.realpath(path)!r}'
  raise ValueError(
    f'{path} must be {must}: got {kind}; move it away, or name another '
    '--workdir'
  )
