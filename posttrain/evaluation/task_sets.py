"""The tasks of an environment that an evaluation plays, and their results."""

import dataclasses
from collections.abc import Mapping, Sequence

from posttrain import types
from posttrain.envs import base
from posttrain.evaluation import answers as answers_lib
from posttrain.evaluation import measures as measures_lib


@dataclasses.dataclass
class TaskSet:
  """Tasks of one environment, with their rollouts and measures."""

  name: str  # the environment's
  env: base.Env
  tasks: Sequence[types.Task]
  uid: int  # of the first task's greedy rollout
  selects_by: str | None = None  # the metric of `eval.best`; None = all
  greedy: list[types.Rollout] = dataclasses.field(default_factory=list)
  # At temperature 1, a group per task; [] = not played.
  groups: list[list[types.Rollout]] = dataclasses.field(default_factory=list)
  measures: dict[str, measures_lib.Values] = dataclasses.field(
    default_factory=dict
  )

  @property
  def sampled(self) -> list[types.Rollout]:
    """The rollouts at temperature 1."""
    return [rollout for group in self.groups for rollout in group]

  @property
  def rollouts(self) -> list[types.Rollout]:
    """All rollouts."""
    return [*self.greedy, *self.sampled]

  @property
  def answers(self) -> list[answers_lib.Answer]:
    """The answer to each task, with its grades and measures."""
    return [
      answers_lib.of(
        rollout,
        self.groups[i] if self.groups else (),
        {k: x[i] for k, (x, _) in self.measures.items() if x[i] is not None},
      )
      for i, rollout in enumerate(self.greedy)
    ]

  def named(self, values: Mapping[str, float]) -> dict[str, float]:
    """Returns the values to report, or the one that selects, by full name."""
    if self.selects_by is None:
      return {f'eval/{key}/{self.name}': v for key, v in values.items()}
    if self.selects_by not in values:
      return {}
    name = f'select/{self.selects_by}/{self.name}'
    return {name: values[self.selects_by]}
