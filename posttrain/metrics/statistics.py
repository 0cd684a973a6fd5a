"""Statistics of rollouts, the same for training and for evaluation.

Means are over known values: a None (not graded) is left out, and a metric
without a known value is absent.

`MEASURES` are the main numbers of a held-out evaluation: one list for the last
lines of a run, and for the headlines, the table and the curves of its report.
"""

import collections
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from posttrain import types
from posttrain.metrics import estimates
from posttrain.util import errors


class TooManyErrors(RuntimeError):
  """Episodes and rewards failed for more rollouts than may fail."""

  def __init__(
    self, message: str, failures: tuple[str, ...], code: int = errors.FAILED
  ):
    super().__init__(message)
    self.errors, self.exit_code = failures, code


def failures(
  rollouts: Sequence[types.Rollout],
  limit: float,
  faults: tuple[str, ...] = (),
  has_rewards: bool = True,
) -> tuple[str, ...]:
  """Returns the errors of episodes, one per failed episode, and of rewards.

  Args:
    rollouts: the graded rollouts of a step; each counts once.
    limit: `rollout.max_error_share`.
    faults: the errors of rewards, one per call.
    has_rewards: whether a rollout of the stage has had a reward.

  Raises:
    TooManyErrors: a larger share of the rollouts failed.
  """
  episodes = tuple(r.error for r in rollouts if r.stop_reason == 'error')
  failed = sum(r.error is not None for r in rollouts)
  if failed / max(len(rollouts), 1) > limit:
    first = '; '.join([*faults, *episodes][:3])
    raise TooManyErrors(
      'episodes and rewards must fail for at most rollout.max_error_share='
      f'{limit:g} of the rollouts: got {failed} of {len(rollouts)}'
      f'{"" if has_rewards else " and no reward in the stage"}, the first '
      f'errors: {first}; fix the environment or the reward, or raise the share',
      (*episodes, *faults),
      errors.FAILED if has_rewards else errors.NO_REWARD,
    )
  return *episodes, *faults


def survivors(rollouts: Sequence[types.Rollout]) -> list[types.Rollout]:
  """Returns the rollouts that no environment error ended."""
  return [r for r in rollouts if r.stop_reason != 'error']


def summarize(rollouts: Sequence[types.Rollout]) -> dict[str, float]:
  """Returns means over the survivors.

  reward; pass_rate and format_rate, over graded rollouts; length, sampled
  tokens of an episode; truncated, the share that a token budget cut; and the
  metrics of the scores, except those with one of these names.
  """
  rollouts = survivors(rollouts)
  score_metrics = [rollout.score.metrics for rollout in rollouts]
  names = dict.fromkeys(name for metrics in score_metrics for name in metrics)
  return _means(
    {
      **{name: [x.get(name) for x in score_metrics] for name in names},
      'reward': [r.score.reward for r in rollouts],
      'pass_rate': [r.score.correct for r in rollouts],
      'format_rate': [r.score.formatted for r in rollouts],
      'length': [sum(s.mask.sum() for s in r.samples) for r in rollouts],
      'truncated': [r.is_truncated for r in rollouts],
    }
  )


def stops(rollouts: Sequence[types.Rollout]) -> dict[str, float]:
  """Returns {'stop/<reason>': its share} for the stop reasons that occur."""
  count = collections.Counter(rollout.stop_reason for rollout in rollouts)
  return {f'stop/{k}': n / len(rollouts) for k, n in sorted(count.items())}


