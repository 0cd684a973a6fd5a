"""Trained reward models as a source of rewards.

The reward of a rollout is the value of its last sample at the last sampled
token, as in training (`pair_objectives.Ranking`). Answers cut by a token budget
are scored as well, though pairs built from a policy's rollouts contain none.
All rollouts of a step are scored in packed rows of one shape, by one compiled
program.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain import schema, scoring, sharding, types
from posttrain.chat import rendering
from posttrain.checkpoints import reading, weight_folders, weights
from posttrain.models import reward_head, transformer
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


def load(
  name: str,
  folder: str,
  policy: schema.Model,
  scorer: Callable[[schema.Model], scoring.Scorer],
  mesh: Any,
) -> RewardModel:
  """Restores a reward model onto the devices.

  Args:
    name: the reward model's name in the config.
    folder: a checkpoint's folder, of a stage of kind 'ranking'.
    policy: options of the policy; the reward model computes in its dtype.
    scorer: builds the scorer of a reward model.
    mesh: the device mesh that holds the parameters.

  Raises:
    ValueError: the folder has no reward model, or is missing.
  """
  cfg = dataclasses.replace(
    weight_folders.model(folder),
    dtype=policy.dtype,
    remat='none',
    attention=policy.attention,
  )
  has_lm_head = any(
    path.startswith('params/head/') for path in reading.read_sums(folder)
  )
  like = sharding.placed(
    reward_head.shapes(cfg, has_lm_head), transformer.SHARDING_RULES, mesh
  )
  # Averaged weights where the run keeps them: evaluation used those.
  params = weights.load(folder, like, average=True)
  return RewardModel(name, params, scorer(cfg))


def check(
  folder: str, policy: schema.Model, renderer: rendering.Renderer
) -> None:
  """Checks that a reward model can score a policy's samples; reads no weights.

  Raises:
    ValueError: the folder has no reward model, or its tokens are others.
  """
  if not weight_folders.is_run(folder):
    raise ValueError(
      f'{folder} must hold a reward model, a run of kind ranking: got a '
      'HuggingFace or PEFT directory'
    )
  weights.check(folder, weight_folders.model(folder), renderer, reward=True)
  if weight_folders.model(folder).vocab_size < policy.vocab_size:
    raise ValueError(
      f'{folder} must have the {policy.vocab_size} tokens of the policy: got '
      f'{weight_folders.model(folder).vocab_size}; train it from the same model'
    )
