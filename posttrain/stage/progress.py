"""How far the stages of a workdir have come.

Read from the checkpoints, each of which holds the options it was trained with;
by the first process of a run, for all of them.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from posttrain import processes, schema
from posttrain.checkpoints import store
from posttrain.pipeline import tally


def end_of(cfg: schema.Run, name: str, workdir: str) -> int | None:
  """Returns the end of a finished stage in metrics.jsonl, in bytes.

  None if the stage is unfinished, or if its last step is damaged and no later
  stage was built on it: then it is trained again from an older step. A stage
  that a later one was built on is finished, whatever became of its own steps.

  Raises:
    ValueError: it was trained for more steps than the config has.
    NoReward: no rollout of the finished stage had a reward, because reward
      functions or episodes failed.
  """
  host, unread = processes.on(0, lambda: _trained(cfg, name, workdir))
  if host is None:
    return None
  if unread is not None and not store.is_sound(unread):
    if os.path.basename(unread) != str(host['step']):
      raise ValueError(
        f'{unread} must hold the best step of stage {name!r}: it is missing or '
        "damaged; put it back, or move the stage's folder away to train it "
        'again'
      )
    warnings.warn(f'{unread} is damaged; an older step is used', stacklevel=2)
    return None
  tally.check_saved(name, host)
  _announce_patience(cfg, name, host)
  return host['metrics_position']


def _announce_patience(
  cfg: schema.Run, name: str, host: dict[str, Any]
) -> None:
  """Prints that more steps do not continue a stage that patience ended."""
  steps, step = cfg.stages[name].steps, host['step']
  before = host.get('config', {}).get(name, {}).get('steps', steps)
  if host.get('finished') and before < steps and processes.is_first():
    print(
      f'stage {name} stays finished: its patience ended at step {step}, so '
      f'config.{name}.steps={steps} changes nothing; use another --workdir to '
      'train it for longer',
      file=sys.stderr,
    )


def _trained(
  cfg: schema.Run, name: str, workdir: str
) -> tuple[dict[str, Any] | None, str | None]:
  """Returns the `host` of a trained stage, and its step if that must be read.

  The next stage would begin with that step. None: the stage is not finished.
  """
  folder = _folder(workdir, name)
  host = store.newest_host(folder)
  later = _later_host(cfg, name, workdir)
  trained = host['step'] if host is not None else 0
  ended = host is not None and bool(host.get('finished'))
  if later is not None and not ended:
    trained = later['config'][name]['steps']
    if host is None or host['step'] != trained:
      host = later
      selects = later['config'][name].get('eval', {}).get('best') is not None
      last = 'its last step' if selects else f'step {trained}'
      warnings.warn(
        f'{folder} should hold {last}, which cannot be read; stage '
        f'{name!r} stays finished, because stage {later["stage"]!r} was built '
        'on it',
        stacklevel=2,
      )
  if host is None:
    return None, None
  steps = cfg.stages[name].steps
  if trained > steps:
    raise ValueError(
      f'config.{name}.steps must be at least the {trained} steps that '
      f'are trained already: got {steps}; use another --workdir'
    )
  if trained < steps and not ended:
    return None, None
  is_next = later is None and name != list(cfg.stages)[-1]
  return host, os.path.join(folder, str(_best(host))) if is_next else None


def _best(host: dict[str, Any]) -> int:
  """Returns the step whose weights a stage hands on, by its last `host`."""
  best = host.get('best')
  return host['step'] if best is None else best['step']


def check_order(cfg: schema.Run, name: str, workdir: str) -> None:
  """Refuses to train a stage that a later one was built upon.

  Raises:
    ValueError: with the folder to move away.
  """
  folders = [_folder(workdir, later) for later in _later(cfg, name)]
  begun = processes.on(0, lambda: [bool(store.steps(x)) for x in folders])
  for later, folder, has_steps in zip(
    _later(cfg, name), folders, begun, strict=True
  ):
    if has_steps:
      raise ValueError(
        f'stage {name!r} must end before stage {later!r} begins: it has '
        f'steps left to train, but {folder} holds steps; move that folder '
        'away to train both again'
      )


def check_end(cfg: schema.Run, name: str, workdir: str) -> None:
  """Refuses a stage whose last step is missing, where its end is meant.

  Args:
    cfg: the run's options.
    name: the stage.
    workdir: the run's folder.

  Raises:
    ValueError: with the step that is missing.
  """
  steps, folder = cfg.stages[name].steps, _folder(workdir, name)
  host = store.newest_host(folder) or {}
  if host.get('step') != steps and not host.get('finished'):
    raise ValueError(
      f"'stage:{name}' must be the end of the stage, step {steps}: got step "
      f'{host.get("step")} in {folder}; put that step back, or move the '
      'folders of the later stages away to train them again'
    )


def _later(cfg: schema.Run, name: str) -> list[str]:
  names = list(cfg.stages)
  return names[names.index(name) + 1 :]


def _later_host(
  cfg: schema.Run, name: str, workdir: str
) -> dict[str, Any] | None:
  """Returns the `host` of a later stage that began when this one had ended."""

  def hosts() -> Iterator[dict[str, Any]]:
    for later in _later(cfg, name):
      host = store.newest_host(_folder(workdir, later))
      if host is not None and name in host.get('config', ()):
        yield host

  return next(hosts(), None)


def _folder(workdir: str, name: str) -> str:
  return os.path.join(workdir, 'checkpoints', name)
