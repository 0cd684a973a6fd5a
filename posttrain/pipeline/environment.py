"""An environment with all that makes training samples of its tasks.

source -> sampler -> rewards -> algorithm
"""

import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from posttrain import algorithms, envs, schema, types
from posttrain.algorithms import streams
from posttrain.chat import renderer as chat
from posttrain.metrics import rollouts as rollout_metrics
from posttrain.rollout import sampler as samplers
from posttrain.rollout.grading import rewards as rewarding

CHECKED = 2000  # tasks of a source that `check` looks at

Groups = list[list[types.Rollout]]


@dataclasses.dataclass(frozen=True)
class EnvRun:
  """One environment of a stage."""

  name: str
  entry: schema.EnvEntry
  env: envs.base.Env
  source: Any  # of tasks: an iterator with get_state and set_state
  sampler: samplers.DatasetSampler | samplers.ModelSampler
  rewards: rewarding.Rewards
  algorithm: algorithms.base.Algorithm

  @property
  def learns_by_trial(self) -> bool:
    """Whether it trains on rewards of what the policy itself does."""
    return self._reads_rewards and self.entry.ratio > 0

  @property
  def _reads_rewards(self) -> bool:
    return self.sampler.on_policy and self.algorithm.component == 'rl'

  @property
  def scored_by(self) -> schema.Reference | None:
    """The reference that its algorithm reads; None = none."""
    algorithm = self.algorithm
    reads = algorithm.kl_beta or algorithm.component == 'ref_kl'
    return algorithm.reference if reads else None

  @property
  def references(self) -> dict[schema.Reference, str]:
    """All models it asks, each with the key of the stage that says so."""
    key, entry = f'envs.{self.name}', self.entry
    named = {
      f'{key}.algorithm.reference': self.scored_by,
      f'{key}.judge': entry.judge,
      **{
        f'{key}.rewards.{name}.judge': one.judge
        for name, one in entry.rewards.items()
      },
    }
    if not self.sampler.on_policy:
      named[f'{key}.sampler.model'] = self.sampler.model
    return {model: key for key, model in named.items() if model is not None}

  @property
  def reward_models(self) -> dict[str, str]:
    """Those it asks, each with the key of the stage that says so."""
    return {
      one.model: f'envs.{self.name}.rewards.{name}.model'
      for name, one in self.entry.rewards.items()
      if one.model is not None
    }

  def connect(
    self,
    judge: Callable[[schema.Reference], rewarding.Judge] | None,
    reward_model: Callable[[str], rewarding.Model] | None = None,
  ) -> None:
    """Hands out judges and reward models, by their names in the config."""
    self.rewards.connect(judge, reward_model)
    if self.entry.judge is not None:
      self.env.judge = judge(self.entry.judge)

  def check(self) -> None:
    """Looks at the first tasks; draws none.

    Raises:
      ValueError: naming the row that cannot train, or a source without any.
    """
    if not len(self.source):
      raise ValueError(f'environment {self.name} must have tasks: got none')
    for task in self.source.take(CHECKED):
      self.sampler.check(task)
      self.algorithm.check(task)

  def train_on(
    self, played: Groups, scorer: algorithms.base.Scorer | None
  ) -> tuple[list[types.Sample], dict[str, float], tuple[str, ...]]:
    """Turns finished groups into samples with streams, metrics, and errors.

    The errors are of its reward functions, which may fail a few times.
    """
    flat, found, errors = self.rewards([r for group in played for r in group])
    rewarded = iter(flat)
    played = [[next(rewarded) for _ in group] for group in played]
    kept = [self._usable(group) for group in played]
    alive = [group for group in kept if group]
    samples = streams.finalize(self.algorithm, alive, scorer)
    if self.sampler.model is not None:
      found |= self._metrics(played, kept)
    return samples, {f'{k}/{self.name}': v for k, v in found.items()}, errors

  def _usable(self, group: Sequence[types.Rollout]) -> list[types.Rollout]:
    """What a group is without failed rollouts, and those without a reward.

    A component that reads no reward trains on what cannot be graded as well.
    """
    return [
      rollout
      for rollout in group
      if rollout.stop_reason != 'error'
      and not (self._reads_rewards and rollout.score.reward is None)
    ]

  def _metrics(self, played: Groups, kept: Groups) -> dict[str, float]:
    """What was done."""
    rollouts = [rollout for group in played for rollout in group]
    alive = rollout_metrics.survivors(rollouts)
    values = {
      **rollout_metrics.summarize(rollouts),
      **rollout_metrics.stops(rollouts),
      **(rollout_metrics.entropy(rollouts) if self.sampler.on_policy else {}),
      **rollout_metrics.samples(rollouts),
      **rollout_metrics.mixed_groups(kept),
      'errors': len(rollouts) - len(alive),
      'ungraded': len(alive) - sum(len(group) for group in kept),
    }
    found = {f'rollout/{key}': value for key, value in values.items()}
    if 'reward' in values:
      found['reward/mean'] = values['reward']
    return found


def make(
  name: str,
  entry: schema.EnvEntry,
  row_tokens: int,
  renderer: chat.Renderer,
  seed: int,
  index: int,
) -> EnvRun:
  """Builds an environment's run.

  Args:
    name: of the environment.
    entry: its options.
    row_tokens: the longest sample that can train.
    renderer: of its messages.
    seed: of the run.
    index: of the stage within the run.
  """
  env = envs.make(name, entry.env)
  # Another order for every stage and environment, from one seed.
  mixed = np.random.SeedSequence([seed, index, zlib.crc32(name.encode())])
  if isinstance(entry.sampler, schema.Dataset):
    sampler = samplers.DatasetSampler(entry.sampler, renderer, row_tokens)
  else:
    sampler = samplers.ModelSampler(entry.sampler, env, renderer, row_tokens)
  source = env.source('train', int(mixed.generate_state(1)[0]))
  return EnvRun(
    name=name,
    entry=entry,
    env=env,
    source=source,
    sampler=sampler,
    rewards=rewarding.Rewards(
      name, entry.rewards, functools.partial(_columns, source)
    ),
    algorithm=algorithms.make(entry.algorithm),
  )


def _columns(source: Any) -> set[str]:
  """Each key of `info` that some task has; makes all tasks."""
  return {key for task in source.take(len(source)) for key in task.info}
