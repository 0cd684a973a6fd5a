"""Batches that are sampled ahead of the updates, with a lag that is exact.

    version s = the weights after step s
    batch n is sampled under version max(0, n - 1 - K), K = `rollout.max_lag`

    updates   |   1   |   2   |   3   |   4   |
    K = 0:     b1      b2      b3      b4          each waits for the other
    K = 1:     b1 b2   b3      b4      b5          batch n + 1 beside update n

Which version samples what is a function of the step alone, never of time. So
a run samples the same tokens whether its batches are made in a thread, beside
the updates, or in turns with them; and a batch cannot be older than K.

1. `publish(s, weights)` makes version s known; older ones that no later batch
   needs are forgotten.
2. A thread makes batch n as soon as its version is known, batch after batch;
   `__next__` waits for it. In turns, `__next__` makes it.
3. A checkpoint after step s holds versions max(0, s - K) to s - 1 beside the
   state, which is version s: batches that were made ahead are made again, from
   the same tasks, uids and weights. Those of an environment whose episodes
   cannot be repeated are stored instead, see `stored`.

Samplers that are no policy (data sets, frozen models) do not age.
"""

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from posttrain import algorithms, schema
from posttrain.pipeline import batches
from posttrain.util import watchdog

Weights = Mapping[str, Any]  # reference -> parameters that train
_CLOSE_SECONDS = 2.0  # the longest wait for the thread to end


