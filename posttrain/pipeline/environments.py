"""One environment of a stage: its tasks, sampler, algorithm and rewards.

source -> sampler -> rewards -> algorithm
"""

import dataclasses
import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from posttrain import algorithms, processes, schema, types
from posttrain.algorithms import streams
from posttrain.envs import base
from posttrain.metrics import statistics
from posttrain.pipeline import batches
from posttrain.rollout import calls, env_calls, grading, samplers, side_by_side

CHECKED = 2000  # tasks that `check` takes at a time; of generated ones, in all
SHOWN = 2  # tasks that are shown

Groups = list[list[types.Rollout]]


class Graded(NamedTuple):
  """Finished groups of an environment, with their rewards."""

  groups: Groups  # all rollouts
  # Without failed rollouts and, if rewards are read, those without a reward.
  usable: Groups
  metrics: dict[str, float]  # of reward functions
  errors: tuple[str, ...]  # of reward functions


def join(rounds: Sequence[Graded]) -> Graded:
  """Returns all groups; metrics are means, weighted by rollouts."""
  if len(rounds) == 1:
    return rounds[0]
  sums: dict[str, list[float]] = {}
  for graded in rounds:
    count = sum(map(len, graded.groups))
    for name, value in graded.metrics.items():
      total = sums.setdefault(name, [0.0, 0.0])
      total[0] += count * value
      total[1] += count
  return Graded(
    [group for graded in rounds for group in graded.groups],
    [group for graded in rounds for group in graded.usable],
    {name: total / count for name, (total, count) in sums.items()},
    tuple(error for graded in rounds for error in graded.errors),
  )


