"""Options of a reward: what is added up to the scalar of a rollout."""

import dataclasses
import math
from typing import Any

from posttrain.schema import base, references


@dataclasses.dataclass(frozen=True)
class RewardFn:
  """One summand; the one by the name of `env` is the environment's grade."""

  # 'package.module:function', with TRL's signature, see `rollout.rewarding`;
  # None for `env` alone.
  fn: str | None = None
  # Factor of it in the sum.
  weight: float = 1.0
  # What else the function is given.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  # A model that it is given as `judge`; None = none.
  judge: references.Reference | None = None

  def __post_init__(self):
    base.require(
        math.isfinite(self.weight) and self.weight != 0, 'weight',
        'be finite and not 0', self.weight,
    )
    if self.fn is not None:
      base.require_import_path(self, 'fn')
    for field in ('kwargs', 'judge') if self.fn is None else ():
      value = getattr(self, field)
      base.require(
          not value, field, 'be left out', value,
          'nothing reads it without fn',
      )
    if self.judge is not None:
      references.require_frozen(self, 'judge')
