"""Stamps an algorithm's word on the samples of finished groups.

1. `assign` per group, then `rescale` over all: credit per rollout.
2. Component weights, pruning and leash, per sample.
3. `score`, once over all samples with ref_kl members: `ref_logprobs`.

Axes: T tokens of one sample.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from posttrain import types
from posttrain.algorithms import base


def finalize(
  algorithm: base.Algorithm,
  groups: Sequence[base.Group],
  scorer: base.Scorer | None = None,
) -> list[types.Sample]:
  """Returns the samples of the groups with every stream materialized.

  The algorithm's component weighs the completion mask with 1; CE weights of
  observations are merged in. A token with an advantage of exactly 0 leaves
  the rl component if the algorithm prunes, and stays what else it is: its ce
  weight is kept, and so is the leash (`kl_beta` on the completion mask).
  Token 0 of a sample has no prediction, so it is a member of nothing.

  Args:
    algorithm: whose hooks are asked.
    groups: all finished ones of one environment and step.
    scorer: of reference logprobs; None = the algorithm has no reference.

  Raises:
    ValueError: credit, weights or reference logprobs are not aligned with
      the tokens, or a reference logprob is not finite.
  """
  credits = [_check(algorithm.assign(group), group) for group in groups]
  rescaled = algorithm.rescale(groups, credits)
  if len(rescaled) != len(groups):
    raise ValueError(
      f'rescale must return the credit of each group: got {len(rescaled)}, '
      f'expected {len(groups)}'
    )
  samples = [
    _stamp(algorithm, sample, advantages, observed)
    for group, word in zip(groups, rescaled, strict=True)
    for rollout, credit in zip(group, _check(word, group), strict=True)
    for sample, advantages, observed in zip(
      rollout.samples,
      _spread(rollout, credit),
      _observed(rollout, algorithm.observation_weights(rollout)),
      strict=True,
    )
  ]
  return _scored(algorithm, samples, scorer)


def _check(credits: Sequence[base.Credit], group: base.Group):
  if len(credits) != len(group):
    raise ValueError(
      'assign and rescale must return one credit per rollout: got '
      f'{len(credits)}, expected {len(group)}'
    )
  return credits


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
  algorithm: base.Algorithm,
  sample: types.Sample,
  advantages: np.ndarray | None,
  observed: np.ndarray,
) -> types.Sample:
  zeros = np.zeros(len(sample), np.float32)
  member = sample.mask.copy()
  member[:1] = False
  action = member.astype(np.float32)
  observed[:1] = 0
  rl = action if algorithm.component == 'rl' else zeros
  if advantages is not None and algorithm.prune_zero_advantage:
    rl = np.where(advantages == 0, np.float32(0), rl)
  trains_by_kl = algorithm.component == 'ref_kl'
  return dataclasses.replace(
    sample,
    advantages=advantages,
    rl_weights=rl,
    ce_weights=(
      np.where(member, np.float32(1), observed)
      if algorithm.component == 'ce'
      else observed
    ),
    ref_kl_weights=np.float32(trains_by_kl + algorithm.kl_beta) * action,
    ref_logprobs=zeros,
  )


def _scored(
  algorithm: base.Algorithm,
  samples: list[types.Sample],
  scorer: base.Scorer | None,
) -> list[types.Sample]:
  """Stamps the reference's logprobs on the samples that read them."""
  which = [i for i, s in enumerate(samples) if s.ref_kl_weights.any()]
  if not which:
    return samples
  assert scorer is not None, 'reference logprobs are read: pass a scorer'
  readers = [samples[i] for i in which]
  found = algorithm.score(readers, scorer)
  if found is None or len(found) != len(readers):
    raise ValueError(
      'score must return one array per sample: got '
      f'{found if found is None else len(found)}, expected {len(readers)}'
    )
  samples = list(samples)
  for i, logprobs in zip(which, found, strict=True):
    samples[i] = dataclasses.replace(
      samples[i], ref_logprobs=_reference(samples[i], logprobs)
    )
  return samples


def _reference(sample: types.Sample, logprobs: np.ndarray) -> np.ndarray:
  where = f'of row {sample.row!r} of environment {sample.env!r}'
  logprobs = np.asarray(logprobs, np.float32)
  if logprobs.shape != (len(sample),):
    raise ValueError(
      f'score must align with the tokens {where}: got shape '
      f'{logprobs.shape}, expected {(len(sample),)}'
    )
  if not np.isfinite(logprobs).all():
    at = int(np.argmin(np.isfinite(logprobs)))
    raise ValueError(
      f'score must return finite logprobs {where}: got {logprobs[at]} at '
      f'token {at}'
    )
  return logprobs
