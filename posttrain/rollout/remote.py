"""Environments and reward functions in worker processes.

One `Remote` per stage serves all drivers of it, and all of its reward
functions. Nothing starts before the first episode, or the first reward. A
worker is a process with a host, `EpisodeHost` or `RewardHost`, whose methods
are called through a `Handle`, several at a time.

An episode gets the started worker with the fewest episodes. Which one that is
depends on time, and nothing else depends on it. A worker that is lost in the
middle of an episode is replaced, and the calls so far are made again:

    worker 1   open  step  step  (lost)
    worker 2   open  step  step  step  end

That is sound if the environment's replies depend on the task and the policy's
turns alone. Replies of the second time are compared with those of the first;
if they differ, the episode fails. So does one that loses `MOST_LOSSES` workers
in one call. Since an episode that ends its process takes others with it, one
that loses `SHARED_LOSSES` in a call gets a worker of its own.

A call over the time limit is not made again: its worker is killed, with all its
episodes, and the episode ends as it would in a thread. A call of a reward
function whose worker is lost is made once more.

The processes are Ray's actors (`Handle`); no other module imports Ray. Without
RAY_ADDRESS in the environment Ray starts on this machine with the first worker,
and ends with this process. With it, the workers are spread over the nodes of
that cluster, each of which must have this code, and the modules that import
paths name, installed or on its PYTHONPATH. Workers reserve no CPUs.

No jax, unless a user's code imports it; it is kept off accelerators then.
"""

import contextlib
import dataclasses
import functools
import hashlib
import importlib.util
import itertools
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from typing import Any

from posttrain import schema, types
from posttrain.envs import base, registry
from posttrain.rollout import calls, env_calls, worker
from posttrain.util import errors, imports

# Workers lost in one call: before the episode gets one of its own, and in all.
SHARED_LOSSES, MOST_LOSSES = 2, 4
REWARD_TRIES = 2  # workers that a call of a reward function may have
# Method of the environment that a call begins with.
_METHODS = {'open': 'make', 'step': 'step', 'end': 'grade', 'close': 'close'}

_uids = itertools.count()


class Lost(Exception):
  """The worker's process, or its node, has ended; the text says how."""


class TimedOut(Exception):
  """The call did not return in time."""


class EpisodeHost:
  """The open episodes of a worker, each with its environment's calls."""

  def __init__(self, options: Mapping[str, schema.Env]):
    """Takes the options of each environment, by name; builds nothing."""
    self._options = options
    self._envs: dict[str, base.Env | Exception] = {}
    self._episodes: dict[int, env_calls.Calls] = {}

  def start(self) -> int:
    """Builds the environments; returns the process's id.

    An environment that cannot be built fails its episodes instead.
    """
    for name, options in self._options.items():
      try:
        self._envs[name] = registry.make(name, options)
      except Exception as error:  # of a user's code, too
        self._envs[name] = error
    return os.getpid()

  def call(
    self, uid: int, task: types.Task, method: str, args: tuple[Any, ...]
  ) -> tuple[Any, str]:
    """Calls a method of an episode's `env_calls.Calls`.

    Args:
      uid: names the episode within this worker.
      task: the episode's task.
      method: 'open', which must be the first, 'step', 'end' or 'close'.
      args: its arguments.

    Returns:
      The result or its `EnvError`, and the last method of the environment that
      was called.
    """
    if method == 'open':
      env = self._envs[task.env]
      if isinstance(env, Exception):
        where = f'{errors.text(task.env)}/{errors.text(task.id)}'
        return env_calls.failure(where, 'make', env), 'make'
      self._episodes[uid] = env_calls.Calls(env, task)
    episode = self._episodes.get(uid)
    if episode is None:  # it has ended by itself
      assert method == 'close', method
      return None, 'close'
    result = episode.caught(method, *args)
    if not episode.is_open:
      self._episodes.pop(uid)
    return result, episode.method


