"""Streams: an algorithm's per-token arrays, stamped on samples.

1. `assign` per group, then `rescale` over all groups: credit per rollout.
2. Component weights, pruning and the KL weight, per sample.
3. `score`, over all samples with ref_kl members: `ref_logprobs`.

`stamp` is 1 and 2, `scoring` is 3; `begin` starts 3 for a finished group, while
others still play.

Axes: T tokens of one sample.
"""

import dataclasses
import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from posttrain import processes, schema, types
from posttrain.algorithms import base
from posttrain.rollout import side_by_side
from posttrain.util import errors


class StartedScores(NamedTuple):
  """Samples whose scores a reference computes."""

  samples: Sequence[types.Sample]
  scores: Sequence[np.ndarray]  # as of `base.Scorer`


_CREDIT = 'assign and rescale must return one credit per rollout'


def stamp(
  algorithm: base.Algorithm, groups: Sequence[base.Group]
) -> list[types.Sample]:
  """Returns the samples of the groups with every stream; ref_logprobs are 0.

  The weight of the algorithm's component is 1 on the completion mask; CE
  weights of observations are added. A token with an advantage of exactly 0
  leaves the rl component if the algorithm prunes, and keeps its ce weight and
  its KL weight (`kl_beta` on the completion mask). Token 0 of a sample has no
  prediction, so it is not a member of any component. Neither is any token of a
  rollout that `trains_on` leaves out.

  Args:
    algorithm: the algorithm whose hooks are called.
    groups: all finished groups of one environment and step.

  Raises:
    ValueError: credit or weights are not aligned with the tokens, or credit is
      not finite.
  """
  credits = []
  for group in groups:
    credits.append(algorithm.assign(group))
    base.require_equal(_CREDIT, len(credits[-1]), len(group))
  rescaled = algorithm.rescale(groups, credits)
  what = 'rescale must return the credit of each group'
  base.require_equal(what, len(rescaled), len(groups))
  samples = []
  for group, values in zip(groups, rescaled, strict=True):
    base.require_equal(_CREDIT, len(values), len(group))
    for rollout, credit in zip(group, values, strict=True):
      samples += _stamp(algorithm, rollout, credit)
  return samples


def _stamp(
  algorithm: base.Algorithm, rollout: types.Rollout, credit: base.Credit
) -> Iterator[types.Sample]:
  """Yields a rollout's samples with every stream."""
  lengths = [len(sample) for sample in rollout.samples]
  # The credit of each sample, f32[T] or None.
  advantages: list[np.ndarray | None] = [None] * len(lengths)
  values = None if credit is None else np.asarray(credit, np.float32)
  if values is not None and not np.isfinite(values).all():
    raise ValueError(
      f'{type(algorithm).__name__} must return finite credit: got '
      f'{errors.quote(credit)} for task {rollout.task.id}'
    )
  if values is not None and values.ndim:
    what = f'credit must align with the tokens of task {rollout.task.id}'
    base.require_equal(what, len(values), sum(lengths))
    ends = itertools.accumulate(lengths, initial=0)
    advantages = [values[i:j] for i, j in itertools.pairwise(ends)]
  elif values is not None:
    advantages = [
      np.where(sample.mask, values, np.float32(0)) for sample in rollout.samples
    ]
  # The CE weights of observations of each sample, f32[T].
  observed = algorithm.observation_weights(rollout)
  if observed is None:
    observed = [np.zeros(length) for length in lengths]
  trains = algorithm.trains_on(rollout)
  what = 'observation_weights must span the tokens of each sample of task '
  sizes = [len(weights) for weights in observed]
  base.require_equal(f'{what}{rollout.task.id}', sizes, lengths)
  rewards = algorithm.rewards(rollout)
  trains_by_kl = algorithm.component == 'ref_kl'
  kl = algorithm.weight * trains_by_kl + algorithm.kl_beta
  for i, (sample, credits, weights) in enumerate(
    zip(rollout.samples, advantages, observed, strict=True)
  ):
    member = sample.mask & trains
    member[:1] = False
    action = member.astype(np.float32)
    rl, zeros = action, np.zeros(len(sample), np.float32)
    if algorithm.component != 'rl':
      rl = zeros
    if credits is not None and algorithm.prune_zero_advantage:
      rl = np.where(credits == 0, np.float32(0), rl)
    ce = np.array(weights, np.float32) * trains
    ce[:1] = 0
    if algorithm.component == 'ce':
      ce = np.where(member, np.float32(algorithm.weight), ce)
    if rewards is not None:
      # A later sample goes on where this one ends: its rewards follow.
      goes_on = i + 1 < len(lengths)
      goes_on |= algorithm.bootstrap and rollout.is_truncated
      bootstraps = np.zeros_like(zeros)
      bootstraps[np.flatnonzero(member)[-1:]] = goes_on
      sample = dataclasses.replace(
        sample, rewards=rewards[i], value_weights=action, bootstraps=bootstraps
      )
    yield dataclasses.replace(
      sample,
      advantages=credits,
      rl_weights=rl,
      ce_weights=ce,
      ref_kl_weights=np.float32(kl) * action,
      ref_logprobs=zeros,
    )


