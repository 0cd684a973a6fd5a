"""Stamps an algorithm's word on the samples of a finished group.

Axes: T tokens of one sample.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from posttrain import types
from posttrain.algorithms import base


def finalize(
    algorithm: base.Algorithm, group: Sequence[types.Rollout]
) -> list[types.Sample]:
  """Returns the group's samples with every stream materialized.

  The algorithm's component weighs the completion mask with 1; CE weights of
  observations are merged in. Token 0 of a sample has no prediction, so it is
  a member of nothing.

  Raises:
    ValueError: credit or weights are not aligned with the tokens.
  """
  credits = algorithm.assign(group)
  if len(credits) != len(group):
    raise ValueError(
        f'assign must return one credit per rollout: got {len(credits)}, '
        f'expected {len(group)}'
    )
  return [
      _stamp(sample, algorithm.component, advantages, observed)
      for rollout, credit in zip(group, credits, strict=True)
      for sample, advantages, observed in zip(
          rollout.samples,
          _spread(rollout, credit),
          _observed(rollout, algorithm.observation_weights(rollout)),
          strict=True,
      )
  ]


def _spread(
    rollout: types.Rollout, credit: base.Credit
) -> Iterator[np.ndarray | None]:
  """One rollout's credit as an array per sample."""
  total = sum(len(sample) for sample in rollout.samples)
  if credit is not None and np.ndim(credit) and len(credit) != total:
    raise ValueError(
        f'credit must align with the tokens of task {rollout.task.id}: got '
        f'{len(credit)} values, expected {total}'
    )
  start = 0
  for sample in rollout.samples:
    end = start + len(sample)
    if credit is None:
      yield None
    elif np.ndim(credit):
      yield np.asarray(credit[start:end], np.float32)
    else:
      yield np.where(sample.mask, np.float32(credit), np.float32(0))
    start = end


def _observed(
    rollout: types.Rollout, weights: Sequence[np.ndarray] | None
) -> Sequence[np.ndarray]:
  """CE weights of observations per sample, zeros where there are none."""
  lengths = [len(sample) for sample in rollout.samples]
  if weights is None:
    return [np.zeros(length, np.float32) for length in lengths]
  if [len(w) for w in weights] != lengths:
    raise ValueError(
        'observation_weights must span the tokens of each sample of task '
        f'{rollout.task.id}: got {[len(w) for w in weights]}, expected '
        f'{lengths}'
    )
  return [np.array(w, np.float32) for w in weights]


def _stamp(
    sample: types.Sample,
    component: str,
    advantages: np.ndarray | None,
    observed: np.ndarray,
) -> types.Sample:
  zeros = np.zeros(len(sample), np.float32)
  member = sample.mask.copy()
  member[:1] = False
  action = member.astype(np.float32)
  observed[:1] = 0
  return dataclasses.replace(
      sample,
      advantages=advantages,
      rl_weights=action if component == 'rl' else zeros,
      ce_weights=(
          np.where(member, np.float32(1), observed)
          if component == 'ce'
          else observed
      ),
      ref_kl_weights=action if component == 'ref_kl' else zeros,
      ref_logprobs=None if component == 'ref_kl' else zeros,
  )
