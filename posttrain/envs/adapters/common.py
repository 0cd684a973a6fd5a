"""What the adapters share: optional packages, awaiting, grades."""

import asyncio
import importlib
import inspect
from collections.abc import Mapping
from concurrent import futures
from types import ModuleType
from typing import Any

from posttrain import types


def load(module: str, extra: str, env: str) -> ModuleType:
  """Imports a module that only an extra brings.

  Args:
    module: dotted name.
    extra: of the installation, which has the module's package.
    env: name of the environment that needs it.

  Raises:
    ValueError: it is not there; says how to get it.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    if not error.name or not f'{module}.'.startswith(f'{error.name}.'):
      raise  # it is there, but lacks something itself
    raise ValueError(
      f'{error.name} must be installed for envs.{env}.env: got none; pip '
      f"install 'posttrain[{extra}]'"
    ) from error


def settle(value: Any) -> Any:
  """Returns a value, or what it comes to where it is awaitable.

  Works in a notebook too, whose thread has a running event loop already.
  """
  if not inspect.isawaitable(value):
    return value

  async def outcome():
    return await value

  try:
    asyncio.get_running_loop()
  except RuntimeError:
    return asyncio.run(outcome())
  with futures.ThreadPoolExecutor(1) as other:
    return other.submit(lambda: asyncio.run(outcome())).result()


def score(
  reward: float | None, correct_at: float | None, metrics: Mapping[str, float]
) -> types.Score:
  """Returns the grade of an episode, `correct` if its reward is enough.

  Args:
    reward: None = not scorable.
    correct_at: the least reward of a correct episode; None = nobody knows.
    metrics: as they are.
  """
  known = reward is not None and correct_at is not None
  return types.Score(
    reward=reward,
    correct=reward >= correct_at if known else None,
    metrics=metrics,
  )
