"""What runs in a worker process: episodes, or a reward function.

A worker has one host. Its methods are called by a handle (`workers.Handle`),
several at a time; they return plain values, and exceptions of a user's code as
values too. No jax, unless that code imports it.
"""

import asyncio
import os
from collections.abc import Mapping
from typing import Any

from posttrain import schema, types
from posttrain.envs import base, registry
from posttrain.rollout import env_calls
from posttrain.rollout.grading import worker
from posttrain.util import foreign, imports


class Episodes:
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
      method: 'open', which must be the first, 'step', 'end' or 'abandon'.
      args: its arguments.

    Returns:
      The result or its `EnvError`, and the last method of the environment that
      was called.
    """
    if method == 'open':
      env = self._envs[task.env]
      if isinstance(env, Exception):
        where = f'{foreign.text(task.env)}/{foreign.text(task.id)}'
        return env_calls.failure(where, 'make', env), 'make'
      self._episodes[uid] = env_calls.Calls(env, task)
    episode = self._episodes.get(uid)
    if episode is None:  # it has ended by itself
      assert method == 'abandon', method
      return None, 'close'
    result = episode.caught(getattr(episode, method), *args)
    if not episode.is_open:
      self._episodes.pop(uid)
    return result, episode.method

  def method(self, uid: int) -> str:
    """Returns the method of the environment that was called last."""
    return self._episodes[uid].method


class Rewards:
  """A reward function."""

  def __init__(self, path: str):
    """Takes the function's import path; imports nothing."""
    self._path = path
    self._runner = (
      asyncio.Runner()
    )  # it makes its loop with the first coroutine

  def start(self) -> int:
    """Imports the function; returns the process's id."""
    self._fn = imports.function(self._path, 'fn')
    return os.getpid()

  def call(self, message: bytes) -> dict[str, Any]:
    """Returns the reply to a call, see `grading.worker`."""
    reply = worker.answer(self._fn, message, self._runner)
    return {**reply, 'grown': 0}  # its memory is the cluster's concern
