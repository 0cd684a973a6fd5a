"""Options of rewards: the summands of a rollout's reward."""

import dataclasses
import math
from typing import Any

from posttrain.schema import base, references


@dataclasses.dataclass(frozen=True)
class RewardFn:
  """One summand: a function, or a reward model.

  The summand named `env` is the environment's grade, and has neither.
  """

  # 'package.module:function', with TRL's signature, see
  # `rollout.grading`.
  fn: base.FunctionOrNone = None
  # A reward model: 'stage:NAME', or the path of a stage of kind 'ranking'.
  model: base.FolderOrNone = None
  # Factor in the sum.
  weight: float = 1.0
  # Keyword arguments of the function.
  kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
  # Model that the function gets as `judge`; None = none.
  judge: references.ReferenceOrNone = None
  # Time limit of a call of the function, in seconds, without its judge's time.
  timeout: float = 60.0
  # Whether the function runs in a process of its own, which is killed after
  # the timeout; False = a thread. One of posttrain, a Python callable and one
  # with a judge run in a thread anyway; with rollout.workers='ray' Ray has the
  # process.
  isolate: bool = True
  # Memory that an isolated function may allocate after its import, in MiB of
  # address space, which libraries of GPUs reserve as well; None = no limit.
  memory: int | None = None
  # Largest number of consecutive calls, of a function or a model, in which
  # faults leave more than half of the rollouts without a reward (which is not a
  # reward of 0); one more stops the run.
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
      base.require(self.fn is None, 'fn', 'be None if model is set', self.fn)
      references.require_frozen(self, 'model')
      base.require(
        self.model != 'init', 'model', "be 'stage:NAME' or a path", self.model
      )
    base.require_seconds(self, 'timeout')
    base.require_within(self, 1, 2**24, 'memory')
    base.require_non_negative(self, 'max_faults')
    if self.judge is not None:
      references.require_frozen(self, 'judge')
