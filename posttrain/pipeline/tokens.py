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
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from posttrain import algorithms, schema, types
from posttrain.chat import renderer as chat
from posttrain.data import packing
from posttrain.metrics import rollouts as rollout_metrics
from posttrain.pipeline import environment
from posttrain.rollout import driver as drivers
from posttrain.rollout import references as refs
from posttrain.rollout import sampler as samplers
from posttrain.rollout.grading import rewards

UIDS_PER_STAGE = 2**40  # a rollout's uid is unique over the whole run


@dataclasses.dataclass(frozen=True)
class Item:
  """What one step trains on, and the pipeline's state after it."""

  batch: types.Batch
  metrics: dict[str, float]
  state: dict[str, Any]
  # Of environments, one per dropped episode; of reward functions, per call.
  errors: tuple[str, ...] = ()


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
    self._players = self._scorer = None
    self._room = 1  # in units of `shape`
    self.envs = {
      name: environment.make(
        name, entry, stage.batch.row_tokens, renderer, seed, index
      )
      for name, entry in stage.envs.items()
    }
    ratios = np.array([run.entry.ratio for run in self.envs.values()])
    self._ratios = np.cumsum(ratios) / ratios.sum()

  def connect(
    self,
    players: Mapping[schema.Reference, drivers.Driver],
    scorer: algorithms.base.Scorer,
    judge: Callable[[schema.Reference], rewards.Judge] | None = None,
    reward_model: Callable[[str], rewards.Model] | None = None,
  ) -> None:
    """Gives it who plays episodes, who scores under references, who judges.

    Args:
      players: by the model they play with; 'policy' is the one that trains.
      scorer: of the algorithms' references.
      judge: makes the one that goes by a name.
      reward_model: the same.
    """
    self._players, self._scorer = players, scorer
    for run in self.envs.values():
      run.connect(judge, reward_model)

  @property
  def uses_policy(self) -> bool:
    """Whether what it gives depends on the policy's weights."""
    return any(run.sampler.on_policy for run in self.envs.values()) or any(
      refs.tracks_policy(reference) for reference in self.references
    )

  @property
  def can_prefetch(self) -> bool:
    """Whether a batch may be made while a step runs: no model makes it."""
    return not (self.uses_policy or self.references)

  @property
  def references(self) -> dict[schema.Reference, str]:
    """All models that are asked, each with a key of the stage that says so."""
    return {
      reference: key
      for run in self.envs.values()
      for reference, key in run.references.items()
    }

  @property
  def reward_models(self) -> dict[str, str]:
    """All that are asked, each with a key of the stage that says so."""
    return {
      name: key
      for run in self.envs.values()
      for name, key in run.reward_models.items()
    }

  @property
  def players(self) -> set[schema.Reference]:
    """Frozen models that play episodes."""
    models = {run.sampler.model for run in self.envs.values()}
    return models - {None, 'policy'}

  @property
  def shape(self) -> tuple[int, int, int]:
    """[micro_batches, rows, row_tokens]: room for one row per rollout."""
    rows = self._batch.micro_batch_tokens // self._batch.row_tokens
    group_size = max(run.entry.group_size for run in self.envs.values())
    rollouts = self._batch.prompts_per_step * group_size
    return math.ceil(rollouts / rows), rows, self._batch.row_tokens

  def __iter__(self):
    return self

  def check(self) -> None:
    """Renders the first tasks of every source it draws from; draws none.

    Raises:
      ValueError: naming the row that cannot train, or a source without any.
    """
    for run in self.envs.values():
      if run.entry.ratio:
        run.check()

  def __next__(self) -> Item:
    names, draws = zip(
      *(self._draw() for _ in range(self._batch.prompts_per_step)), strict=True
    )
    groups = collections.defaultdict(list)
    for name, group in zip(
      names, samplers.sample(draws, self._players), strict=True
    ):
      groups[name].append(group)
    errors = rollout_metrics.errors(
      [r for played in groups.values() for group in played for r in group],
      self._stage.rollout.max_errors,
    )
    samples, metrics = [], {}
    for name, played in groups.items():
      try:
        made, found, failed = self.envs[name].train_on(played, self._scorer)
      except rewards.TooManyFaults as error:
        error.errors = errors + error.errors
        raise
      samples, metrics = samples + made, metrics | found
      errors += failed
    batch = self._pack(samples)
    metrics |= _batch_metrics(batch, len(samples))
    return Item(batch, metrics, self.get_state(), errors)

  def _draw(self) -> tuple[str, samplers.Draw]:
    """Draws an environment, one of its tasks, and the group's uids."""
    name = self._pick()
    run = self.envs[name]
    uids = range(self._uid, self._uid + run.entry.group_size)
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
        samples,
        row_tokens=row_tokens,
        rows=rows,
        micro_batches=micro_batches * self._room,
        envs=tuple(self.envs),
        pad_id=self._pad_id,
      )
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


def _batch_metrics(batch: types.Batch, samples: int) -> dict[str, float]:
  tokens = int((batch.segment_ids > 0).sum())
  _, rows, row_tokens = batch.ids.shape
  return {
    'batch/samples': samples,
    'batch/tokens': tokens,
    'batch/completion_tokens': int(batch.mask.sum()),
    'batch/micro_batches': int(batch.num_micro_batches),
    'batch/fill': tokens
    / max(int(batch.num_micro_batches) * rows * row_tokens, 1),
    **{
      f'batch/{name}_tokens': int(getattr(batch, f'{name}_count'))
      for name in types.COMPONENTS
    },
  }
