"""Tasks -> groups -> streams -> batch, as one iterator with a state.

    source -> sampler -> algorithm -> packing

For each of `prompts_per_step` groups an environment is chosen, a task drawn
from its source, rollouts made by its sampler, and streams written by its
algorithm. The samples of all environments are packed into one batch.
"""

import dataclasses
import math
import zlib
from typing import Any

import numpy as np

from posttrain import algorithms, envs, packing, schema, types
from posttrain.algorithms import streams
from posttrain.chat import renderer as chat
from posttrain.rollout import sampler

UIDS_PER_STAGE = 2**40  # a rollout's uid is unique over the whole run
CHECKED = 2000  # tasks of a source that `check` looks at


@dataclasses.dataclass(frozen=True)
class Item:
  """What one step trains on, and the pipeline's state after it."""

  batch: types.Batch
  metrics: dict[str, float]
  state: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class EnvRun:
  """An environment with all that makes training samples of its tasks."""

  env: envs.base.Env
  source: Any  # of tasks: an iterator with get_state and set_state
  sampler: sampler.DatasetSampler
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
    self._batch = stage.batch
    self._seed = seed
    self._uid = index * UIDS_PER_STAGE
    self._pad_id = renderer.tokenizer.pad_id
    self.envs = {
        name: _make_env(name, entry, stage.batch, renderer, seed, index)
        for name, entry in stage.envs.items()
    }
    ratios = np.array([run.ratio for run in self.envs.values()])
    self._ratios = np.cumsum(ratios) / ratios.sum()

  @property
  def shape(self) -> tuple[int, int, int]:
    """[micro_batches, rows, row_tokens]: room for one row per sample."""
    rows = self._batch.micro_batch_tokens // self._batch.row_tokens
    group_size = max(run.group_size for run in self.envs.values())
    samples = self._batch.prompts_per_step * group_size
    return math.ceil(samples / rows), rows, self._batch.row_tokens

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
        run.sampler.rollout(task, uid=0)

  def __next__(self) -> Item:
    samples = [
        sample
        for _ in range(self._batch.prompts_per_step)
        for sample in self._group()
    ]
    micro_batches, rows, row_tokens = self.shape
    batch, leftover = packing.pack(
        samples, row_tokens=row_tokens, rows=rows,
        micro_batches=micro_batches, envs=tuple(self.envs),
        pad_id=self._pad_id,
    )  # fmt: skip
    assert not leftover, 'a batch has a row for every sample'
    return Item(batch, _metrics(batch, len(samples)), self.get_state())

  def _group(self) -> list[types.Sample]:
    """Draws a task; returns the samples of its finished group."""
    run = self._pick()
    task = next(run.source)
    uids = range(self._uid, self._uid + run.group_size)
    self._uid = uids.stop
    group = [run.sampler.rollout(task, uid) for uid in uids]
    return streams.finalize(run.algorithm, [group])

  def _pick(self) -> EnvRun:
    """Chooses an environment by ratio, from (seed, next uid) alone."""
    runs = list(self.envs.values())
    if len(runs) == 1:
      return runs[0]
    draw = np.random.default_rng([self._seed, self._uid]).random()
    return runs[int(np.searchsorted(self._ratios, draw, side='right'))]

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
  return EnvRun(
      env=env,
      source=env.source('train', int(mixed.generate_state(1)[0])),
      sampler=sampler.DatasetSampler(
          entry.sampler, renderer, batch.row_tokens
      ),
      algorithm=algorithms.make(entry.algorithm),
      group_size=entry.group_size,
      ratio=entry.ratio,
  )


def _metrics(batch: types.Batch, samples: int) -> dict[str, float]:
  tokens = int((batch.segment_ids > 0).sum())
  _, rows, row_tokens = batch.ids.shape
  return {
      'batch/samples': samples,
      'batch/tokens': tokens,
      'batch/completion_tokens': int(batch.mask.sum()),
      'batch/micro_batches': int(batch.live),
      'batch/fill': tokens / max(int(batch.live) * rows * row_tokens, 1),
  }
