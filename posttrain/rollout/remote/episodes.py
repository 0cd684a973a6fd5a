"""The calls of an episode that lives in a worker process.

The interface is that of `env_calls.Calls`. A worker that is lost in the middle
of an episode is replaced, and the calls so far are made again in another one:

    worker 1   open  step  step  (lost)
    worker 2   open  step  step  step  end

That is sound if the environment's replies depend on the task and the policy's
turns alone. Replies of the second time are compared with those of the first;
if they differ, the episode fails. So does one that loses `MOST_LOSSES` workers
in one call. Since an episode that ends its process takes others with it, one
that loses `SHARED_LOSSES` in a call gets a worker of its own.

A call over the time limit is not made again: its worker is given up, and the
episode ends as it would in a thread.
"""

import hashlib
import itertools
from collections.abc import Callable
from typing import Any

from posttrain import types
from posttrain.chat import tool_specs
from posttrain.envs import base
from posttrain.rollout import env_calls, limits
from posttrain.rollout.remote import workers as workers_lib
from posttrain.util import foreign

# Workers lost in one call: before the episode gets one of its own, and in all.
SHARED_LOSSES, MOST_LOSSES = 2, 4
QUERY_SECONDS = 1.0  # for the name of the method that exceeds its time limit
# Method of the environment that a call begins with.
_METHODS = {'open': 'make', 'step': 'step', 'end': 'grade', 'abandon': 'close'}

_uids = itertools.count()


class Calls:
  """All calls into one episode; see `env_calls.Calls`."""

  def __init__(
    self, workers: workers_lib.Workers, timeout: float, task: types.Task
  ):
    """Calls nothing yet.

    Args:
      workers: the workers, one of which gets the episode.
      timeout: the time limit of a call, in seconds.
      task: the episode's task.
    """
    self._workers, self._timeout, self._task = workers, timeout, task
    self._uid = next(_uids)  # within this process, and so within a worker
    self._worker: workers_lib.Worker | None = None
    # Calls so far, each with the digest of its result.
    self._calls: list[tuple[str, tuple[Any, ...], bytes]] = []
    self._losses, self._is_left_behind = 0, False
    self.is_open = False
    self.method = 'make'

  @property
  def where(self) -> str:
    """'<env>/<task id>', for errors."""
    return f'{foreign.text(self._task.env)}/{foreign.text(self._task.id)}'

  def caught(self, fn: Callable[..., Any], *args: Any) -> Any:
    """Returns the result of a method of this class, or its `EnvError`."""
    return env_calls.caught(self, fn, *args)

  def open(self) -> types.Messages:
    """Makes the episode; returns its prompt."""
    self.is_open = True
    return self._call('open')

  def step(
    self, text: str, truncated: bool, style: tool_specs.Style | None = None
  ) -> tuple[types.Messages, float, bool]:
    """Passes a turn on; returns the new messages, the reward, and `done`."""
    return self._call('step', text, truncated, style)

  def end(self, has_turns: bool) -> types.Score:
    """Grades the episode, unless it has no turn, and closes it."""
    score = self._call('end', has_turns)
    self._close()
    return score

  def leave_behind(self) -> None:
    """Leaves the episode to a call that has not returned."""
    self._is_left_behind = True

  def abandon(self) -> None:
    """Closes the episode in any state; ignores its failures."""
    if not self._is_left_behind:
      self.close_after_call()

  def close_after_call(self) -> None:
    """Closes the episode after a call that was left behind has returned."""
    worker, self.method = self._worker, 'close'
    if worker is not None:
      try:
        self._at(worker, 'abandon')
      except Exception:  # the worker's, as the host catches those of a user
        self._workers.lose(worker)
    self._close()

  def _close(self) -> None:
    worker, self._worker, self.is_open = self._worker, None, False
    self._calls.clear()
    if worker is not None and not worker.is_lost:
      self._workers.give_back(worker)

  def _call(self, method: str, *args: Any) -> Any:
    """Makes a call, in another worker if that of the episode is lost.

    The clock of the caller does not run: each call has its own time limit,
    which a worker's start and earlier calls do not shorten.

    Raises:
      EnvError: the environment failed, or the episode cannot go on after the
        loss of its worker.
      TimeLimit: the call exceeded its time limit.
    """
    return limits.untimed(self._play)(method, args)

  def _play(self, method: str, args: tuple[Any, ...]) -> Any:
    while True:
      try:
        return self._try(method, args)
      except workers_lib.Lost as error:
        self._lose()
        self._losses += 1
        if self._losses >= MOST_LOSSES:
          raise env_calls.EnvError(
            f'{self.where}: the worker of an episode must outlive it: '
            f'{self._losses} were lost in one call, the last in {self.method}: '
            f'{foreign.text(error, 200)}'
          ) from None
      except workers_lib.TimedOut:
        self._lose()
        raise base.TimeLimit from None

  def _try(self, method: str, args: tuple[Any, ...]) -> Any:
    """Makes a call, after all earlier ones if the worker is a new one."""
    if self._worker is None:
      alone = self._losses >= SHARED_LOSSES
      self._worker = self._workers.take(alone)
      for earlier, its_args, digest in self._calls:
        if _digest(self._at(self._worker, earlier, *its_args)) != digest:
          raise env_calls.EnvError(
            f'{self.where}: {self.method} must give the same reply to the same '
            'turns: it gave another one after the loss of a worker'
          )
    result = self._at(self._worker, method, *args)
    if isinstance(result, env_calls.EnvError):
      raise result
    self._losses = 0
    self._calls.append((method, args, _digest(result)))
    return result

  def _at(self, worker: workers_lib.Worker, method: str, *args: Any) -> Any:
    """Returns the result of a call in a worker, which may be an `EnvError`."""
    self.method, call = _METHODS[method], worker.handle.call
    arguments = self._uid, self._task, method, args
    try:
      result, self.method = call(self._timeout, 'call', *arguments)
    except workers_lib.TimedOut:
      self._find_method(worker)
      raise
    return result

  def _find_method(self, worker: workers_lib.Worker) -> None:
    """Asks a worker for the method that exceeds its limit, for the error."""
    try:
      self.method = worker.handle.call(QUERY_SECONDS, 'method', self._uid)
    except (workers_lib.Lost, workers_lib.TimedOut):
      pass  # the method that the call began with

  def _lose(self) -> None:
    worker, self._worker = self._worker, None
    if worker is not None:
      self._workers.lose(worker)


def _digest(result: Any) -> bytes:
  """Returns a digest of a checked result, which has plain values alone."""
  return hashlib.blake2b(repr(result).encode(), digest_size=16).digest()