def entropy(rollouts: Sequence[types.Rollout]) -> dict[str, float]:
  """Returns {'entropy': mean of -log p over sampled tokens}, nats per token.

  An unbiased estimate of the entropy at the sampling temperature.
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


def prefix_hits(rollouts: Sequence[types.Rollout]) -> dict[str, float]:
  """Returns {'prefix_hits': the share of tokens found in the prefix cache}.

  Of the tokens that no turn sampled: prompts, replies, repeated histories.
  Empty without a hit.
  """
  hits = sum(turn.cached for r in rollouts for turn in r.turns)
  given = sum((~sample.mask).sum() for r in rollouts for sample in r.samples)
  return {'prefix_hits': hits / float(given)} if hits else {}


def samples(rollouts: Sequence[types.Rollout]) -> dict[str, float]:
  """Returns {'samples': mean number of samples per rollout that has any}.

  A rollout has more than one if the chat template rewrote its history, or the
  policy's prompt was the end of the history only.
  """
  return _means({'samples': [len(r.samples) or None for r in rollouts]})


def advantages(samples: Sequence[types.Sample]) -> dict[str, float]:
  """Returns 'advantage/mean', 'std', 'min' and 'max' over sampled tokens.

  {} without credit.

  Args:
    samples: from `streams.stamp`.
  """
  known = [x.advantages[x.mask] for x in samples if x.advantages is not None]
  values = np.concatenate([np.zeros(0), *known])
  if not values.size:
    return {}
  names = 'mean', 'std', 'min', 'max'
  return {f'advantage/{x}': float(getattr(values, x)()) for x in names}


def mixed_groups(groups: Sequence[Sequence[types.Rollout]]) -> dict[str, float]:
  """Returns the share of groups whose rewards differ.

  In the others every advantage relative to the group is 0.
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

  See `estimates.pass_at` and `estimates.majority_at`. Tasks with an answer that
  is not graded are left out. Where no score has an answer, maj@k is absent, or
  0 if `votes`.

  Args:
    groups: the n rollouts of each task.
    ks: each in [1, n].
    votes: whether scores of the environment have answers.
  """
  full = [
    [r.score for r in group]
    for group in groups
    if all(r.score.correct is not None for r in group)
  ]
  votes = votes or any(x.answer is not None for group in full for x in group)
  values = {}
  for k in sorted(set(ks)):
    values |= _rate(
      f'pass@{k}',
      [
        estimates.pass_at(len(group), sum(x.correct for x in group), k)
        for group in full
      ],
    )
    values |= _rate(
      f'maj@{k}',
      [
        estimates.majority_at(
          [x.answer for x in group], [x.correct for x in group], k
        )
        for group in full
        if votes
      ],
    )
  return values


def bounds(
  name: str, tasks: Sequence[Sequence[float | None]]
) -> dict[str, float]:
  """Returns {'<name>_low', '<name>_high'} of the mean over all known values.

  {} without a known value, or without an interval.

  Args:
    name: the mean's name.
    tasks: the values of each task's answers; see `estimates.interval`.
  """
  known = [
    values
    for task in tasks
    if (values := [value for value in task if value is not None])
  ]
  if not known:
    return {}
  interval = estimates.interval(
    [float(np.mean(task)) for task in known],
    [len(task) for task in known],
    estimates.is_rate(name, itertools.chain(*known)),
  )
  names = (name + side for side in estimates.BOUNDS)
  return dict(zip(names, interval or (), strict=False))


def _rate(name: str, values: Sequence[float]) -> dict[str, float]:
  """Returns the mean of one value per task, and its bounds."""
  return _means({name: values}) | bounds(name, [[x] for x in values])


def _means(values: dict[str, list]) -> dict[str, float]:
  known = {k: [v for v in x if v is not None] for k, x in values.items()}
  return {k: float(np.mean(x)) for k, x in known.items() if x}


# --- The main numbers of a held-out evaluation --------------------------------

_ENV = '(?P<env>.+)'
_NAMED = '(?P<name>[^/]+)/(?P<env>.+)'
_RATE, _NUMBER = '{:.1%}', '{:.3f}'


class Measure(NamedTuple):
  """A number that is measured on held-out tasks or pairs.

  Fields:
    key: the metric, or its prefix up to a slash.
    title: its title in a table; {} is the name.
    style: format of a value.
    panel: title of its curves.
    rest: regular expression of the rest of the metric, with the group `env`,
      and `name` where the measure is one of several functions; without `env`
      the environment is the second part of the key.
  """

  key: str
  title: str
  style: str
  panel: str = ''
  rest: str = _ENV


MEASURES = (
  Measure('eval/pass_rate/', 'pass rate, greedy', _RATE, 'Pass rate, greedy'),
  Measure(
    'eval/sampled_pass_rate/', 'pass rate, sampled', _RATE, 'Pass rate, sampled'
  ),
  Measure(
    'eval/reward/',
    'reward {}, greedy',
    _NUMBER,
    'Held-out reward, greedy',
    _NAMED,
  ),
  Measure(
    'eval/sampled_reward/',
    'reward {}, sampled',
    _NUMBER,
    'Held-out reward, sampled',
    _NAMED,
  ),
  Measure(
    'eval/nll/',
    'NLL of demonstrations, nats per token',
    '{:.4f}',
    'Held-out NLL, nats per token',
  ),
  Measure(
    'eval/teacher_kl/',
    'KL to the teacher, nats per token',
    '{:.4f}',
    'KL to the teacher, nats per token',
  ),
  Measure(
    'eval/token_accuracy/',
    'token accuracy on demonstrations',
    _RATE,
    'Held-out token accuracy',
  ),
  Measure(
    'eval/pairs/rewards/accuracies',
    'accuracy on held-out pairs',
    _RATE,
    'Accuracy on held-out pairs',
    '',
  ),
)
# For a run that has none of them. The reward of an environment is the weighted
# sum of its functions, or its own grade.
OTHERWISE = (
  Measure('eval/reward/', 'reward, greedy', _NUMBER, rest='(?P<env>[^/]+)'),
  Measure(
    'eval/sampled_reward/', 'reward, sampled', _NUMBER, rest='(?P<env>[^/]+)'
  ),
)


def match(measure: Measure, metric: str) -> tuple[str, str] | None:
  """Returns the environment and the title of a metric, None for others."""
  if not metric.startswith(measure.key):
    return None
  groups = re.fullmatch(measure.rest, metric.removeprefix(measure.key))
  if groups is None:
    return None
  names = {'env': measure.key.split('/')[1], 'name': ''} | groups.groupdict()
  return names['env'], measure.title.format(names['name'])


def held_out(known: Iterable[str]) -> list[str]:
  """Returns the metrics of `MEASURES` among the known ones, in their order.

  Without any, those of `OTHERWISE`.
  """
  known = list(known)
  for measures in (MEASURES, OTHERWISE):
    if listed := [x for m in measures for x in known if match(m, x)]:
      return listed
  return []