class RewardHost:
  """A reward function."""

  def __init__(self, path: str):
    """Takes the function's import path; imports nothing."""
    self._path = path

  def start(self) -> int:
    """Imports the function; returns the process's id."""
    self._fn = imports.function(self._path, 'fn')
    return os.getpid()

  def call(self, message: bytes) -> worker.Reply:
    """Returns the reply to a call."""
    return worker.read_and_answer(self._fn, message)


@dataclasses.dataclass(eq=False)
class _Worker:
  """A worker of environments and the number of its episodes."""

  handle: 'Handle'
  episodes: int = 0
  is_lost: bool = False


class Remote:
  """Episodes and reward functions in worker processes; thread-safe."""

  def __init__(
    self,
    cfg: schema.Rollout,
    options: Mapping[str, schema.Env],
    start: Callable[[calls.Thunk, int], 'Handle'],
  ):
    """Starts nothing yet.

    Args:
      cfg: the number of workers, and the limits of calls.
      options: those of the environments that live in workers, by name.
      start: begins to start a process, as `Handle`.
    """
    self._start, self._count = start, cfg.num_workers
    self.timeout = cfg.env_timeout
    # All calls may meet in one worker.
    self._start_env = functools.partial(
      start, functools.partial(EpisodeHost, dict(options)), cfg.env_threads
    )
    self._lock = threading.Lock()
    self._shared: list[_Worker] = []
    self.losses = 0  # workers that were lost or given up

  def begin(self) -> None:
    """Begins to start the environments' workers that do not run."""
    with self._lock:
      self._fill()

  def _fill(self) -> None:
    while len(self._shared) < self._count:
      self._shared.append(_Worker(self._start_env()))

  def episode(self, task: types.Task) -> 'Calls':
    """Returns the calls of a new episode."""
    return Calls(self, task)

  def reward(self, path: str) -> 'Reward':
    """Returns the caller of a reward function, whose worker starts later.

    Args:
      path: 'package.module:function'.
    """
    make = functools.partial(RewardHost, path)
    return Reward(self, functools.partial(self._start, make, 1))

  def take(self, alone: bool) -> _Worker:
    """Returns a worker for an episode, which has started.

    Args:
      alone: whether no other episode may live in it.

    Raises:
      Lost: it does not start.
    """
    with self._lock:
      self._fill()
      if alone:
        taken = _Worker(self._start_env())
      else:
        taken = min(
          self._shared, key=lambda x: (not x.handle.has_started(), x.episodes)
        )
      taken.episodes += 1
    try:
      taken.handle.start()
    except Lost:
      self.lose(taken)
      raise
    return taken

  def give_back(self, taken: _Worker) -> None:
    """Ends an episode's use of its worker."""
    with self._lock:
      taken.episodes -= 1
    if taken not in self._shared:
      taken.handle.kill()

  def lose(self, lost: _Worker) -> None:
    """Gives a worker up, with all its episodes; starts another one."""
    with self._lock:
      if lost.is_lost:
        return
      lost.is_lost = True
      self.losses += 1
      if lost in self._shared:
        self._shared.remove(lost)
    lost.handle.kill()
    self.begin()


