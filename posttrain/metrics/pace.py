"""Estimate of the time left of a stage, from its steps so far."""

import collections
import dataclasses
from collections.abc import Mapping

_STEPS = 50  # the latest ones, whose mean counts


@dataclasses.dataclass
class Pace:
  """The seconds of a stage's steps, and of its evaluations.

      left(step) = mean seconds of a step * steps left
                   + seconds of the last evaluation * evaluations left

  The first step of a start compiles: it is not measured, and neither are the
  seconds of later compilations.

  Attributes:
    steps: number of the stage's steps.
    every: steps between evaluations; None or 0 = at the end alone.
    evaluation: seconds of an evaluation; 0 = unknown, and not counted.
    may_end: whether the stage may end before its last step, by its patience.
  """

  steps: int
  every: int | None = None
  evaluation: float = 0.0
  may_end: bool = False

  def __post_init__(self):
    self._seconds = collections.deque(maxlen=_STEPS)
    self._before: tuple[int, float] | None = None  # the last row
    self.measured = 0  # steps

  def add(self, step: int, now: float, times: Mapping[str, float]) -> None:
    """Takes the row of a step into account.

    Args:
      step: its number.
      now: the time after it, in seconds.
      times: the seconds of its parts, `time/eval` and `time/compile` among
        them.
    """
    evaluation, compiling = (
      times.get(f'time/{x}', 0.0) for x in ('eval', 'compile')
    )
    if evaluation:
      self.evaluation = max(evaluation - compiling, 0.0)
    # Step 0 is an evaluation alone, and the first step after it compiles.
    if self._before is not None and self._before[0] > 0:
      own = now - self._before[1] - evaluation - compiling
      self._seconds.append(max(own, 0.0))
      self.measured += 1
    self._before = step, now

  @property
  def step_seconds(self) -> float | None:
    """Returns the mean seconds of the latest steps; None before the first."""
    if not self._seconds:
      return None
    return sum(self._seconds) / len(self._seconds)

  def left(self, step: int) -> float | None:
    """Returns the seconds that the steps after one take; None = unknown."""
    if (seconds := self.step_seconds) is None:
      return None
    evaluations = int(step < self.steps)  # the last one
    if self.every:
      evaluations += (self.steps - 1) // self.every - step // self.every
      evaluations = max(evaluations, 0)
    return seconds * (self.steps - step) + self.evaluation * evaluations
