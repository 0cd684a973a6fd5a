"""Streams: an algorithm's per-token arrays, stamped on samples.

1. `assign` per group, then `rescale` over all groups: credit per rollout.
2. Component weights, pruning and the KL weight, per sample.
3. `score`, once over all samples with ref_kl members: `ref_logprobs`.

`stamp` is 1 and 2, `scoring` is 3.

Axes: T tokens of one sample.
"""

import dataclasses
from collections.abc import Collection, Iterator, Mapping, Sequence

import numpy as np

from posttrain import processes, types
from posttrain.algorithms import base
from posttrain.rollout import side_by_side


def finalize(
  algorithm: base.Algorithm,
  groups: Sequence[base.Group],
  scorer: base.Scorer | None = None,
) -> list[types.Sample]:
  """Returns the samples of the groups with every stream materialized.

  Args:
    algorithm: the algorithm whose hooks are called.
    groups: all finished groups of one environment and step.
    scorer: computes reference logprobs; None = the algorithm has no reference.

  Raises:
    ValueError: credit, weights or reference logprobs are not aligned with
      the tokens, or a reference logprob is not finite.
  """
  samples = stamp(algorithm, groups)
  (scored,) = side_by_side.run([scoring(algorithm, samples, scorer)])
  return scored.result()


def stamp(
  algorithm: base.Algorithm, groups: Sequence[base.Group]
) -> list[types.Sample]:
  """Returns the samples of the groups with every stream; ref_logprobs are 0.

  The weight of the algorithm's component is 1 on the completion mask; CE
  weights of observations are added. A token with an advantage of exactly 0
  leaves the rl component if the algorithm prunes, and keeps its ce weight and
  its KL weight (`kl_beta` on the completion mask). Token 0 of a sample has no
  prediction, so it is not a member of any component.

  Args:
    algorithm: the algorithm whose hooks are called.
    groups: all finished groups of one environment and step.

  Raises:
    ValueError: credit or weights are not aligned with the tokens.
  """
  credits = [_check(algorithm.assign(group), group) for group in groups]
  rescaled = algorithm.rescale(groups, credits)
  if len(rescaled) != len(groups):
    raise ValueError(
      f'rescale must return the credit of each group: got {len(rescaled)}, '
      f'expected {len(groups)}'
    )
  return [
    _stamp(algorithm, sample, advantages, observed)
    for group, values in zip(groups, rescaled, strict=True)
    for rollout, credit in zip(group, _check(values, group), strict=True)
    for sample, advantages, observed in zip(
      rollout.samples,
      _spread(rollout, credit),
      _observed(rollout, algorithm.observation_weights(rollout)),
      strict=True,
    )
  ]


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
  """Yields a rollout's credit as f32[T] per sample, or None."""
  if credit is None:
    yield from (None for _ in rollout.samples)
    return
  values = np.asarray(credit, np.float32)
  total = sum(len(sample) for sample in rollout.samples)
  if values.ndim and len(values) != total:
    raise ValueError(
      f'credit must align with the tokens of task {rollout.task.id}: got '
      f'{len(values)} values, expected {total}'
    )
  start = 0
  for sample in rollout.samples:
    end = start + len(sample)
    if values.ndim:
      yield values[start:end]
    else:
      yield np.where(sample.mask, values, np.float32(0))
    start = end


def _observed(
  rollout: types.Rollout, weights: Sequence[np.ndarray] | None
) -> Sequence[np.ndarray]:
  """Returns CE weights of observations, f32[T] per sample; zeros for None."""
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
  weight = np.float32(algorithm.weight)
  trains_by_kl = algorithm.component == 'ref_kl'
  kl = algorithm.weight * trains_by_kl + algorithm.kl_beta
  return dataclasses.replace(
    sample,
    advantages=advantages,
    rl_weights=rl,
    ce_weights=(
      np.where(member, weight, observed)
      if algorithm.component == 'ce'
      else observed
    ),
    ref_kl_weights=np.float32(kl) * action,
    ref_logprobs=zeros,
  )


def scoring(
  algorithm: base.Algorithm,
  samples: list[types.Sample],
  scorer: base.Scorer | None,
) -> side_by_side.Task[list[types.Sample]]:
  """Stamps reference logprobs on the samples; a task of `side_by_side`.

  With several processes the task yields no futures: the scorer exchanges values
  between processes and launches programs of all of them, for which all tasks
  must take turns in the same order everywhere.

  Args:
    algorithm: the algorithm whose `score` is called.
    samples: from `stamp`.
    scorer: computes reference logprobs; None = the algorithm has no reference.

  Raises:
    ValueError: reference logprobs are not aligned with the tokens, or one is
      not finite.
  """
  indices = _members(samples)
  if not indices:
    return samples
  assert scorer is not None, 'reference logprobs need a scorer'
  members = [samples[i] for i in indices]
  scores = algorithm.score(members, scorer)
  if scores is None or len(scores) != len(members):
    raise ValueError(
      'score must return one array per sample: got '
      f'{scores if scores is None else len(scores)}, expected {len(members)}'
    )
  futures = getattr(scores, 'futures', ()) if processes.count() == 1 else ()
  yield [future for future in futures if not future.done()]
  samples = list(samples)
  for i, logprobs in zip(indices, scores, strict=True):
    samples[i] = dataclasses.replace(
      samples[i], ref_logprobs=_checked(samples[i], logprobs)
    )
  return samples


def apart(
  stamped: Mapping[str, list[types.Sample]], distilled: Collection[str]
) -> Mapping[str, list[types.Sample]]:
  """Gives KL penalties a mean of their own beside distillation.

      sum_penalty / N_penalty + sum_distilled / N_distilled

  The loss divides all ref_kl members by their common number N, so the weights
  are scaled by N / N_penalty and N / N_distilled. With one of the two alone
  nothing changes.

  Args:
    stamped: environment -> its samples of a step.
    distilled: the environments of opd, opsd and the like.
  """
  counts = {True: 0, False: 0}
  for name, samples in stamped.items():
    members = sum(int((_kl_weights(x) != 0).sum()) for x in samples)
    counts[name in distilled] += members
  if not all(counts.values()):
    return stamped
  factors = {x: np.float32(sum(counts.values()) / n) for x, n in counts.items()}
  return {
    name: [
      dataclasses.replace(
        x, ref_kl_weights=_kl_weights(x) * factors[name in distilled]
      )
      for x in samples
    ]
    for name, samples in stamped.items()
  }


def needs_scores(samples: Sequence[types.Sample]) -> bool:
  """Returns whether a sample of `stamp` has a ref_kl member."""
  return bool(_members(samples))


def _members(samples: Sequence[types.Sample]) -> list[int]:
  return [i for i, x in enumerate(samples) if _kl_weights(x).any()]


def _kl_weights(sample: types.Sample) -> np.ndarray:
  assert sample.ref_kl_weights is not None, 'a stamped sample'
  return sample.ref_kl_weights


def _checked(sample: types.Sample, logprobs: np.ndarray) -> np.ndarray:
  """Returns the logprobs as f32[T]; checks their shape and values."""
  where = f'of row {sample.row!r} of environment {sample.env!r}'
  logprobs = np.asarray(logprobs, np.float32)
  if logprobs.shape != (len(sample),):
    raise ValueError(
      f'score must align with the tokens {where}: got shape '
      f'{logprobs.shape}, expected {(len(sample),)}'
    )
  if not np.isfinite(logprobs).all():
    token = int(np.argmin(np.isfinite(logprobs)))
    raise ValueError(
      f'score must return finite logprobs {where}: got {logprobs[token]} at '
      f'token {token}'
    )
  return logprobs
