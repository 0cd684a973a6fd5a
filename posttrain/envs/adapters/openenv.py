"""A client of OpenEnv servers: one WebSocket per episode.

1. A task is a seed. The question is on the server, so the task's prompt is a
   placeholder with as many messages as the real one.
2. If the server refuses an action (VALIDATION_ERROR, INVALID_JSON), the error
   is the observation, and the turn is spent. Any other error, a lost connection
   and a time-out raise an exception: the episode ends and is not graded.
3. An episode's reward is the sum of its steps' rewards; `refused_reward` if
   every action was refused.
4. The server must allow as many sessions as a step has episodes, or an
   evaluation has answers of the environment (`max_concurrent_envs`, 1 by
   default): all are reset before the first turn.
"""

import json
from collections.abc import Mapping
from typing import Any

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.envs.adapters import common, session
from posttrain.schema import adapters as options
from posttrain.util import foreign


class OpenEnv(base.Env):
  """`schema.OpenEnv`."""

  blocking = True  # a step waits for a server

  def __init__(self, name: str, cfg: schema.OpenEnv):
    """Checks the installation; connections are opened by episodes.

    Raises:
      ValueError: the package `websockets` is not installed.
    """
    common.load('websockets.asyncio.client', 'openenv', name)
    self.name, self._cfg, self.max_turns = name, cfg, cfg.max_turns

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns a task per seed; no seed is in both splits."""
    base.check_split(split)
    first = 0 if split == 'train' else options.MAX_SEEDS
    seeds = range(first, first + getattr(self._cfg, f'{split}_tasks'))
    fingerprint = sources.fingerprint(repr((self._cfg.prompt, seeds)).encode())
    return sources.Shuffled(base.Tasks(seeds, self._task), seed, fingerprint)

  def make(self, task: types.Task) -> 'Episode':
    return Episode(task, self._cfg)

  def _task(self, seed: int) -> types.Task:
    question = {'role': 'user', 'content': f'reset(seed={seed})'}
    system = {'role': 'system', 'content': self._cfg.prompt}
    return types.Task(
      id=str(seed),
      env=self.name,
      prompt=(system, question) if self._cfg.prompt else (question,),
      info={'seed': seed},
    )


class Episode:
  """One session with the server."""

  def __init__(self, task: types.Task, cfg: schema.OpenEnv):
    self._task, self._cfg = task, cfg
    self._session: session.Session | None = None
    self._rewards: list[float | None] = []  # per step
    self._refused = 0  # steps whose action was refused

  def reset(self) -> types.Messages:
    """Opens the session; the first observation is the prompt's last message."""
    self._rewards, self._refused = [], 0
    if self._session is None:
      cfg = self._cfg
      self._session = session.Session(
        cfg.url, cfg.connect_timeout, cfg.message_timeout
      )
    reply = self._session.request('reset', {'seed': self._task.info['seed']})
    return (*self._task.prompt[:-1], self._show(reply['observation']))

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Sends the action to the server."""
    del truncated  # the server refuses an incomplete action
    assert self._session is not None, 'reset comes first'
    try:
      reply = self._session.request('step', self._action(text))
    except session.BadAction as error:
      self._rewards.append(None)
      self._refused += 1
      return types.StepOut((_message(f'error: {error}'),), done=False)
    reward = reply.get('reward')
    self._rewards.append(None if reward is None else float(reward))
    return types.StepOut(
      (self._show(reply['observation']),),
      self._rewards[-1] or 0.0,
      done=bool(reply.get('done')),
    )

  def grade(self) -> types.Score:
    """Returns the sum of the rewards, None if no step had one.

    If every action was refused, it returns `refused_reward`.

    Metrics: `refused`, the steps whose action was refused; `all_refused`, 1 if
    it was every step.
    """
    rewards = [reward for reward in self._rewards if reward is not None]
    all_refused = 0 < self._refused == len(self._rewards)
    reward = sum(rewards) if rewards else None
    return common.score(
      self._cfg.refused_reward if all_refused else reward,
      self._cfg.correct_at,
      {'refused': self._refused, 'all_refused': float(all_refused)},
    )

  def close(self) -> None:
    open_session, self._session = self._session, None
    if open_session is not None:
      open_session.close()

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
          f'{field!r}, expected one of {foreign.text(sorted(shown))}'
        )
      shown = shown[field]
    if isinstance(shown, str):
      return _message(shown)
    return _message(json.dumps(shown, ensure_ascii=False))


def _message(text: str) -> types.Message:
  # Half a surrogate pair, which no UTF-8 has, becomes U+FFFD.
  text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
  return {'role': 'user', 'content': text}