@dataclasses.dataclass(frozen=True)
class Environment:
  """One environment of a stage; needs no model."""

  name: str
  entry: schema.EnvEntry
  env: base.Env
  source: Any  # of tasks: an iterator with get_state and set_state
  sampler: samplers.DatasetSampler | samplers.ModelSampler
  algorithm: algorithms.base.Algorithm

  @property
  def learns_by_trial(self) -> bool:
    """Whether it trains on rewards of the policy's rollouts."""
    return self._reads_rewards and self.entry.ratio > 0

  @property
  def _reads_rewards(self) -> bool:
    return self.sampler.on_policy and self.algorithm.component == 'rl'

  @property
  def references(self) -> dict[schema.Reference, str]:
    """Models that score, judge or play, each with the stage's key for it."""
    key, entry, algorithm = f'envs.{self.name}', self.entry, self.algorithm
    by_key = {
      f'{key}.algorithm.reference': algorithm.scoring_reference,
      f'{key}.judge': entry.judge,
      **{
        f'{key}.rewards.{name}.judge': reward.judge
        for name, reward in entry.rewards.items()
      },
    }
    if not self.sampler.on_policy:
      by_key[f'{key}.sampler.model'] = self.sampler.model
    return {model: key for key, model in by_key.items() if model is not None}

  @property
  def reward_models(self) -> dict[str, str]:
    """Reward models, each with the stage's key that names it."""
    return {
      reward.model: f'envs.{self.name}.rewards.{name}.model'
      for name, reward in self.entry.rewards.items()
      if reward.model is not None
    }

  def _columns(self) -> set[str]:
    """Returns the columns with a value in some task; makes all tasks."""
    return {
      key
      for task in self.source.take(len(self.source))
      for key, x in {**task.info, 'answer': task.answer}.items()
      if x is not None
    }

  def check(self) -> batches.Checked:
    """Checks the first tasks, or all rows; does not advance the source.

    Raises:
      ValueError: naming the row that cannot train, the longest of those that
        do not fit, a source without any, or a reward function that needs an
        argument that no task has.
    """
    count = len(self.source)
    if not getattr(self.entry.env, 'path', None):  # not of a file
      count = min(count, CHECKED)
    if not count:
      raise ValueError(f'environment {self.name} must have tasks: got none')
    lengths, first, long, keys = [], [], [], set()
    size, option = self.sampler.max_tokens, self.sampler.cfg.too_long
    refused = 0
    for start in range(0, count, CHECKED):
      for task in self.source.take(min(start + CHECKED, count), start):
        needed, sequences = self.sampler.measure(task)
        self.algorithm.check(task)
        keys |= task.info.keys()
        lengths.append(max(map(len, sequences)))
        if (most := max(needed, lengths[-1])) > size:
          long.append((most, task.id))
        if needed > size:
          refused += 1
        elif len(first) < SHOWN:
          first.append((sequences[0].ids, sequences[0].sampled))
    if long:
      text = (
        f'envs.{self.name}.sampler.too_long={option!r}: rows must fit into '
        f'batch.row_tokens={size}: got {len(long)} of {count} that do not; the '
        f'longest, {max(long)[1]}, needs {max(long)[0]} tokens; '
        f'row_tokens={max(long)[0]} holds all of them'
      )
      if refused and not (option == 'drop' and first):
        others = {
          'error': "; or set 'drop', or for demonstrations 'truncate', which "
          'cuts their end',
          'truncate': f'; of {refused} the prompt alone is too long, which '
          "'truncate' does not cut; 'drop' leaves such rows out",
        }
        raise ValueError(text + others.get(option, ''))
      text += '; those lose their end of turn' * (option == 'truncate')
      logging.getLogger('absl').warning('%s', text)
    if self.learns_by_trial:
      functions = [
        grading.Function(f'envs.{self.name}.rewards.{x}', entry, self._columns)
        for x, entry in self.entry.rewards.items()
        if entry.fn
      ]
      for function in functions:
        function.check(keys)
      processes.on(0, lambda: self._probe(functions))
    return lengths, first

  def _probe(self, functions: Sequence[grading.Function]) -> None:
    """Calls reward functions on two answers to two tasks."""
    tasks = self.source.take(2)
    answer = {'role': 'assistant', 'content': 'This is an invented answer: 42.'}
    rollouts = [
      types.Rollout(
        -1, task, (*task.prompt, answer), (), types.Score(None), 'eos'
      )
      for task in (*tasks, *tasks)
    ]
    for function in functions:
      function.probe(rollouts)

  def draw(self) -> types.Task:
    """Returns the next task; leaves out those that are to be dropped."""
    sampler = self.sampler
    return next(
      task
      for task in self.source
      if sampler.cfg.too_long != 'drop'
      or sampler.measure(task).needed <= sampler.max_tokens
    )

  def rewards(
    self,
    judge: Callable[[schema.Reference], grading.Judge] | None,
    reward_model: Callable[[str], grading.Model] | None,
    workers: env_calls.Workers | None = None,
  ) -> grading.Rewards:
    """Returns its rewards, all of whose models are loaded.

    Also hands the environment its own judge.

    Args:
      judge: returns the judge of a reference.
      reward_model: returns the reward model of a name.
      workers: worker processes of reward functions; None = threads.
    """
    if self.entry.judge is not None:
      assert judge is not None, 'an environment with a judge must get one'
      self.env.judge = calls.untimed(judge(self.entry.judge))
    return grading.Rewards(
      self.name, self.entry.rewards, self._columns, judge, reward_model, workers
    )

  def grade(
    self,
    groups: Groups,
    begun: Sequence[grading.GroupCalls],
    rewards: grading.Rewards,
  ) -> side_by_side.Task[Graded]:
    """Gives finished groups their rewards; a task of `side_by_side`.

    Usable are rollouts that did not fail and, if the component reads rewards,
    have one.

    Args:
      groups: the rollouts of each drawn task.
      begun: from `rewards.begin`, of each group.
      rewards: from `rewards`.
    """
    rollouts = [rollout for group in groups for rollout in group]
    flat, metrics, errors = yield from rewards.task(rollouts, begun)
    rewarded = iter(flat)
    groups = [[next(rewarded) for _ in group] for group in groups]
    usable = [
      [
        rollout
        for rollout in group
        if rollout.stop_reason != 'error'
        and not (self._reads_rewards and rollout.score.reward is None)
      ]
      for group in groups
    ]
    return Graded(groups, usable, metrics, errors)

  def update_source(self, usable: Groups) -> dict[str, float]:
    """Tells the source how finished groups went; returns its metrics.

    A group's pass rate is the mean of its rollouts: 1 for a correct one; where
    the environment does not tell, its reward, cut to [0, 1].

    Args:
      usable: groups of `grade`, in the order of their draws.
    """
    rates = []
    for group in usable:
      scores = [rollout.score for rollout in group]
      grades = [x.reward if x.correct is None else x.correct for x in scores]
      known = [x for x in grades if x is not None]
      if known:
        rate = float(np.mean(np.clip(known, 0, 1)))
        rates.append((group[0].task.id, rate))
    metrics = self.source.observe(rates)
    return {f'curriculum/{k}/{self.name}': x for k, x in metrics.items()}

  def lacks_credit(self, group: Sequence[types.Rollout]) -> bool:
    """Whether it trains on rewards, and the group's advantages are all 0.

    With a critic, which gives the advantages: whether nothing of it trains.
    """
    if not self.learns_by_trial:
      return False
    trains = [self.algorithm.trains_on(rollout) for rollout in group]
    if self.algorithm.needs_critic():
      return not any(trains)
    credits = self.algorithm.assign(group) if group else ()
    return not any(map(np.any, itertools.compress(credits, trains)))

  def kept(self, usable: Groups, count: int) -> Groups:
    """Returns the groups of a step that train.

    They are `count` ones, those without credit only where others are fewer; and
    all whose messages are learned without it, as by echo.
    """
    if len(usable) == count:
      return usable
    ordered = sorted(usable, key=self.lacks_credit)
    return [*ordered[:count], *filter(self.observes, ordered[count:])]

  def observes(self, group: Sequence[types.Rollout]) -> bool:
    """Whether the algorithm learns messages of the group, without credit."""
    algorithm = self.algorithm
    weights = [
      algorithm.observation_weights(x) or ()
      for x in group
      if algorithm.trains_on(x)
    ]
    return any(np.any(x) for rollout in weights for x in rollout)

  def samples(self, usable: Groups) -> list[types.Sample]:
    """Returns samples with streams, without reference logprobs.

    Args:
      usable: groups of `grade`.
    """
    return streams.stamp(self.algorithm, [group for group in usable if group])

  def metrics(
    self, graded: Graded, samples: Sequence[types.Sample]
  ) -> dict[str, float]:
    """Returns the metrics of a step, of all its groups, dropped ones too.

    Args:
      graded: the groups.
      samples: those of `samples`, for the advantages.
    """
    metrics = {**graded.metrics, **statistics.advantages(samples)}
    if self.sampler.model is not None:
      rollouts = [rollout for group in graded.groups for rollout in group]
      alive = statistics.survivors(rollouts)
      values = {
        **statistics.summarize(rollouts),
        **statistics.bounds(
          'reward', [[r.score.reward for r in x] for x in graded.usable]
        ),
        **statistics.stops(rollouts),
        **(statistics.entropy(rollouts) if self.sampler.on_policy else {}),
        **statistics.samples(rollouts),
        **statistics.prefix_hits(rollouts),
        **statistics.mixed_groups(graded.usable),
        'errors': len(rollouts) - len(alive),
        'ungraded': len(alive) - sum(map(len, graded.usable)),
      }
      if self.algorithm.mask_truncated:
        values['masked'] = sum(r.is_truncated for r in alive)
      metrics |= {f'rollout/{key}': value for key, value in values.items()}
      if 'reward' in values:
        metrics['reward/mean'] = values['reward']
    return {f'{k}/{self.name}': v for k, v in metrics.items()}
