"""A blocking environment with faults, and workers without processes."""

import concurrent.futures
import itertools
import os
import threading
import time

from posttrain import schema
from posttrain.envs import base
from posttrain.rollout import episodes, remote
from tests.rollout import fakes

_random = itertools.count()


class Talk(base.Env):
  """`fakes.Recall` with a fault in the second step of the tasks of `at`."""

  blocking = True

  def __init__(self, name, fault='', at=(), seconds=0.0):
    self.name, self.max_turns = name, 3
    self._fault, self._at, self._seconds = fault, at, seconds

  def source(self, split, seed):
    raise NotImplementedError

  def make(self, task):
    recall = fakes.Recall(max_turns=self.max_turns)
    is_bad = task.id in self._at
    return _Episode(recall, task, self._fault * is_bad, self._seconds)


class _Episode(fakes.RecallEpisode):
  def __init__(self, env, task, fault, seconds):
    super().__init__(env, task)
    self._fault, self._seconds = fault, seconds

  def step(self, text, truncated):
    # Episodes end in another order than they began.
    time.sleep(self._seconds * (ord(self._task.id[-1]) % 3))
    out = super().step(text, truncated)
    if len(self.turns) == 2:
      if self._fault == 'exits':
        os._exit(1)
      if self._fault == 'hangs':
        time.sleep(60)
    if self._fault == 'random':
      out.messages[0]['content'] += f'{next(_random)}'
    return out


def options(**kwargs):
  """Returns the options of `Talk` under the name of `fakes.spec`."""
  path = f'{__name__}:Talk'
  return {'recall': schema.CustomEnv(import_path=path, kwargs=kwargs)}


class Process:
  """A worker's handle whose host is in this process."""

  def __init__(self, cluster, make):
    self._cluster, self._host = cluster, make()
    self.tasks = set()  # ids of the tasks whose calls it has run
    self._ended = threading.Event()

  def has_started(self):
    return True

  def start(self):
    if self._cluster.never_starts:
      raise remote.Lost('no start')
    self._host.start()

  def call(self, seconds, method, *args):
    end = time.monotonic() + seconds
    if method == 'call' and self._cluster.loses(args):
      self.kill()
    if self._ended.is_set():
      raise remote.Lost('it was killed')
    if len(args) == 4:
      self.tasks.add(args[1].id)
    future = concurrent.futures.Future()

    def run():
      try:
        future.set_result(getattr(self._host, method)(*args))
      except BaseException as error:
        future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    while not self._ended.is_set():
      try:
        return future.result(0.005)
      except concurrent.futures.TimeoutError:
        if time.monotonic() > end:
          raise remote.TimedOut from None
    raise remote.Lost('it was killed')

  def kill(self):
    self._ended.set()


class Cluster:
  """Starts processes, which are lost in chosen calls."""

  def __init__(self, lost=(), exits=False, never_starts=False):
    """Takes the losses.

    Args:
      lost: numbers of the calls, from 0, whose process is lost.
      exits: whether a process is lost in each second step of a task 't1'.
      never_starts: whether no process starts.
    """
    self.lost, self._exits = lost, exits
    self.never_starts = never_starts
    self._lock, self.calls = threading.Lock(), []
    self.processes = []

  def start(self, make, concurrency):
    self.processes.append(Process(self, make))
    return self.processes[-1]

  def loses(self, args):
    with self._lock:
      self.calls.append(args)
      exits = self._exits and args[2:] == ('step', ('1b', False, None))
      return exits or len(self.calls) - 1 in self.lost


def play(cluster=None, count=4, timeout=30.0, num_workers=2, **kwargs):
  """Plays episodes of two or three turns.

  Args:
    cluster: a `Cluster`; None = threads.
    count: the number of episodes; their tasks are t0, t1, ...
    timeout: the time limit of a call.
    num_workers: the number of workers.
    **kwargs: of `Talk`.

  Returns:
    The rollouts, and the workers.
  """
  cfg = schema.Rollout(
    env_timeout=timeout, env_threads=4, workers='ray', num_workers=num_workers
  )
  envs = options(**kwargs)
  workers_of_stage = None
  if cluster is not None:
    workers_of_stage = remote.Remote(cfg, envs, cluster.start)
  env = Talk('recall', **kwargs)
  specs = [fakes.spec(uid, env, 2 + uid % 2) for uid in range(count)]
  scripts = {x.uid: [f'{x.uid}a', f'{x.uid}b', f'{x.uid}a'] for x in specs}
  engine = fakes.Engine(scripts)
  rollouts = episodes.Driver(
    engine, fakes.RENDERER, 64, cfg, workers_of_stage
  ).run(specs)
  return rollouts, workers_of_stage
