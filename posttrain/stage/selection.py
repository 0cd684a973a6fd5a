"""Selection of the weights that a stage hands on.

Without `eval.best` they are the last ones. With it:

1. every evaluation measures the metric on tasks of its own, `select/...`;
2. a step with a new best is saved, and stays until there is a better one. The
   start of the stage, step 0, counts as well;
3. after `patience` evaluations without a new best the stage ends;
4. every checkpoint names the best step so far. `checkpoints.store.find`
   follows it, for commands and for later stages alike.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from posttrain import schema


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
    key = str(self.cfg.best).replace('eval/', 'select/', 1)
    value, what = metrics.get(key), 'is not measured'
    if value is not None and not math.isfinite(value):
      value, what = None, f'is {value}'
    if value is None and self.step is None:
      known = sorted(x for x in metrics if x.startswith('eval/'))
      raise ValueError(
        f'config.{self.stage}.eval.best must be finite at step {step}: got '
        f'{self.cfg.best!r}, which {what} on the tasks that select; measured '
        f'are {known}'
      )
    sign = -1.0 if self.cfg.lowest_is_best else 1.0
    if value is not None and (
      self.value is None or sign * value > sign * self.value
    ):
      self.step, self.value, self.waited = step, value, 0
    else:
      self.waited += 1
    assert self.step is not None
    measured = {} if value is None else {key: value}
    return {**measured, 'select/best_step': self.step}

  @property
  def is_over(self) -> bool:
    """Whether `patience` evaluations in a row had no new best."""
    return self.cfg.patience is not None and self.waited >= self.cfg.patience

  def state(self) -> dict[str, Any]:
    """Returns the part of a checkpoint that restores it, JSON-able."""
    return {'step': self.step, 'value': self.value, 'waited': self.waited}


def make(
  stage: str, cfg: schema.Eval, host: Mapping[str, Any]
) -> Selection | None:
  """Returns the selection of a stage; None without `eval.best`.

  Args:
    stage: the stage's name.
    cfg: the options of evaluation.
    host: the restored checkpoint's, or {}.
  """
  best = host.get('best', {})
  return Selection(stage, cfg, **best) if cfg.best else None
