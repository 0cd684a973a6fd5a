"""Options of a reward: what is added up to the scalar of a rollout."""

import dataclasses
import math
from typing import Any

from posttrain.schema import base, references

# How a function is called: nothing for the others.
CALL = ('kwargs', 'judge', 'timeout')


@dataclasses.dataclass(frozen=True)
class RewardFn:
  """One summand: of a function, or of a reward model.

  The one by the name of `env` is neither: it is the environment's grade.
  """

  # 'package.module:function', with TRL's signature, see `rollout.rewarding`.
  fn: str | None = None
  # A reward model: 'stage:NAME', or a path, of a stage of kind 'ranking'.
  model: str | None = None
  # Factor of it in the sum.
  weight: float = 1.0
  # What else the function is given.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  # A model that it is given as `judge`; None = none.
  judge: references.Reference | None = None
  # Seconds that a call of it may take, without those of its judge.
  timeout: float = 60.0
  # Calls in a row that may fail, of a function, or of a model, whose rewards
  # must be finite; one more stops the run. What a failed call should have
  # scored is left out, which is never a reward of 0.
  max_faults: int = 3

  def __post_init__(self):
    base.require(
      math.isfinite(self.weight) and self.weight != 0,
      'weight',
      'be finite and not 0',
      self.weight,
    )
    if self.fn is not None:
      base.require_import_path(self, 'fn')
    if self.model is not None:
      base.require(self.fn is None, 'fn', 'be left out beside model', self.fn)
      references.require_frozen(self, 'model')
      base.require(
        self.model != 'init', 'model', "be 'stage:NAME' or a path", self.model
      )
    base.require_positive(self, 'timeout')
    base.require_non_negative(self, 'max_faults')
    unread = CALL if self.fn is None else ()
    if self.fn is None and self.model is None:
      unread += ('max_faults',)
    for field in unread:
      value = getattr(self, field)
      base.require(
        value == getattr(RewardFn, field, {}),
        field,
        'be left out',
        value,
        'nothing reads it without fn',
      )
    if self.judge is not None:
      references.require_frozen(self, 'judge')
