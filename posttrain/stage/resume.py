"""How far the stages of a workdir have come, and which weights they hand on.

1. `end_of`: whether a stage has ended. It reads the checkpoints, each of which
   holds the options it was trained with, in the first process of a run, for all
   of them.
2. `check_end`: the same, of a stage whose weights another one begins with.
3. `Selection`: the step that a stage hands on. Without `eval.best` it is the
   last one. With it, every evaluation measures the metric on tasks of its own,
   `select/...`; a step with a new best is saved, and stays until there is a
   better one (step 0, the start, counts as well); after `patience` evaluations
   without a new best, or one that reaches `stop_at`, the stage ends. Every
   checkpoint names the best step so far: `checkpoints.store.find` follows it,
   for commands and later stages.
"""

import dataclasses
import math
import os
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from posttrain import processes, schema
from posttrain.checkpoints import store
from posttrain.pipeline import batches


def end_of(cfg: schema.Run, name: str, workdir: str) -> int | None:
  """Returns the end of a finished stage in metrics.jsonl, in bytes.

  None if the stage is unfinished, or if its last step is damaged and no later
  stage was built on it: then it is trained again from an older step. A stage
  that a later one was built on is finished, even if its own steps are damaged.

  Raises:
    ValueError: it was trained for more steps than the config has, or it has
      steps left to train, but a later stage has begun.
    TooManyErrors: no rollout of the finished stage had a reward, because reward
      functions or episodes failed.
  """
  host, unread, later = processes.on(0, lambda: _trained(cfg, name, workdir))
  if host and unread is not None and not store.is_sound(unread):
    if os.path.basename(unread) != str(host['step']):
      raise ValueError(
        f'{unread} must hold the best step of stage {name!r}: it is missing or '
        "damaged; put it back, or move the stage's folder away"
      )
    warnings.warn(f'{unread} is damaged; an older step is used', stacklevel=2)
    host = None
  if host is None:
    if later:
      raise ValueError(
        f'stage {name!r} must end before a later one begins: it has steps left '
        f'to train, but {later} holds steps; move that folder away'
      )
    return None
  tally = (host.get('pipeline') or {}).get('tally')
  if tally and host.get('stage') == name:
    counts = batches.Tally(tally['envs'])
    counts.set_state(tally)
    counts.check(name)
  steps = cfg.stages[name].steps
  before = host.get('config', {}).get(name, {}).get('steps', steps)
  if host.get('finished') and before < steps and processes.is_first():
    print(
      f'stage {name} stays finished: its evaluations ended it at step '
      f'{host["step"]}, so config.{name}.steps={steps} changes nothing',
      file=sys.stderr,
    )
  return host['metrics_position']


def _trained(
  cfg: schema.Run, name: str, workdir: str
) -> tuple[dict[str, Any] | None, str | None, str | None]:
  """Reads how far a stage has come, on one process.

  Returns:
    (the `host` of a finished stage, else None; the step that the next stage
    would begin with, if it must be read; the folder of a later stage that has
    begun)
  """
  names, folder = list(cfg.stages), _folder(workdir, name)
  later = [_folder(workdir, x) for x in names[names.index(name) + 1 :]]
  begun = next((x for x in later if store.steps(x)), None)
  # A later stage that began when this one had ended.
  hosts = (store.newest_host(x) for x in later)
  built = next((x for x in hosts if x and name in x.get('config', ())), None)
  host = store.newest_host(folder)
  trained = host['step'] if host is not None else 0
  ended = host is not None and bool(host.get('finished'))
  if built is not None and not ended:
    trained = built['config'][name]['steps']
    if host is None or host['step'] != trained:
      host = built
      warnings.warn(
        f'{folder} should hold step {trained}, or an earlier last one, which '
        f'cannot be read; stage {name!r} stays finished, because stage '
        f'{built["stage"]!r} was built on it',
        stacklevel=2,
      )
  steps = cfg.stages[name].steps
  if trained > steps:
    raise ValueError(
      f'config.{name}.steps must be at least the {trained} steps that '
      f'are trained already: got {steps}; use another --workdir'
    )
  if host is None or (trained < steps and not ended):
    return None, None, begun
  if built is not None or name == names[-1]:
    return host, None, begun
  best = host.get('best') or host
  return host, os.path.join(folder, str(best['step'])), begun


def check_end(cfg: schema.Run, name: str, workdir: str) -> None:
  """Refuses a stage whose last step is missing, where its end is meant.

  Raises:
    ValueError: with the step that is missing.
  """
  steps, folder = cfg.stages[name].steps, _folder(workdir, name)
  host = store.newest_host(folder) or {}
  if host.get('step') != steps and not host.get('finished'):
    raise ValueError(
      f"'stage:{name}' must be the end of the stage, step {steps}: got step "
      f'{host.get("step")} in {folder}; put that step back'
    )


def _folder(workdir: str, name: str) -> str:
  return os.path.join(workdir, 'checkpoints', name)


@dataclasses.dataclass
class Selection:
  """The best evaluation of a stage so far.

  Attributes:
    stage: the stage's name.
    cfg: the options of evaluation.
    step: step of the best evaluation; None = none yet.
    value: its value.
    waited: number of evaluations since.
  """

  stage: str
  cfg: schema.Eval
  step: int | None = None
  value: float | None = None
  waited: int = 0

  def add(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
    """Takes an evaluation into account; returns metrics to log.

    Where several are equally good, the first is the best. One that could not
    measure the metric is no new best.

    Args:
      step: its step.
      metrics: its metrics.

    Raises:
      ValueError: the stage's first evaluation does not measure the metric, or
        its value is not finite.
    """
    best = str(self.cfg.best)
    key = best.replace('eval/', 'select/', 1)
    value = metrics.get(key)
    if value is None or not math.isfinite(value):
      if self.step is None:
        known = sorted(x for x in metrics if x.startswith('eval/'))
        raise ValueError(
          f'config.{self.stage}.eval.best must be measured, and finite, at '
          f'step {step}: got {self.cfg.best!r}={value}; measured are {known}'
        )
      self.waited += 1
      return {'select/best_step': self.step}
    if self.value is None or self._sign * (value - self.value) > 0:
      self.step, self.value, self.waited = step, value, 0
    else:
      self.waited += 1
    assert self.step is not None
    return {key: value, 'select/best_step': self.step}

  @property
  def is_over(self) -> bool:
    """Whether `stop_at` is reached, or `patience` is over."""
    if self.value is not None and self.cfg.stop_at is not None:
      if self._sign * (self.value - self.cfg.stop_at) >= 0:
        return True
    return self.cfg.patience is not None and self.waited >= self.cfg.patience

  @property
  def _sign(self) -> float:
    """-1 where a small value is a good one."""
    return -1.0 if str(self.cfg.best).startswith('eval/nll/') else 1.0

  def state(self) -> dict[str, Any]:
    """Returns the part of a checkpoint that restores it, JSON-able."""
    return {'step': self.step, 'value': self.value, 'waited': self.waited}
