"""A client of OpenEnv servers: one WebSocket per episode.

1. A task is a seed. What it asks is known to the server alone, so that a
   task's prompt is a stand-in, of as many messages as the real one.
2. An action that the server refuses (VALIDATION_ERROR, INVALID_JSON) is told
   to the policy, and costs it the turn. Every other error, a lost connection
   and a time-out raise: they end the episode, which is not graded.
3. An episode's reward is the sum of its steps' rewards.
4. The server must allow as many sessions as there are episodes in a step, or
   answers of an environment in an evaluation (`max_concurrent_envs`, which is
   1 by default): all are reset before the first turn.
"""

import json
from collections.abc import Mapping
from typing import Any

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.envs.adapters import common, session
from posttrain.schema import adapters as options


class OpenEnv(base.Env):
  """`schema.OpenEnv`."""

  blocking = True  # a step waits for a server

  def __init__(self, name: str, cfg: schema.OpenEnv):
    """Connects to nothing yet.

    Raises:
      ValueError: the package `websockets` is not installed.
    """
    common.load('websockets.sync.client', 'openenv', name)
    self.name, self._cfg, self.max_turns = name, cfg, cfg.max_turns

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns a task per seed; no seed is of both splits."""
    base.check_split(split)
    first = 0 if split == 'train' else options.MAX_SEEDS
    seeds = range(first, first + getattr(self._cfg, f'{split}_tasks'))
    made_of = sources.fingerprint(repr((self._cfg.prompt, seeds)).encode())
    return sources.Shuffled(base.Tasks(seeds, self._task), seed, made_of)

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task, self._cfg)

  def _task(self, seed: int) -> types.Task:
    asks = {'role': 'user', 'content': f'reset(seed={seed})'}
    system = {'role': 'system', 'content': self._cfg.prompt}
    return types.Task(
      id=str(seed),
      env=self.name,
      prompt=(system, asks) if self._cfg.prompt else (asks,),
      info={'seed': seed},
    )


class Episode:
  """One session of the server."""

  def __init__(self, task: types.Task, cfg: schema.OpenEnv):
    self._task, self._cfg = task, cfg
    self._session: session.Session | None = None
    self._rewards: list[float | None] = []  # per step
    self._refused = 0  # steps

  def reset(self) -> types.Messages:
    """Opens the session; the first observation ends the prompt."""
    self._rewards, self._refused = [], 0
    if self._session is None:
      cfg = self._cfg
      self._session = session.Session(
        cfg.url, cfg.connect_timeout, cfg.message_timeout
      )
    told = self._session.ask('reset', {'seed': self._task.info['seed']})
    return (*self._task.prompt[:-1], self._show(told['observation']))

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Hands the action to the server."""
    del truncated  # half an action is what the server says it is
    assert self._session is not None, 'reset comes first'
    try:
      told = self._session.ask('step', self._action(text))
    except session.BadAction as error:
      self._rewards.append(None)
      self._refused += 1
      return types.StepOut((_says(f'error: {error}'),), done=False)
    reward = told.get('reward')
    self._rewards.append(None if reward is None else float(reward))
    return types.StepOut(
      (self._show(told['observation']),),
      self._rewards[-1] or 0.0,
      done=bool(told.get('done')),
    )

  def grade(self) -> types.Score:
    """Returns the sum of the rewards, None if none was given.

    Metrics: `refused`, the steps whose action was none.
    """
    given = [reward for reward in self._rewards if reward is not None]
    return common.score(
      sum(given) if given else None,
      self._cfg.correct_at,
      {'refused': self._refused},
    )

  def close(self) -> None:
    ended, self._session = self._session, None
    if ended is not None:
      ended.close()

  def _action(self, text: str) -> Mapping[str, Any]:
    if self._cfg.action_field is not None:
      return {self._cfg.action_field: text}
    try:
      action = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise session.BadAction(
        f'an action must be a JSON object; {error}'
      ) from error
    if not isinstance(action, dict):
      raise session.BadAction('an action must be a JSON object')
    return action

  def _show(self, observation: Mapping[str, Any]) -> types.Message:
    field = self._cfg.observation_field
    shown = {
      key: value
      for key, value in observation.items()
      if key not in ('reward', 'done')
    }
    if field is not None:
      if field not in shown:
        raise ValueError(
          'observation_field must name a field of the observation: got '
          f'{field!r}, expected one of {sorted(shown)}'
        )
      shown = shown[field]
    if isinstance(shown, str):
      return _says(shown)
    return _says(json.dumps(shown, ensure_ascii=False))


def _says(text: str) -> types.Message:
  return {'role': 'user', 'content': text}
