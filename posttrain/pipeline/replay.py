"""Replay: recent groups of an environment, which train once more.

    step m: a group is sampled and trained, and its samples are stored
    step n: the samples train again,  m < n <= m + max_age

1. `pick` decides for each group of a step whether a stored one takes its place;
   then no task is drawn for it.
2. `finish` returns the samples of the picked groups, and stores those of the
   step's own groups, at most as many as a step takes by its share: so there are
   at most max_age times as many. Groups without an rl member that has an
   advantage are not stored; with a critic all are, as it gives the advantages.

The samples keep their streams, versions and logprobs, of the policy that
sampled them and of the reference that scored them then. So every type of
`loss.rl` corrects them, which has the ratio to the sampler, and `staleness/*`
and `mismatch/*` meter them. They are part of the pipeline's state.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain import schema, types
from posttrain.data import sources
from posttrain.pipeline import batches

_Stored = dict[str, Any]  # a sample, see `batches.stored_arrays`


class Replay:
  """The stored groups of an environment."""

  def __init__(self, cfg: schema.Replay, seed: int, groups_per_step: int):
    """Starts without groups.

    Args:
      cfg: the options.
      seed: the seed of the choices.
      groups_per_step: groups of the environment in a step, at most.
    """
    self._cfg, self._seed, self._step = cfg, seed, 1
    self._most = math.ceil(cfg.share * groups_per_step)  # stored of a step
    self._groups: list[tuple[int, list[_Stored]]] = []  # with their steps
    self._picked: list[list[_Stored]] = []

  def pick(self, uid: int) -> bool:
    """Returns whether a stored group trains in the place of a new one.

    Args:
      uid: the first one that the new group would have.
    """
    # (seed, uid) alone has drawn the environment.
    share, place = sources.uniform(2, self._seed, uid, 1)
    if share >= self._cfg.share or not self._groups:
      return False
    _, samples = self._groups.pop(int(place * len(self._groups)))
    self._picked.append(samples)
    return True

  def finish(
    self, groups: Sequence[Sequence[types.Sample]]
  ) -> tuple[list[types.Sample], dict[str, float]]:
    """Ends a step: returns the samples of its picked groups, and metrics.

    Args:
      groups: the scored samples of the step's own groups, in their order.
    """
    samples = [
      types.Sample(**batches.load_arrays(x))
      for group in self._picked
      for x in group
    ]
    metrics = {'groups': len(self._picked), 'stored': len(self._groups)}
    oldest = self._step + 1 - self._cfg.max_age  # of those for the next step
    self._groups = [x for x in self._groups if x[0] >= oldest]
    fit = [group for group in groups if any(map(_has_credit, group))]
    for group in fit[: self._most]:
      bare = (
        dataclasses.replace(x, task=None, message_ids=None) for x in group
      )
      self._groups.append((self._step, list(map(batches.stored_arrays, bare))))
    self._picked, self._step = [], self._step + 1
    return samples, metrics

  def get_state(self) -> dict[str, Any]:
    """Returns the groups, JSON-able."""
    return {'step': self._step, 'groups': list(self._groups)}

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues from a state of `get_state`."""
    self._step, self._picked = state['step'], []
    self._groups = [(step, samples) for step, samples in state['groups']]


def _has_credit(sample: types.Sample) -> bool:
  credit = sample.advantages
  if credit is not None:
    credit = credit * sample.rl_weights
  return any(x is not None and x.any() for x in (credit, sample.value_weights))