class Calls(env_calls.EpisodeCalls):
  """All calls into one episode, which lives in a worker."""

  def __init__(self, remote: Remote, task: types.Task):
    """Calls nothing yet; `remote`: one of its workers gets the episode."""
    super().__init__(task)
    self._remote = remote
    self._uid = next(_uids)  # within this process, and so within a worker
    self._worker: _Worker | None = None
    # Calls so far, each with the digest of its result.
    self._calls: list[tuple[str, tuple[Any, ...], bytes]] = []
    self._losses = 0

  def _make(self, method: str, *args: Any) -> Any:
    """Makes a call, in another worker if that of the episode is lost.

    The clock of the caller does not run: each call has its own time limit,
    which a worker's start and earlier calls do not shorten.

    Raises:
      EnvError: the environment failed, or the episode cannot go on after the
        loss of its worker.
      Late: the call exceeded its time limit.
    """
    if method != 'close':
      self._has_episode = True
      result = calls.untimed(self._play)(method, args)
      if method == 'end':
        self._give_back()
      return result
    self.method = 'close'
    if self._worker is not None:
      try:
        self._at(self._worker, 'close')
      except (Lost, TimedOut):
        self._remote.lose(self._worker)
    return self._give_back()

  def _give_back(self) -> None:
    taken, self._worker, self._has_episode = self._worker, None, False
    self._calls.clear()
    if taken is not None and not taken.is_lost:
      self._remote.give_back(taken)

  def _play(self, method: str, args: tuple[Any, ...]) -> Any:
    """Makes a call, after all earlier ones if the worker is a new one."""
    while True:
      try:
        if self._worker is None:
          self._worker = self._remote.take(self._losses >= SHARED_LOSSES)
          for earlier, its_args, digest in self._calls:
            if _digest(self._at(self._worker, earlier, *its_args)) != digest:
              raise env_calls.EnvError(
                f'{self.where}: {self.method} must give the same reply to the '
                'same turns: it gave another one after the loss of a worker'
              )
        result = self._at(self._worker, method, *args)
        if isinstance(result, env_calls.EnvError):
          raise result
        self._losses = 0
        self._calls.append((method, args, _digest(result)))
        return result
      except (Lost, TimedOut) as error:
        lost, self._worker = self._worker, None
        if lost is not None:
          self._remote.lose(lost)
        if isinstance(error, TimedOut):
          raise calls.Late(self._remote.timeout) from None
        self._losses += 1
        if self._losses >= MOST_LOSSES:
          raise env_calls.EnvError(
            f'{self.where}: the worker of an episode must outlive it: '
            f'{self._losses} were lost in one call, the last in {self.method}: '
            f'{errors.text(error, 200)}'
          ) from None

  def _at(self, taken: _Worker, method: str, *args: Any) -> Any:
    """Returns the result of a call in a worker, which may be an `EnvError`."""
    self.method = _METHODS[method]
    result, self.method = taken.handle.call(
      self._remote.timeout, 'call', self._uid, self._task, method, args
    )
    return result


def _digest(result: Any) -> bytes:
  """Returns a digest of a checked result, which has plain values alone."""
  return hashlib.blake2b(repr(result).encode(), digest_size=16).digest()


class Reward:
  """A reward function in a worker; called as `calls.Process` is."""

  def __init__(self, remote: Remote, start: Callable[[], 'Handle']):
    """Starts nothing yet.

    Args:
      remote: counts workers that are lost.
      start: begins to start a process.
    """
    self._remote, self._start = remote, start
    self._handle: Handle | None = None

  def __call__(self, call: worker.Call, clock: calls.Clock) -> worker.Reply:
    """Returns the reply to a call, which may be a fault.

    Raises:
      Late: the function exceeded its time limit.
    """
    if not isinstance(message := calls.pickled(call), bytes):
      return message
    lost = ''
    for _ in range(REWARD_TRIES):
      if self._handle is None:
        self._handle = self._start()
      try:
        self._handle.start()
        clock.restart()
        return self._handle.call(clock.timeout, 'call', message)
      except (Lost, TimedOut) as error:
        lost = errors.text(error, 200)
        self._remote.losses += 1
        self._handle.kill()
        self._handle = None
        if isinstance(error, TimedOut):
          raise calls.Late(clock.timeout) from None
    return worker.Reply(
      error=f'must return rewards: {REWARD_TRIES} workers were lost, the last: '
      f'{lost}'
    )


START_SECONDS = 300.0  # the longest start of a worker, imports included
OBJECT_STORE = 200 * 2**20  # bytes, of Ray on this machine
_VARIABLES = {'JAX_PLATFORMS': 'cpu'}
_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def is_installed() -> bool:
  """Returns whether Ray is installed; does not import it."""
  return importlib.util.find_spec('ray') is not None