def begin(
  algorithm: base.Algorithm, group: base.Group, scorer: base.Scorer | None
) -> list[StartedScores]:
  """Asks a reference on a server for the scores of a finished group.

  Returns [] if the reference is not on a server, and with several processes:
  `scoring` then asks for all samples. Groups that do not train are scored too.
  """
  served = isinstance(algorithm.scoring_reference, schema.Endpoint)
  samples = [
    sample
    for rollout in group
    if rollout.stop_reason != 'error' and algorithm.trains_on(rollout)
    for sample in rollout.samples
    if sample.mask[1:].any()
  ]
  if not (samples and served and processes.count() == 1):
    return []
  assert scorer is not None, 'reference logprobs need a scorer'
  return [StartedScores(samples, algorithm.score(samples, scorer))]


def scoring(
  algorithm: base.Algorithm,
  samples: list[types.Sample],
  scorer: base.Scorer | None,
  begun: Sequence[StartedScores] = (),
) -> side_by_side.Task[list[types.Sample]]:
  """Stamps reference logprobs on the samples; a task of `side_by_side`.

  With several processes the task yields no futures: the scorer exchanges values
  between processes and launches programs of all of them, for which all tasks
  must take turns in the same order everywhere.

  Args:
    algorithm: the algorithm whose `score` is called.
    samples: from `stamp`.
    scorer: computes reference logprobs; None = the algorithm has no reference.
    begun: from `begin`; the other samples are scored now.

  Raises:
    ValueError: reference logprobs are not aligned with the tokens, or one is
      not finite.
  """
  indices = ref_kl_members(samples)
  if not indices:
    return samples
  assert scorer is not None, 'reference logprobs need a scorer'
  # Stamping replaces samples, but not their ids.
  known = {id(sample.ids) for call in begun for sample in call.samples}
  all_calls = list(begun)
  if rest := [samples[i] for i in indices if id(samples[i].ids) not in known]:
    all_calls.append(StartedScores(rest, algorithm.score(rest, scorer)))
  for call in all_calls:
    count = None if call.scores is None else len(call.scores)
    what = 'score must return one array per sample'
    base.require_equal(what, count, len(call.samples))
  yield ()  # others begin
  futures = [x for c in all_calls for x in getattr(c.scores, 'futures', ())]
  while processes.count() == 1 and (
    running := [x for x in futures if not x.done()]
  ):
    yield running
  scores = {
    id(sample.ids): logprobs
    for call in all_calls
    for sample, logprobs in zip(call.samples, call.scores, strict=True)
  }
  samples = list(samples)
  for i in indices:
    logprobs = scores[id(samples[i].ids)]
    where = f'row {samples[i].row!r} of environment {samples[i].env!r}'
    logprobs = np.asarray(logprobs, np.float32)
    what = f'score must align with the tokens of {where}'
    base.require_equal(what, logprobs.shape, (len(samples[i]),))
    if not np.isfinite(logprobs).all():
      token = int(np.argmin(np.isfinite(logprobs)))
      raise ValueError(
        f'score must return finite logprobs of {where}: got {logprobs[token]} '
        f'at token {token}'
      )
    samples[i] = dataclasses.replace(samples[i], ref_logprobs=logprobs)
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


def ref_kl_members(samples: Sequence[types.Sample]) -> list[int]:
  """Returns the indices of samples of `stamp` with a ref_kl member."""
  return [i for i, x in enumerate(samples) if _kl_weights(x).any()]


def _kl_weights(sample: types.Sample) -> np.ndarray:
  assert sample.ref_kl_weights is not None, 'a stamped sample'
  return sample.ref_kl_weights
