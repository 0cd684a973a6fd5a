"""Tasks -> groups -> streams -> batch, as one iterator with a state.

    source -> sampler -> algorithm -> packing

1. For each of `prompts_per_step` groups an environment is chosen and a task
   drawn from its source.
2. The samplers make the rollouts; episodes of all environments are played at
   once. Those that failed, or that cannot be graded, are dropped from their
   groups and counted.
3. Each environment's algorithm writes streams on its groups.
4. The samples of all environments are packed into one batch.
"""

import collections
import dataclasses
import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from posttrain import algorithms, envs, packing, schema, types
from posttrain.algorithms import streams
from posttrain.chat import renderer as chat
from posttrain.rollout import driver as drivers
from posttrain.rollout import sampler as samplers
from posttrain.rollout import summary

UIDS_PER_STAGE = 2**40  # a rollout's uid is unique over the whole run
CHECKED = 2000  # tasks of a source that `check` looks at

Groups = list[list[types.Rollout]]


@dataclasses.dataclass(frozen=True)
class Item:
  """What one step trains on, and the pipeline's state after it."""

  batch: types.Batch
  metrics: dict[str, float]
  state: dict[str, Any]
  errors: tuple[str, ...] = ()  # of environments, one per dropped episode


@dataclasses.dataclass(frozen=True)
class EnvRun:
  """An environment with all that makes training samples of its tasks."""

  env: envs.base.Env
  source: Any  # of tasks: an iterator with get_state and set_state
  sampler: samplers.DatasetSampler | samplers.PolicySampler
  algorithm: algorithms.base.Algorithm
  group_size: int
  ratio: float


