"""The worker processes of a stage: those of its environments and rewards.

One `Remote` per stage serves all drivers of it, and all of its reward
functions. Nothing starts before the first episode, or the first reward.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

from posttrain import schema, types
from posttrain.rollout.remote import episodes, hosts, rewards, workers

# Begins to start a process with a host, `make()`, that serves a number of calls
# at a time.
Start = Callable[[Callable[[], Any], int], workers.Handle]


class Remote:
  """Episodes and reward functions in worker processes."""

  def __init__(
    self, cfg: schema.Rollout, envs: Mapping[str, schema.Env], start: Start
  ):
    """Starts nothing yet.

    Args:
      cfg: the number of workers, and the limits of calls.
      envs: options of the environments that live in workers, by name.
      start: begins to start a process.
    """
    self._start, self._timeout = start, cfg.env_timeout
    # All calls may meet in one worker, and one more asks for a method.
    make = functools.partial(
      start, functools.partial(hosts.Episodes, dict(envs)), cfg.env_threads + 1
    )
    self._workers = workers.Workers(make, cfg.num_workers)
    self._rewards: list[rewards.Worker] = []

  def begin(self) -> None:
    """Begins to start the environments' workers, if they do not run."""
    self._workers.begin()

  def episode(self, task: types.Task) -> episodes.Calls:
    """Returns the calls of a new episode."""
    return episodes.Calls(self._workers, self._timeout, task)

  def reward(self, path: str) -> rewards.Worker:
    """Returns the worker of a reward function, which is not started yet.

    Args:
      path: 'package.module:function'.
    """
    make = functools.partial(hosts.Rewards, path)
    worker = rewards.Worker(functools.partial(self._start, make, 1))
    self._rewards.append(worker)
    return worker

  @property
  def losses(self) -> int:
    """Workers that were lost, or given up, so far."""
    return self._workers.losses + sum(x.losses for x in self._rewards)
