"""Curricula: sources that draw tasks by their recent pass rates.

A pool is a task, or all tasks with the same value of a key of their `info`; p
is its pass rate, x that of a finished group.

    draw     one of all tasks, with probability `floor`; a rare one, with
             probability `rare`; else a pool in proportion to its weight w, then
             one of its tasks
    w        min(1, p / low, (1 - p) / (1 - high)); 1 if p is not known
    observe  n <- min(n + 1, memory), p <- p + (x - p) / n

A task is rare if it was solved, and p of the task itself is below `low`.

So w is 1 in the band [low, high] and falls to 0 at pass rates of 0 and 1, where
a group has no advantages. prime-rl's `difficulty_pool` has a constant weight in
each of three pools by the latest pass rate instead.

A draw depends on (seed, number of the draw, pass rates) alone, and the pass
rates change between steps alone: those of a step's groups are known to the
draws of the next step, with any `rollout.max_lag`, because a step's groups are
always finished before the next tasks are drawn.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import schema, types
from posttrain.data import sources

MAX_POOLS = 12  # with metrics of their own
_BINS = ('new', 'unsolved', 'below', 'band', 'above')


class Curriculum:
  """A source that draws another one's tasks, with replacement."""

  def __init__(self, source: Any, cfg: schema.Curriculum, seed: int, key: str):
    """Starts without pass rates.

    Args:
      source: has a length, `take(count, start)` and `get_state`.
      cfg: the options.
      seed: the seed of the draws.
      key: the stage's key of the options, for errors.

    Raises:
      ValueError: no task has the key of the pools.
    """
    self._source, self._cfg, self._seed = source, cfg, seed
    count = len(source)
    self.pools, self._pool_of = [], np.arange(count)  # pool of each task
    if cfg.pool is not None:
      infos = [task.info for task in source.take(count)]
      known = sorted(set().union(*infos))
      if cfg.pool not in known:
        raise ValueError(
          f"{key}.pool must be a key of the tasks' info, one of {known}: got "
          f'{cfg.pool!r}'
        )
      values = [str(info.get(cfg.pool)) for info in infos]
      pools, self._pool_of = np.unique(values, return_inverse=True)
      self.pools = pools.tolist()
    # Index of a task, or of a pool, as text -> [n, p].
    self._tasks: dict[str, list[Any]] = {}
    self._pools: dict[str, list[Any]] = {}
    self._draw = 0
    self._drawn: dict[str, int] = {}  # task's id -> its index, of a step
    self._update()

  def _update(self) -> None:
    """Computes what the draws need from the pass rates."""
    low, high = self._cfg.low, self._cfg.high
    known = self._pools if self.pools else self._tasks
    self._p = np.full(len(self.pools or self._pool_of), np.nan)
    self._p[[int(i) for i in known]] = [p for _, p in known.values()]
    below = self._p / low if low else 1.0
    above = (1 - self._p) / (1 - high) if high < 1 else 1.0
    weights = np.minimum(1.0, np.minimum(below, above))
    self._sums = np.cumsum(np.where(np.isnan(self._p), 1.0, weights))
    self._rare = sorted(
      int(i) for i, x in self._tasks.items() if 0 < x[1] < low
    )

  def __len__(self) -> int:
    """Returns the number of tasks."""
    return len(self._source)

  def __iter__(self) -> 'Curriculum':
    return self

  def __next__(self) -> types.Task:
    which, pool, place = sources.uniform(3, self._seed, self._draw)
    self._draw += 1
    tasks, cfg = range(len(self._pool_of)), self._cfg
    if cfg.floor <= which < cfg.floor + cfg.rare and len(self._rare):
      tasks = self._rare
    elif which >= cfg.floor and self._sums[-1] > 0:
      i = np.searchsorted(self._sums, pool * self._sums[-1], side='right')
      tasks = np.flatnonzero(self._pool_of == i)
    index = int(tasks[int(place * len(tasks))])
    (task,) = self._source.take(index + 1, index)
    self._drawn[task.id] = index
    return task

  def take(self, count: int, start: int = 0) -> tuple[types.Task, ...]:
    """Returns the first tasks in the source's order, from `start` on."""
    return self._source.take(count, start)

  def observe(self, results: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Adds the groups of a step.

    Args:
      results: id of the task and pass rate of each group, as drawn.

    Returns:
      The share of the groups of each pool, `draws/POOL`, and what is known of
      it after them, `pass_rate/POOL`. With more than `MAX_POOLS`, or a pool for
      each task, the shares of the groups whose pool had no pass rate when they
      were drawn (`draws/new`), or one of 0 (`draws/unsolved`), `below`, in the
      `band` or `above` it.
    """
    cfg, memory = self._cfg, self._cfg.memory
    indices = [self._drawn[id] for id, _ in results]
    pools = self._pool_of[indices]
    names, bins = self.pools, pools
    if not 0 < len(names) <= MAX_POOLS:
      p, names = self._p[pools], _BINS
      bins = 1 + (p > 0) + (p >= cfg.low) * (p > 0) + (p > cfg.high)
      bins = np.where(np.isnan(p), 0, bins)
    shares = np.bincount(bins, minlength=len(names)) / max(len(results), 1)
    for index, pool, (_, x) in zip(indices, pools, results, strict=True):
      for rates, i in ((self._tasks, index), (self._pools, pool)):
        if rates is self._tasks or self.pools:
          n, p = rates.get(str(i), (0, 0.0))
          n = min(n + 1, memory)
          rates[str(i)] = [n, p + (x - p) / n]
    self._update()
    self._drawn.clear()
    shares = zip(names, shares.tolist(), strict=True)
    metrics = {f'draws/{name}': share for name, share in shares}
    if names is self.pools:
      for i, (_, p) in self._pools.items():
        metrics[f'pass_rate/{names[int(i)]}'] = p
    return metrics

  def get_state(self) -> dict[str, Any]:
    """Returns the number of draws and the pass rates, JSON-able."""
    return {
      'fingerprint': self._source.get_state().get('fingerprint'),
      'draw': self._draw,
      'tasks': dict(self._tasks),
      'pools': dict(self._pools),
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where `get_state` was called, with the same tasks and seed."""
    self._draw = state['draw']
    self._tasks, self._pools = dict(state['tasks']), dict(state['pools'])
    self._drawn.clear()
    self._update()
