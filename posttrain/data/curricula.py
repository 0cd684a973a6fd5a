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
CHUNK = 2000  # tasks that are read at a time
_BINS = ('new', 'unsolved', 'below', 'band', 'above')


class Rates:
  """Recent pass rates: of tasks, or of pools."""

  def __init__(self, length: int, memory: int):
    """Starts without any; `memory`: the largest n."""
    self.counts = np.zeros(length, np.int64)  # n; 0 = p is not known
    self.rates = np.zeros(length)  # p
    self._memory = memory

  def observe(self, index: int, rate: float) -> None:
    """Adds the pass rate of a group."""
    self.counts[index] = min(self.counts[index] + 1, self._memory)
    self.rates[index] += (rate - self.rates[index]) / self.counts[index]

  def get_state(self) -> list[list[Any]]:
    """Returns [index, n, p] of all known ones."""
    known = np.flatnonzero(self.counts)
    columns = known, self.counts[known], self.rates[known]
    return [list(x) for x in zip(*(x.tolist() for x in columns), strict=True)]

  def set_state(self, state: Sequence[Sequence[Any]]) -> None:
    """Continues from a state of `get_state`."""
    self.counts[:], self.rates[:] = 0, 0
    for index, count, rate in state:
      self.counts[index], self.rates[index] = count, rate


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
    self.pools, pool_of = [], np.arange(count)
    if cfg.pool is not None:
      infos = [
        task.info
        for start in range(0, count, CHUNK)
        for task in source.take(min(start + CHUNK, count), start)
      ]
      if not any(cfg.pool in info for info in infos):
        known = sorted({x for info in infos for x in info})
        raise ValueError(
          f"{key}.pool must be a key of the tasks' info, one of {known}: got "
          f'{cfg.pool!r}'
        )
      values = [str(info.get(cfg.pool)) for info in infos]
      self.pools = sorted(set(values), key=lambda x: (len(x), x))
      index = {value: i for i, value in enumerate(self.pools)}
      pool_of = np.array([index[value] for value in values])
    self._pool_of = pool_of
    self._order = np.argsort(pool_of, kind='stable')  # the tasks, by pool
    self._starts = np.searchsorted(
      pool_of[self._order], np.arange(pool_of.max(initial=-1) + 2)
    )
    self._tasks = Rates(count, cfg.memory)
    self._rates = self._tasks
    if cfg.pool is not None:
      self._rates = Rates(len(self.pools), cfg.memory)
    self._draw = 0
    self._drawn: dict[str, int] = {}  # task's id -> its index, of a step
    self._update()

  def _update(self) -> None:
    """Computes what the draws need from the pass rates."""
    low, high, p = self._cfg.low, self._cfg.high, self._rates.rates
    weights = np.minimum(
      np.minimum(p / low if low else 1.0, 1),
      (1 - p) / (1 - high) if high < 1 else 1.0,
    )
    weights = np.where(self._rates.counts == 0, 1.0, weights)
    self._sums = np.cumsum(weights)
    p = self._tasks.rates
    self._rare = np.flatnonzero((p > 0) & (p < low))

  def __len__(self) -> int:
    """Returns the number of tasks."""
    return len(self._source)

  def __iter__(self) -> 'Curriculum':
    return self

  def __next__(self) -> types.Task:
    which, pool, place = sources.uniform(3, self._seed, self._draw)
    self._draw += 1
    tasks, cfg = self._order, self._cfg
    if cfg.floor <= which < cfg.floor + cfg.rare and len(self._rare):
      tasks = self._rare
    elif which >= cfg.floor and self._sums[-1] > 0:
      i = np.searchsorted(self._sums, pool * self._sums[-1], side='right')
      tasks = tasks[self._starts[i] : self._starts[i + 1]]
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
    cfg, rates = self._cfg, self._rates
    indices = [self._drawn[id] for id, _ in results]
    pools = self._pool_of[indices]
    names = _BINS
    if 0 < len(self.pools) <= MAX_POOLS:
      names, bins = self.pools, pools
    else:
      p = rates.rates[pools]
      bins = 1 + (p > 0) + (p >= cfg.low) * (p > 0) + (p > cfg.high)
      bins = np.where(rates.counts[pools] == 0, 0, bins)
    shares = np.bincount(bins, minlength=len(names)) / max(len(results), 1)
    for index, (_, rate) in zip(indices, results, strict=True):
      self._tasks.observe(index, rate)
      if rates is not self._tasks:
        rates.observe(self._pool_of[index], rate)
    self._update()
    self._drawn.clear()
    metrics = dict(
      zip((f'draws/{x}' for x in names), shares.tolist(), strict=True)
    )
    if names is self.pools:
      for pool in np.flatnonzero(rates.counts):
        metrics[f'pass_rate/{names[pool]}'] = float(rates.rates[pool])
    return metrics

  def get_state(self) -> dict[str, Any]:
    """Returns the number of draws and the pass rates, JSON-able."""
    return {
      'fingerprint': self._source.get_state().get('fingerprint'),
      'draw': self._draw,
      'tasks': self._tasks.get_state(),
      'pools': self._rates.get_state() if self.pools else [],
    }

  def set_state(self, state: Mapping[str, Any]) -> None:
    """Continues where `get_state` was called, with the same tasks and seed."""
    self._draw = state['draw']
    self._tasks.set_state(state['tasks'])
    if self.pools:
      self._rates.set_state(state['pools'])
    self._drawn.clear()
    self._update()