class Ahead(batches.Pipeline):
  """A pipeline that gets its weights, and may run ahead of the updates."""

  uses_policy, can_prefetch = True, False

  def __init__(
    self,
    pipeline: batches.Pipeline,
    use: Callable[[Weights, int], None],
    stop: Callable[[], None],
    scorer: algorithms.base.Scorer,
    *,
    cfg: schema.Rollout,
    steps: range,
    in_thread: bool = False,
    clock: watchdog.Timers | None = None,
  ):
    """Starts before the first of the steps.

    Args:
      pipeline: makes the batches; nothing else may use it from now on.
      use: gives weights, and their version, to all that samples or scores.
      stop: ends a batch that is being sampled, by an exception.
      scorer: scores samples under the weights of the last `use`.
      cfg: has `max_lag` and `rounding_share`.
      steps: the steps that are left to train.
      in_thread: whether a thread makes the batches.
      clock: takes the seconds in which one side waits for the other; None = a
        new one.
    """
    self._pipeline, self._use, self._stop = pipeline, use, stop
    self._scorer, self._share = scorer, cfg.rounding_share
    self.max_lag, self._steps, self._in_thread = cfg.max_lag, steps, in_thread
    self._ages = cfg.in_flight or cfg.max_lag > 0 or pipeline.replays
    self._clock = clock or watchdog.Timers()
    self.learns_by_trial = pipeline.learns_by_trial
    self.tally = batches.Tally(pipeline.learns_by_trial)
    self._returned = self._made = steps.start - 1  # steps of the last items
    self._state = pipeline.get_state()  # after the last returned item
    self.tally.set_state(self._state.get('tally', {}))
    self._versions: dict[int, Weights] = {}
    # Step -> its item, or the exception that ended the thread.
    self._items: dict[int, batches.Item | BaseException] = {}
    self._changed = threading.Condition()  # guards the attributes
    self._thread: threading.Thread | None = None
    self._busy = self._paused = self._closed = False

  def restore(
    self, past: Sequence[Weights], stored: Sequence[Mapping[str, Any]]
  ) -> None:
    """Continues from a checkpoint, with what `past` and `stored` gave it."""
    for i, weights in enumerate(past):
      self._versions[max(0, self._returned - self.max_lag + i)] = weights
    for entry in stored:
      self._made += 1
      self._items[self._made] = item = batches.load_item(entry)
      self._pipeline.set_state(item.state)

  def publish(self, version: int, weights: Weights) -> None:
    """Makes a version known.

    Args:
      version: the step whose updates made it, the last trained one.
      weights: what trains, with its EMAs and snapshots, by reference name.
        They must outlive the batches that they sample: with `max_lag` > 0 they
        are copies.
    """
    with self._changed:
      self._versions[version] = weights
      for old in [x for x in self._versions if x < version - self.max_lag]:
        del self._versions[old]
      self._changed.notify_all()
    if self._in_thread and self._thread is None:
      self._thread = threading.Thread(
        target=self._run, name='sampler', daemon=True
      )
      self._thread.start()

  def past(self, step: int) -> tuple[Weights, ...]:
    """Returns the K versions that a checkpoint after a step needs."""
    before = [max(0, step - lag) for lag in range(self.max_lag, 0, -1)]
    return tuple(self._versions[x] for x in before)

  def stored(self) -> list[dict[str, Any]]:
    """Returns the batches that were made ahead and cannot be made again."""
    if self._pipeline.repeats:
      return []
    with self._changed:
      ahead = [self._items[x] for x in sorted(self._items)]
    return [x.stored() for x in ahead if isinstance(x, batches.Item)]

  def __next__(self) -> batches.Item:
    step = self._returned + 1
    start = time.perf_counter()
    with self._changed:
      while self._in_thread and step not in self._items:
        self._changed.wait()
      item = self._items.pop(step, None)
    if item is None:
      item = self._make(step)
    elif self.max_lag:
      self._clock.add('idle/learner', time.perf_counter() - start)
    if isinstance(item, BaseException):
      raise item
    self._returned, self._state = step, item.state
    assert self.tally is not None
    self.tally.set_state(item.state['tally'])
    return item

  @contextlib.contextmanager
  def paused(self) -> Iterator[None]:
    """Keeps the engine and the other models for the caller, between batches."""
    with self._changed:
      self._paused = True
      while self._busy:
        self._changed.wait()
    try:
      with self._pipeline.paused():
        yield
    finally:
      with self._changed:
        self._paused = False
        self._changed.notify_all()

  def close(self) -> None:
    """Ends the thread, and with it the batch that it makes."""
    with self._changed:
      self._closed = True
      self._changed.notify_all()
    if self._thread is not None:
      self._stop()
      self._thread.join(_CLOSE_SECONDS)
      if self._thread.is_alive():  # it waits for an environment or a reward
        return
    self._pipeline.close()

  def get_state(self) -> dict[str, Any]:
    """Returns the state after the last returned item."""
    return self._state

  def _version(self, step: int) -> int:
    """Returns the version that samples a step's batch."""
    return max(0, step - 1 - self.max_lag)

  def _run(self) -> None:
    """Makes the batches of all steps that are left; the thread's body."""
    while self._made + 1 in self._steps:
      step, start = self._made + 1, time.perf_counter()
      with self._changed:
        while not self._closed and (
          self._paused or self._version(step) not in self._versions
        ):
          self._changed.wait()
        if self._closed:
          return
        self._busy = True
      self._clock.add('idle/sampler', time.perf_counter() - start)
      try:
        with self._clock('rollout'):
          item = self._make(step)
      except BaseException as error:  # `__next__` raises it
        item = error
      with self._changed:
        self._items[step], self._busy = item, False
        self._changed.notify_all()
        if isinstance(item, BaseException):
          return

  def _make(self, step: int) -> batches.Item:
    """Samples and scores a step's batch under its version."""
    version = self._version(step)
    with self._changed:
      weights = self._versions[version]
    self._use(weights, version)
    item = next(self._pipeline)
    self._made = step
    if self._ages:
      with self._clock('scoring'):
        rounding = self._rounding(item, version)
      ages = batches.staleness(item.played, step - 1)
      metrics = {**item.metrics, **ages, **rounding}
      item = dataclasses.replace(item, metrics=metrics)
    return item

  def _rounding(self, item: batches.Item, version: int) -> dict[str, float]:
    """Returns how the logprobs of a version differ, sampled and scored.

    The rest of `mismatch/*`, which compares with the trained weights, is the
    lag's.
    """
    samples = [
      sample
      for played in item.played.values()
      for sample in played.samples
      if (sample.versions[1:] == version).any()
    ]
    if not (samples and self._share):
      return {}
    samples = samples[:: round(1 / self._share)]  # of all environments
    scored = self._scorer('policy', samples)
    ratios = [
      np.abs(scores - x.sampler_logprobs)[1:][x.versions[1:] == version]
      for x, scores in zip(samples, scored, strict=True)
    ]
    distance = np.concatenate(ratios).astype(np.float64)
    return {
      'mismatch/rounding/abs_mean': float(distance.mean()),
      'mismatch/rounding/max': float(distance.max()),
    }
