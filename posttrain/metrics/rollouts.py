"""What rollouts say about the policy: the same means for training and tests.

Means are over what is known: a value that is None (not graded) counts for
nothing, and a name is absent where nothing is known.
"""

import collections
from collections.abc import Sequence

import numpy as np

from posttrain import types
from posttrain.metrics import estimates


class TooManyErrors(RuntimeError):
  """Environments failed more often than the budget allows."""

  def __init__(self, message: str, errors: tuple[str, ...]):
    super().__init__(message)
    self.errors = errors  # one per dropped episode


def errors(rollouts: Sequence[types.Rollout], budget: int) -> tuple[str, ...]:
  """Returns what environments said when they failed.

  Raises:
    TooManyErrors: that is more often than `budget` (`rollout.max_errors`).
  """
  found = tuple(r.error for r in rollouts if r.stop_reason == 'error')
  if len(found) > budget:
    raise TooManyErrors(
      f'environments must fail at most rollout.max_errors={budget} times in '
      f'a step or an evaluation: got {len(found)}, the first: {found[0]}; '
      'mend the environment, or raise the budget',
      found,
    )
  return found


def survivors(rollouts: Sequence[types.Rollout]) -> list[types.Rollout]:
  """Returns the rollouts that no environment error ended."""
  return [r for r in rollouts if r.stop_reason != 'error']


def summarize(rollouts: Sequence[types.Rollout]) -> dict[str, float]:
  """Returns means over the survivors.

  reward; pass_rate and format_rate, of what is graded; length, sampled tokens
  of an episode; truncated, the share that a budget cut; and the metrics of the
  scores, but for one that has the name of another.
  """
  rollouts = survivors(rollouts)
  found = [rollout.score.metrics for rollout in rollouts]
  names = dict.fromkeys(name for metrics in found for name in metrics)
  return _means(
    {
      **{name: [metrics.get(name) for metrics in found] for name in names},
      'reward': [r.score.reward for r in rollouts],
      'pass_rate': [r.score.correct for r in rollouts],
      'format_rate': [r.score.formatted for r in rollouts],
      'length': [sum(s.mask.sum() for s in r.samples) for r in rollouts],
      'truncated': [
        r.stop_reason in ('max_tokens', 'overflow') for r in rollouts
      ],
    }
  )


def stops(rollouts: Sequence[types.Rollout]) -> dict[str, float]:
  """Returns {'stop/<reason>': its share}, of the stop reasons that occur."""
  count = collections.Counter(rollout.stop_reason for rollout in rollouts)
  return {f'stop/{k}': n / len(rollouts) for k, n in sorted(count.items())}


def entropy(rollouts: Sequence[types.Rollout]) -> dict[str, float]:
  """Returns {'entropy': E[-log p]} of what was sampled: nats per token.

  An unbiased estimate for rollouts at the temperature of their law.
  """
  return _means(
    {
      'entropy': [
        -x
        for r in rollouts
        for s in r.samples
        for x in s.sampler_logprobs[s.mask].tolist()
      ]
    }
  )


def samples(rollouts: Sequence[types.Rollout]) -> dict[str, float]:
  """Returns {'samples': samples of an episode}, of those that have any.

  More than one where the chat template rewrote its history, or the policy saw
  no more than the end of it.
  """
  return _means({'samples': [len(r.samples) or None for r in rollouts]})


def mixed_groups(groups: Sequence[Sequence[types.Rollout]]) -> dict[str, float]:
  """Returns the share of groups whose rewards differ.

  Only they leave a signal behind a baseline.
  """
  rewards = [
    [r.score.reward for r in group if r.score.reward is not None]
    for group in groups
  ]
  return _means({'mixed_groups': [max(x) > min(x) for x in rewards if x]})


def best_of(
  groups: Sequence[Sequence[types.Rollout]],
  ks: Sequence[int],
  votes: bool = False,
) -> dict[str, float]:
  """Returns {'pass@k', 'maj@k'} and their bounds, means over the tasks.

  What k of a task's n answers are worth if the best counts, or what most of
  them say: `estimates.pass_at` and `estimates.majority_at`. Tasks with fewer
  than n graded answers are left out. maj@k is absent where no answer says what
  it is, unless `votes`: where none can be parsed it is 0.

  Args:
    groups: the n answers to each task.
    ks: each in [1, n].
    votes: whether scores say what was answered.
  """
  full = [
    [r.score for r in group]
    for group in groups
    if all(r.score.correct is not None for r in group)
  ]
  votes = votes or any(x.answer is not None for group in full for x in group)
  found = {}
  for k in sorted(set(ks)):
    found |= _rate(
      f'pass@{k}',
      [
        estimates.pass_at(len(group), sum(x.correct for x in group), k)
        for group in full
      ],
    )
    found |= _rate(
      f'maj@{k}',
      [
        estimates.majority_at(
          [x.answer for x in group], [x.correct for x in group], k
        )
        for group in full
        if votes
      ],
    )
  return found


def bounds(
  name: str, tasks: Sequence[Sequence[float | None]]
) -> dict[str, float]:
  """Returns {'<name>_low', '<name>_high'}, of a mean over all known values.

  Args:
    name: what the mean is called.
    tasks: the values of each task's answers, in [0, 1]; see
      `estimates.interval`.
  """
  known = [[value for value in task if value is not None] for task in tasks]
  known = [task for task in known if task]
  if not known:
    return {}
  found = estimates.interval(
    [float(np.mean(task)) for task in known], [len(task) for task in known]
  )
  return {
    f'{name}{side}': value
    for side, value in zip(estimates.BOUNDS, found, strict=True)
  }


def _rate(name: str, values: Sequence[float]) -> dict[str, float]:
  """One value per task: their mean, and its bounds."""
  return _means({name: values}) | bounds(name, [[x] for x in values])


def _means(values: dict[str, list]) -> dict[str, float]:
  known = {k: [v for v in x if v is not None] for k, x in values.items()}
  return {k: float(np.mean(x)) for k, x in known.items() if x}
