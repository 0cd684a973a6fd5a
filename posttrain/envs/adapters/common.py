"""Shared parts of the adapters: optional packages, awaiting, grades."""

import asyncio
import importlib
import inspect
from collections.abc import Mapping
from concurrent import futures
from types import ModuleType
from typing import Any

from posttrain import types


def load(module: str, extra: str, env: str) -> ModuleType:
  """Imports a module of an optional dependency.

  Args:
    module: dotted name of the module.
    extra: the extra of posttrain that installs it.
    env: the environment's name.

  Raises:
    ValueError: the module is not installed; names the extra.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if not error.name or not f'{module}.'.startswith(f'{error.name}.'):
      raise  # an import inside the installed module failed
    raise ValueError(
      f'{error.name} must be installed for envs.{env}.env: got none; pip '
      f"install 'posttrain[{extra}]'"
    ) from error


def settle(value: Any) -> Any:
  """Returns a value, or the result of awaiting it if it is awaitable.

  Also works in a thread with a running event loop, such as a notebook's.
  """
  if not inspect.isawaitable(value):
    return value

  async def wait():
    return await value

  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(wait())
  with futures.ThreadPoolExecutor(1) as pool:
    return pool.submit(lambda: asyncio.run(wait())).result()


def score(
  reward: float | None, correct_at: float | None, metrics: Mapping[str, float]
) -> types.Score:
  """Returns the grade of an episode.

  Args:
    reward: the episode's reward; None = not scorable.
    correct_at: smallest reward of a correct episode; None = unknown.
    metrics: the score's metrics.
  """
  known = reward is not None and correct_at is not None
  return types.Score(
    reward=reward,
    correct=reward >= correct_at if known else None,
    metrics=metrics,
  )
