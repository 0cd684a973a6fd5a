"""A client of OpenEnv servers: one WebSocket per episode.

    client:  {"type": "reset", "data": {"seed": 7}}
    server:  {"type": "observation", "data":
              {"observation": {...}, "reward": null, "done": false}}
    client:  {"type": "step", "data": {...the action...}}
    server:  an observation, or {"type": "error", "data": {"code": ..., ...}}

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

Only the package `websockets` is needed; it is imported when a session is
opened.
"""

import contextlib
import json
import math
from collections.abc import Mapping
from typing import Any

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import adapters, base
from posttrain.util import errors

REFUSALS = ('VALIDATION_ERROR', 'INVALID_JSON')  # of an action
_MAX_BYTES = 2**24  # of a message from the server
_MAX_REASON = 4000  # characters of a refusal, which become an observation


class OpenEnv(base.Env):
  """`schema.OpenEnv`."""

  blocking = True  # a step waits for a server
  repeats = False

  def __init__(self, name: str, cfg: schema.OpenEnv):
    """Checks the installation; connections are opened by episodes.

    Raises:
      ValueError: the package `websockets` is not installed.
    """
    adapters.load('websockets.sync.client', 'openenv', name)
    self.name, self._cfg, self.max_turns = name, cfg, cfg.max_turns

  def source(self, split: str, seed: int) -> base.Source:
    """Returns a task per seed; no seed is in both splits."""
    seeds = range(self._cfg.train_tasks)
    if split == 'eval':
      seeds = range(schema.MAX_SEEDS, schema.MAX_SEEDS + self._cfg.eval_tasks)
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
    from websockets import exceptions

    self._key = f'envs.{task.env}.env.url'  # a url may hold a password
    self._task, self._cfg = task, cfg
    self._stack, self._socket = contextlib.ExitStack(), None
    self._closed = exceptions.ConnectionClosed
    self._failed = (OSError, EOFError, exceptions.WebSocketException)
    self._rewards: list[float | None] = []  # per step
    self._refused = 0  # steps whose action was refused

  def reset(self) -> types.Messages:
    """Opens the session; the first observation is the prompt's last message.

    Raises:
      ConnectionError: there is no WebSocket server at the url; and as `step`.
    """
    from websockets.sync import client

    cfg, self._rewards, self._refused = self._cfg, [], 0
    if self._socket is None:
      try:
        self._socket = self._stack.enter_context(
          client.connect(
            cfg.url,
            open_timeout=cfg.connect_timeout,
            close_timeout=cfg.connect_timeout,
            # Pings keep an idle connection open. A server may answer late: it
            # has `message_timeout`.
            ping_timeout=None,
            max_size=_MAX_BYTES,
          )
        )
      except self._failed as error:
        raise ConnectionError(
          f'{self._key} must name a server that answers in connect_timeout='
          f'{cfg.connect_timeout:g} s: got {errors.describe(error)}'
        ) from None
    out = self._request('reset', {'seed': self._task.info['seed']})
    self._rewards = []
    return (*self._task.prompt[:-1], *out.messages)

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Sends the action to the server.

    Raises:
      ConnectionError: the server did not answer in time, or closed the
        connection.
      RuntimeError: the server answered with an error or with anything but an
        observation, or has no free session.
    """
    del truncated  # the server refuses an incomplete action
    try:
      if self._cfg.action_field is not None:
        return self._request('step', {self._cfg.action_field: text})
      try:
        action = {**json.loads(text)}
      except (ValueError, TypeError, RecursionError) as error:
        raise BadAction(f'an action must be a JSON object; {error}') from error
      return self._request('step', action)
    except BadAction as error:
      self._rewards.append(None)
      self._refused += 1
      message = {'role': 'user', 'content': f'error: {error}'}
      return types.StepOut((message,), done=False)

  def grade(self) -> types.Score:
    """Returns the sum of the rewards, None if no step had one.

    If every action was refused, it returns `refused_reward`.

    Metrics: `refused`, the steps whose action was refused; `all_refused`, 1 if
    it was every step.
    """
    rewards = [reward for reward in self._rewards if reward is not None]
    all_refused = 0 < self._refused == len(self._rewards)
    reward = sum(rewards) if rewards else None
    return adapters.score(
      self._cfg.refused_reward if all_refused else reward,
      self._cfg.correct_at,
      {'refused': self._refused, 'all_refused': float(all_refused)},
    )

  def close(self) -> None:
    """Closes the session and waits until the server has freed it."""
    if self._socket is not None:
      with contextlib.suppress(self._closed, TimeoutError):
        self._socket.send('{"type": "close"}')
        self._socket.recv(timeout=self._cfg.connect_timeout)
    self._stack.close()

  def _request(self, kind: str, data: Mapping[str, Any]) -> types.StepOut:
    """Sends a message and returns the server's reply; see `step`.

    Args:
      kind: 'reset' or 'step'.
      data: options of the reset, or the action.
    """
    try:
      # A server that closes sends the reason first: it can still be received.
      with contextlib.suppress(self._closed):
        self._socket.send(json.dumps({'type': kind, 'data': data}))
      message = self._socket.recv(timeout=self._cfg.message_timeout)
    except (TimeoutError, self._closed) as error:
      self._stack.close()  # a late answer must not be that of a later request
      raise ConnectionError(
        f'{self._key} must answer a {kind} in message_timeout='
        f'{self._cfg.message_timeout:g} s, with {_MAX_BYTES} bytes at most: '
        f'got {errors.describe(error)}'
      ) from None
    with contextlib.suppress(ValueError, KeyError, TypeError):
      reply = json.loads(message)
      data, error = reply['data'], reply['type'] == 'error'
      if error and kind == 'step' and data['code'] in REFUSALS:
        # The message, and those about each field of the action.
        fields = [
          f'{".".join(map(str, x["loc"]))}: {x["msg"]}'
          for x in data.get('errors') or ()
        ]
        reason = '; '.join((str(data['message']), *fields))
        raise BadAction(reason[:_MAX_REASON])
      reward = data.get('reward')
      if reward is None or math.isfinite(reward):
        shown = self._show(dict(data['observation']))
        self._rewards.append(reward)
        return types.StepOut((shown,), reward or 0.0, bool(data.get('done')))
    raise RuntimeError(
      f'{self._key} must answer a {kind} with an observation that has the '
      f'observation_field {self._cfg.observation_field!r}, and a finite reward '
      f'or null: got {errors.text(message)}'
    )

  def _show(self, observation: Mapping[str, Any]) -> types.Message:
    hidden, field = ('reward', 'done'), self._cfg.observation_field
    value: Any = {x: observation[x] for x in observation if x not in hidden}
    if field is not None:
      value = value[field]
    if not isinstance(value, str):
      value = json.dumps(value, ensure_ascii=False)
    return {'role': 'user', 'content': value}


class BadAction(Exception):
  """An action that the server refused; the message is the server's reason."""
