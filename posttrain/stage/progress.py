"""How far the stages of a workdir have come, read from their checkpoints."""

import os

from posttrain import schema
from posttrain.checkpoints import store


def end_of(cfg: schema.Run, name: str, workdir: str) -> int | None:
  """Returns the end of a finished stage in metrics.jsonl, in bytes.

  None if the stage is unfinished.

  Raises:
    ValueError: it was trained for more steps than the config has.
  """
  folder = os.path.join(workdir, 'checkpoints', name)
  if not _has_steps(folder):
    return None
  host = store.read_host(folder)
  steps = cfg.stages[name].steps
  if host['step'] > steps:
    raise ValueError(
      f'config.{name}.steps must be at least the {host["step"]} steps that '
      f'are trained already: got {steps}; use another --workdir'
    )
  return host['metrics_position'] if host['step'] == steps else None


def check_order(cfg: schema.Run, name: str, workdir: str) -> None:
  """Refuses to train a stage that a later one was built upon.

  Raises:
    ValueError: with the folder to move away.
  """
  names = list(cfg.stages)
  for later in names[names.index(name) + 1 :]:
    folder = os.path.join(workdir, 'checkpoints', later)
    if _has_steps(folder):
      raise ValueError(
        f'stage {name!r} must end before stage {later!r} begins: it has '
        f'steps left to train, but {folder} holds steps; move that folder '
        'away to train both again'
      )


def _has_steps(folder: str) -> bool:
  return os.path.isdir(folder) and any(
    name.isdigit() for name in os.listdir(folder)
  )
