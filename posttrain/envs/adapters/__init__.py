"""Adapters of environments from other libraries.

    type       environment                                  needs posttrain[...]
    openenv    a server of OpenEnv, over its WebSocket      openenv
    verifiers  a v1 taskset of `verifiers`, in one turn     verifiers
    trl        a class of TRL's `environment_factory`       -
    reasoning_gym  a task of reasoning-gym, by its name     reasoning-gym

Not supported:

    openenv    http:// urls (every step would have an environment of its own),
               sessions of MCP and of harnesses, options of `reset` other than
               the seed
    verifiers  everything that needs its harness: rewards and metrics with a
               `runtime`, containers, `setup` and `finalize`, tools, further
               turns, images, a package's own `Env`; versions before 0.4
    trl        several classes in one environment (a run may have several
               environments), images, reward functions with an argument
               `environments`

A server may ignore the seed, and classes of TRL are not seeded: if they draw
random numbers, two runs with one seed differ.
"""

import importlib
from collections.abc import Mapping
from typing import Any

from posttrain import types


def load(module: str, extra: str, env: str) -> Any:
  """Imports and returns a module of an optional dependency.

  Args:
    module: dotted name of the module.
    extra: the extra of posttrain that installs it.
    env: the environment's name.

  Raises:
    ValueError: a module is not installed; names the extra.
  """
  try:
    return importlib.import_module(module)
  except ModuleNotFoundError as error:
    raise ValueError(
      f'{error.name} must be installed for envs.{env}.env: got none; pip '
      f"install 'posttrain[{extra}]'"
    ) from error


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
  correct = reward >= correct_at if known else None
  return types.Score(reward=reward, correct=correct, metrics=metrics)
