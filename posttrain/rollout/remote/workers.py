"""Worker processes: which one an episode lives in, and lost ones.

    worker = workers.take()        # for one episode
    worker.handle.call(...)        # Lost, TimedOut
    workers.give_back(worker)      # or workers.lose(worker)

A worker that is lost, or is given up because a call exceeded its time limit, is
killed, with all its episodes, and another one starts. An episode gets the
started worker with the fewest episodes. Which worker that is depends on time,
and nothing else depends on it.
"""

import threading
from collections.abc import Callable
from typing import Any, Protocol


class Lost(Exception):
  """The worker's process, or its node, has ended; the text says how."""


class TimedOut(Exception):
  """The call did not return in time."""


class Handle(Protocol):
  """A worker process that starts or runs."""

  def has_started(self) -> bool:
    """Returns whether `start` would return, or raise, at once."""
    ...

  def start(self) -> None:
    """Waits until the host has started; from any thread, any number of times.

    Raises:
      Lost: the process has ended, or does not start.
    """

  def call(self, seconds: float, method: str, *args: Any) -> Any:
    """Returns the result of a method of the host.

    Raises:
      Lost: the process has ended.
      TimedOut: the call did not return within `seconds`.
    """

  def kill(self) -> None:
    """Ends the process at once; also if it has ended already."""


class Worker:
  """One worker and the number of its episodes."""

  def __init__(self, handle: Handle, alone: bool):
    """Takes a new process; `alone`: for a single episode."""
    self.handle, self.alone = handle, alone
    self.episodes, self.is_lost = 0, False


class Workers:
  """The workers of the environments of a stage; thread-safe."""

  def __init__(self, start: Callable[[], Handle], count: int):
    """Starts nothing yet.

    Args:
      start: begins to start a process, without waiting for it.
      count: the number of workers, without those of single episodes.
    """
    self._start, self._count = start, count
    self._lock = threading.Lock()
    self._shared: list[Worker] = []
    self.losses = 0  # workers that were lost or given up

  def begin(self) -> None:
    """Begins to start all workers that do not run."""
    with self._lock:
      self._fill()

  def _fill(self) -> None:
    while len(self._shared) < self._count:
      self._shared.append(Worker(self._start(), alone=False))

  def take(self, alone: bool = False) -> Worker:
    """Returns a worker for an episode, which has started.

    Args:
      alone: whether no other episode may live in it.

    Raises:
      Lost: it does not start.
    """
    with self._lock:
      self._fill()
      if alone:
        worker = Worker(self._start(), alone)
      else:
        worker = min(
          self._shared, key=lambda x: (not x.handle.has_started(), x.episodes)
        )
      worker.episodes += 1
    try:
      worker.handle.start()
    except Lost:
      self.lose(worker)
      raise
    return worker

  def give_back(self, worker: Worker) -> None:
    """Ends an episode's use of its worker."""
    with self._lock:
      worker.episodes -= 1
    if worker.alone:
      worker.handle.kill()

  def lose(self, worker: Worker) -> None:
    """Gives a worker up, with all its episodes; starts another one."""
    with self._lock:
      if worker.is_lost:
        return
      worker.is_lost = True
      self.losses += 1
      if not worker.alone:
        self._shared.remove(worker)
    worker.handle.kill()
    self.begin()
