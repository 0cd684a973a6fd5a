"""Trained reward models as a source of rewards.

A rollout is worth what its last sample is worth at the last token that was
sampled, as in training (`choice_objectives.Ranking`). So are answers that a
budget cut, though pairs that a policy made have no such answer. All rollouts of
a step are scored in packed rows of one shape, by one compiled program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain import schema, scoring, sharding, types
from posttrain.checkpoints import store, weights
from posttrain.models import reward_head, transformer
from posttrain.rollout.grading import functions

Params = Any


class RewardModel:
  """What rollouts are worth to a reward model."""

  def __init__(self, name: str, params: Params, scorer: scoring.Scorer):
    """Args: name: for errors; scorer: of a reward model."""
    self._name, self._params, self._scorer = name, params, scorer

  def __call__(self, rollouts: Sequence[types.Rollout]) -> functions.Found:
    """Scores rollouts that have samples; what is not finite is a fault."""
    samples = [rollout.samples[-1] for rollout in rollouts]
    told = self._scorer(
      self._params,
      [sample.ids for sample in samples],
      [np.ones(len(sample), np.float32) for sample in samples],
    )
    values = [
      float(x[sample.mask][-1]) for x, sample in zip(told, samples, strict=True)
    ]
    failed = {i for i, x in enumerate(values) if not np.isfinite(x)}
    error = None
    if failed:
      error = (
        f'reward model {self._name} must return finite rewards: got '
        f'{values[min(failed)]}; rollouts left out: {len(failed)} of '
        f'{len(values)}'
      )
    return functions.Found(
      [None if i in failed else x for i, x in enumerate(values)],
      frozenset(failed),
      {'faults': float(bool(failed))},
      error,
    )


def load(
  name: str,
  folder: str,
  policy: schema.Model,
  scorer: Callable[[schema.Model], scoring.Scorer],
  mesh: Any,
) -> RewardModel:
  """Restores a reward model onto the devices.

  Args:
    name: that the config has for it.
    folder: a step's, of a stage of kind 'ranking'.
    policy: whose samples it scores; it computes in the same dtype.
    scorer: makes one of a reward model.
    mesh: where it shall lie.

  Raises:
    ValueError: it is no reward model, or is gone.
  """
  cfg = dataclasses.replace(
    weights.model(folder), dtype=policy.dtype, remat='none'
  )
  speaks = any(
    path.startswith('params/head/') for path in store.read_sums(folder)
  )
  like = sharding.placed(
    reward_head.shapes(cfg, speaks), transformer.SHARDING_RULES, mesh
  )
  # Averages where it has such: those were measured.
  params = weights.load(folder, like, average=True)
  return RewardModel(name, params, scorer(cfg))


def check(folder: str, policy: schema.Model, renderer) -> None:
  """Refuses what cannot score a policy's samples; reads no weight.

  Raises:
    ValueError: it is no reward model, or of other tokens.
  """
  weights.check(folder, weights.model(folder), renderer, reward=True)
  if weights.model(folder).vocab_size < policy.vocab_size:
    raise ValueError(
      f'{folder} must know the {policy.vocab_size} tokens of the policy: got '
      f'{weights.model(folder).vocab_size}; train it on the same model'
    )