def check(key: str) -> None:
  """Checks that Ray is installed; does not import it.

  Args:
    key: dotted config key of the option that needs it.

  Raises:
    ValueError: it is not.
  """
  if not is_installed():
    raise ValueError(
      f"{key} must be 'threads' in an installation without Ray: got 'ray'; "
      "run pip install 'posttrain[cluster]', or leave it out"
    )


class _Actor:
  """A host in its process."""

  def __init__(self, make: calls.Thunk):
    self._host = make()

  def start(self) -> None:
    self._host.start()

  def call(self, method: str, args: tuple[Any, ...]) -> Any:
    return getattr(self._host, method)(*args)


class Handle:
  """A worker process that starts or runs."""

  def __init__(self, make: calls.Thunk, concurrency: int):
    """Begins to start an actor with a host.

    Args:
      make: builds the host, in the actor; pickled.
      concurrency: the number of calls that the host serves at a time.
    """
    options = _actor_class().options(max_concurrency=concurrency)
    self._actor = options.remote(make)
    self._started = self._actor.start.remote()

  def has_started(self) -> bool:
    """Returns whether `start` would return, or raise, at once."""
    import ray

    return bool(ray.wait([self._started], timeout=0)[0])

  def start(self) -> None:
    """Waits until the host has started; from any thread, any number of times.

    Raises:
      Lost: the process has ended, or does not start.
    """
    try:
      _get(self._started, START_SECONDS)
    except TimedOut:
      raise Lost(f'it did not start within {START_SECONDS:g} s') from None
    except Exception as error:  # of the host
      if isinstance(error, Lost):
        raise
      raise Lost(errors.describe(error)) from error

  def call(self, seconds: float, method: str, *args: Any) -> Any:
    """Returns the result of a method of the host.

    Raises:
      Lost: the process has ended.
      TimedOut: the call did not return within `seconds`.
    """
    return _get(self._actor.call.remote(method, args), seconds)

  def kill(self) -> None:
    """Ends the process at once; also if it has ended already."""
    import ray

    with contextlib.suppress(ray.exceptions.RayError):
      ray.kill(self._actor)


def _get(reference: Any, seconds: float) -> Any:
  """Returns a result; raises what the actor raised, and `Lost` for its end."""
  import ray

  try:
    return ray.get(reference, timeout=seconds)
  except ray.exceptions.GetTimeoutError:
    raise TimedOut from None
  except ray.exceptions.RayTaskError as error:
    raise error.cause from None
  except ray.exceptions.RayError as error:
    (line, *_) = f'{error}'.strip().splitlines() or ['']
    raise Lost(f'{type(error).__name__}: {line}') from None


def connect(address: str | None = None, cpus: int | None = None) -> None:
  """Connects this process to Ray, unless it is connected.

  Args:
    address: the cluster's; None = that of RAY_ADDRESS, or else a new one on
      this machine, which ends with this process.
    cpus: the number that a new one has to share out; None = the machine's.

  Raises:
    ConnectionError: no cluster answers at the address.
  """
  import ray

  if ray.is_initialized():
    return
  os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
  options: dict[str, Any] = {'address': address}
  if not (address or os.environ.get('RAY_ADDRESS')):
    options = {
      'address': 'local',
      'num_cpus': cpus,
      'include_dashboard': False,
      'object_store_memory': OBJECT_STORE,
      '_node_ip_address': '127.0.0.1',
    }
  # Ray's own handlers of signals would end a run unsaved.
  is_main = threading.current_thread() is threading.main_thread()
  handlers = {x: signal.getsignal(x) for x in _SIGNALS if is_main}
  try:
    ray.init(logging_level=logging.WARNING, **options)
  finally:
    for number, handler in handlers.items():
      signal.signal(number, handler)


@functools.cache
def _actor_class() -> Any:
  """Connects to Ray; returns the class of actors."""
  import ray

  connect()
  return ray.remote(
    num_cpus=0,
    scheduling_strategy='SPREAD',
    runtime_env={'env_vars': _VARIABLES},
  )(_Actor)