class Pipeline:
  """Infinite iterator of `Item`s; deterministic in the seed and the state."""

  def __init__(
      self,
      stage: schema.Stage,
      renderer: chat.Renderer,
      seed: int,
      index: int = 0,
  ):
    """Args: seed: of the run; index: of the stage within the run."""
    self._stage = stage
    self._batch = stage.batch
    self._seed = seed
    self._uid = index * UIDS_PER_STAGE
    self._pad_id = renderer.tokenizer.pad_id
    self._driver = self._scorer = None
    self._room = 1  # in units of `shape`
    self.envs = {
        name: _make_env(name, entry, stage.batch, renderer, seed, index)
        for name, entry in stage.envs.items()
    }
    ratios = np.array([run.ratio for run in self.envs.values()])
    self._ratios = np.cumsum(ratios) / ratios.sum()

  def connect(
      self, driver: drivers.Driver, scorer: algorithms.base.Scorer
  ) -> None:
    """Gives it who plays episodes and who scores under references."""
    self._driver, self._scorer = driver, scorer

  @property
  def live(self) -> bool:
    """Whether what it gives depends on the policy's weights."""
    return any(
        run.sampler.live or run.algorithm.reference == 'policy'
        for run in self.envs.values()
    )

  @property
  def references(self) -> dict[str, str]:
    """What algorithms score under, each with an environment that does."""
    return {
        run.algorithm.reference: name for name, run in self.envs.items()
        if run.algorithm.kl_beta or run.algorithm.component == 'ref_kl'
    }  # fmt: skip

  @property
  def shape(self) -> tuple[int, int, int]:
    """[micro_batches, rows, row_tokens]: room for one row per rollout."""
    rows = self._batch.micro_batch_tokens // self._batch.row_tokens
    group_size = max(run.group_size for run in self.envs.values())
    rollouts = self._batch.prompts_per_step * group_size
    return math.ceil(rollouts / rows), rows, self._batch.row_tokens

  def __iter__(self):
    return self

  def check(self) -> None:
    """Renders the first tasks of every source; draws none.

    Raises:
      ValueError: naming the row that cannot train, or a source without any.
    """
    for name, run in self.envs.items():
      if not len(run.source):
        raise ValueError(f'environment {name} must have tasks: got none')
      for task in run.source.take(CHECKED):
        run.sampler.check(task)

  def __next__(self) -> Item:
    names, draws = zip(
        *(self._draw() for _ in range(self._batch.prompts_per_step)),
        strict=True,
    )
    groups = collections.defaultdict(list)
    for name, group in zip(
        names, samplers.sample(draws, self._driver), strict=True
    ):
      groups[name].append(group)
    errors = summary.errors(
        [r for played in groups.values() for group in played for r in group],
        self._stage.rollout.max_errors,
    )
    samples, metrics = [], {}
    for name, played in groups.items():
      run = self.envs[name]
      kept = [_usable(run, group) for group in played]
      samples += streams.finalize(run.algorithm, kept, self._scorer)
      if run.sampler.live:
        metrics |= _rollout_metrics(name, played, kept)
    batch = self._pack(samples)
    metrics |= _batch_metrics(batch, len(samples))
    return Item(batch, metrics, self.get_state(), errors)

  def _draw(self) -> tuple[str, samplers.Draw]:
    """Draws an environment, one of its tasks, and the group's uids."""
    name = self._pick()
    run = self.envs[name]
    uids = range(self._uid, self._uid + run.group_size)
    draw = samplers.Draw(next(run.source), run.sampler, uids)
    self._uid = uids.stop
    return name, draw

  def _pick(self) -> str:
    """Chooses an environment by ratio, from (seed, next uid) alone."""
    names = list(self.envs)
    if len(names) == 1:
      return names[0]
    draw = np.random.default_rng([self._seed, self._uid]).random()
    return names[int(np.searchsorted(self._ratios, draw, side='right'))]

  def _pack(self, samples: list[types.Sample]) -> types.Batch:
    """Packs all samples; makes room where rollouts have more than one.

    The room stays, because the train step compiles anew for another shape.
    """
    micro_batches, rows, row_tokens = self.shape
    while True:
      batch, leftover = packing.pack(
          samples, row_tokens=row_tokens, rows=rows,
          micro_batches=micro_batches * self._room, envs=tuple(self.envs),
          pad_id=self._pad_id,
      )  # fmt: skip
      if not leftover:
        return batch
      assert len(samples) > micro_batches * self._room * rows
      self._room *= 2

  def get_state(self) -> dict[str, Any]:
    """JSON-able; with the seed it determines everything that follows."""
    return {
        'uid': self._uid,
        'envs': {
            name: {
                'source': run.source.get_state(),
                'algorithm': run.algorithm.get_state(),
            }
            for name, run in self.envs.items()
        },
    }

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes on where `get_state` was called."""
    self._uid = state['uid']
    for name, run in self.envs.items():
      run.source.set_state(state['envs'][name]['source'])
      run.algorithm.set_state(state['envs'][name]['algorithm'])


def _make_env(
    name: str,
    entry: schema.EnvEntry,
    batch: schema.Batch,
    renderer: chat.Renderer,
    seed: int,
    index: int,
) -> EnvRun:
  env = envs.make(name, entry.env)
  # Another order for every stage and environment, from one seed.
  mixed = np.random.SeedSequence([seed, index, zlib.crc32(name.encode())])
  if isinstance(entry.sampler, schema.Policy):
    sampler = samplers.PolicySampler(
        entry.sampler, env, renderer, batch.row_tokens
    )
  else:
    sampler = samplers.DatasetSampler(
        entry.sampler, renderer, batch.row_tokens
    )
  return EnvRun(
      env=env,
      source=env.source('train', int(mixed.generate_state(1)[0])),
      sampler=sampler,
      algorithm=algorithms.make(entry.algorithm),
      group_size=entry.group_size,
      ratio=entry.ratio,
  )


def _usable(
    run: EnvRun, group: Sequence[types.Rollout]
) -> list[types.Rollout]:
  """What a group is without failed rollouts, and those without a reward.

  A component that reads no reward trains on what cannot be graded as well.
  """
  graded = run.sampler.live and run.algorithm.component == 'rl'
  return [
      rollout for rollout in group if rollout.stop_reason != 'error'
      and not (graded and rollout.score.reward is None)
  ]  # fmt: skip


def _rollout_metrics(
    name: str, played: Groups, kept: Groups
) -> dict[str, float]:
  """What the policy did in one environment."""
  rollouts = [rollout for group in played for rollout in group]
  alive = summary.survivors(rollouts)
  values = {
      **summary.summarize(rollouts), **summary.entropy(rollouts),
      **summary.samples(rollouts), **summary.mixed_groups(kept),
      'errors': len(rollouts) - len(alive),
      'ungraded': len(alive) - sum(len(group) for group in kept),
  }  # fmt: skip
  return {f'rollout/{key}/{name}': value for key, value in values.items()}


def _batch_metrics(batch: types.Batch, samples: int) -> dict[str, float]:
  tokens = int((batch.segment_ids > 0).sum())
  _, rows, row_tokens = batch.ids.shape
  return {
      'batch/samples': samples,
      'batch/tokens': tokens,
      'batch/completion_tokens': int(batch.mask.sum()),
      'batch/micro_batches': int(batch.live),
      'batch/fill': tokens / max(int(batch.live) * rows * row_tokens, 1),
      **{
          f'batch/{name}_tokens': int(getattr(batch, f'{name}_count'))
          for name in types.COMPONENTS
      },
  }
