"""Groups: the rollouts of drawn tasks, and when they are played.

1. `sample` plays all rollouts of some groups to their ends.
2. `GroupsInFlight` plays until a batch of groups is whole; the other episodes
   go on in a later round.
"""

import collections
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from posttrain import schema, types
from posttrain.rollout import episodes, samplers, side_by_side


@dataclasses.dataclass(eq=False)
class Group:
  """A drawn task, with its rollouts that have ended."""

  task: types.Task
  sampler: samplers.DatasetSampler | samplers.ModelSampler
  uids: Sequence[int]  # of its rollouts, unique over the whole run
  # Called with the rollouts, in order, as soon as the last one has ended, while
  # other groups still play.
  grade: Callable[[types.Task, list[types.Rollout]], Any]
  grades: Any = None  # what `grade` has returned
  since: int = 0  # the round that it began in
  sources: Any = None  # the state of each source before it was drawn
  by_uid: dict[int, types.Rollout] = dataclasses.field(default_factory=dict)

  @property
  def is_whole(self) -> bool:
    """Whether all rollouts have ended."""
    return len(self.by_uid) == len(self.uids)

  @property
  def rollouts(self) -> list[types.Rollout]:
    """All rollouts, in order; a driver may return them in any order."""
    return [self.by_uid[uid] for uid in self.uids]

  def begin(self) -> list[episodes.EpisodeSpec]:
    """Returns the episodes to play; rollouts of a data set are added."""
    if isinstance(self.sampler, samplers.ModelSampler):
      return [self.sampler.spec(self.task, uid) for uid in self.uids]
    for uid in self.uids:
      self.add(self.sampler.rollout(self.task, uid))
    return []

  def add(self, rollout: types.Rollout) -> None:
    """Adds a rollout that has ended; does nothing if the group is whole."""
    if not self.is_whole:
      self.by_uid[rollout.uid] = self.sampler.finish(rollout)
      if self.is_whole:
        self.grades = self.grade(self.task, self.rollouts)


def sample(
  groups: Sequence[Group], players: Mapping[schema.Reference, episodes.Driver]
) -> None:
  """Plays all rollouts of groups; the models play concurrently.

  Args:
    groups: groups without rollouts, in any order.
    players: the driver of each model that a sampler uses.
  """
  by_uid = _by_uid(groups)
  by_model = collections.defaultdict(list)
  for group in groups:
    if specs := group.begin():
      by_model[group.sampler.model] += specs

  def add(rollout: types.Rollout) -> None:
    by_uid[rollout.uid].add(rollout)

  played = episodes.run_all(
    [(players[model], specs) for model, specs in by_model.items()], add
  )
  for rollout in itertools.chain.from_iterable(played):
    add(rollout)  # of another process


class GroupsInFlight:
  """Groups whose episodes may take several rounds, one per batch.

  1. A round begins with the groups of earlier ones, and draws further ones
     while slots are free, up to twice as many groups as a batch has.
  2. It is over as soon as a batch of groups is whole, and all groups that began
     `max_hold` rounds before. The other episodes are held at their next
     boundaries, see `episodes.Round`.
  3. The batch is the first whole groups, in the order of their draws. Whole
     ones beyond it are in the next batch.

  So a group is in a batch at most `max_hold` rounds after it began. All this
  depends on the order and number of tokens, never on time.
  """

  def __init__(self, driver: episodes.Driver, stage: schema.Stage):
    """Starts without groups.

    Args:
      driver: plays the episodes of the policy.
      stage: has the sizes, and the options of `in_flight`.
    """
    self._driver, self._cfg, self.round = driver, stage.rollout, 0
    self._count = stage.batch.prompts_per_step  # groups in a batch
    self._group_size = max(x.group_size for x in stage.envs.values())
    self.groups: list[Group] = []  # as drawn

  def next(self, draw: Callable[[], Group]) -> list[Group]:
    """Plays a round; returns the groups of a batch.

    Args:
      draw: draws the next group.
    """
    self.round += 1
    by_uid = _by_uid(self.groups)

    def add(rollout: types.Rollout) -> None:
      by_uid[rollout.uid].add(rollout)

    def more(running: int) -> list[episodes.EpisodeSpec]:
      specs: list[episodes.EpisodeSpec] = []
      while (
        not specs
        and not self._is_over()
        and len(self.groups) < 2 * self._count
        and (not running or running + self._group_size <= self._cfg.slot_count)
      ):
        group = draw()
        group.since = self.round
        self.groups.append(group)
        by_uid.update(_by_uid([group]))
        specs = group.begin()
      return specs

    # Those of a resumed run begin anew.
    specs = [
      spec
      for group in self.groups
      if not (group.by_uid or self._driver.held.keys() & group.uids)
      for spec in group.begin()
    ]
    round = episodes.Round(
      self._is_over, more, self._cfg.hold_tokens, self._cfg.keep_cache
    )
    (played,) = side_by_side.run([self._driver.play(specs, add, round)])
    played.result()
    batch = [x for x in self.groups if x.is_whole][: self._count]
    self.groups = [x for x in self.groups if x not in batch]
    return batch

  def _is_over(self) -> bool:
    last = self.round - self._cfg.max_hold
    return sum(x.is_whole for x in self.groups) >= self._count and all(
      group.is_whole for group in self.groups if group.since <= last
    )


def _by_uid(groups: Iterable[Group]) -> dict[int, Group]:
  """Returns the group of each rollout's uid."""
  return {uid: group for group in groups for uid in group.uids}
