"""Trained reward models as a source of rewards.

The reward of a rollout is the value of its last sample at the last sampled
token, as in training (`pair_objectives.Ranking`). Answers cut by a token budget
are scored as well, though pairs built from a policy's rollouts contain none.
All rollouts of a step are scored in packed rows of one shape, by one compiled
program.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import scoring, types
from posttrain.rollout import grading

Params = Any


class RewardModel:
  """The rewards of rollouts under a reward model."""

  def __init__(self, name: str, params: Params, scorer: scoring.Scorer):
    """Stores the model.

    Args:
      name: the model's name in errors.
      params: the parameters, with those of the reward head.
      scorer: a scorer that reads 'rewards'.
    """
    self._name, self._params, self._scorer = name, params, scorer

  def __call__(self, rollouts: Sequence[types.Rollout]) -> grading.Result:
    """Scores rollouts, each with samples; a non-finite value is a fault."""
    values = self.rewards([rollout.samples[-1] for rollout in rollouts])
    failed = {i for i, x in enumerate(values) if not np.isfinite(x)}
    error = None
    if failed:
      error = (
        f'reward model {self._name} must return finite rewards: got '
        f'{values[min(failed)]}; rollouts left out: {len(failed)} of '
        f'{len(values)}'
      )
    return grading.Result(
      [None if i in failed else x for i, x in enumerate(values)],
      frozenset(failed),
      {'faults': float(bool(failed))},
      error,
    )

  def rewards(self, samples: Sequence[types.Sample]) -> list[float]:
    """Returns the value of each sample at its last sampled token."""
    scores = self._scorer(
      self._params,
      [sample.ids for sample in samples],
      [np.ones(len(sample), np.float32) for sample in samples],
    )
    return [
      float(x[sample.mask][-1])
      for x, sample in zip(scores, samples, strict=True)
    ]
