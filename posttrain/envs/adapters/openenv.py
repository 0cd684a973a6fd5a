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
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

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

  def __init__(self, name: str, cfg: schema.OpenEnv):
    """Checks the installation; connections are opened by episodes.

    Raises:
      ValueError: the package `websockets` is not installed.
    """
    adapters.load('websockets.sync.client', 'openenv', name)
    self.name, self._cfg, self.max_turns = name, cfg, cfg.max_turns

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
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
    self._task, self._cfg = task, cfg
    self._session: Session | None = None
    self._rewards: list[float] = []
    self._steps = self._refused = 0  # refused: the steps with such an action

  def reset(self) -> types.Messages:
    """Opens the session; the first observation is the prompt's last message."""
    self._rewards, self._steps, self._refused = [], 0, 0
    if self._session is None:
      self._session = Session(self._cfg)
    reply = self._session.request('reset', {'seed': self._task.info['seed']})
    return (*self._task.prompt[:-1], self._show(reply.observation))

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Sends the action to the server."""
    del truncated  # the server refuses an incomplete action
    assert self._session is not None, 'reset comes first'
    self._steps += 1
    try:
      reply = self._session.request('step', self._action(text))
    except BadAction as error:
      self._refused += 1
      message = {'role': 'user', 'content': f'error: {error}'}
      return types.StepOut((message,), done=False)
    if reply.reward is not None:
      self._rewards.append(reply.reward)
    return types.StepOut(
      (self._show(reply.observation),), reply.reward or 0.0, done=reply.done
    )

  def grade(self) -> types.Score:
    """Returns the sum of the rewards, None if no step had one.

    If every action was refused, it returns `refused_reward`.

    Metrics: `refused`, the steps whose action was refused; `all_refused`, 1 if
    it was every step.
    """
    all_refused = 0 < self._refused == self._steps
    reward = sum(self._rewards) if self._rewards else None
    return adapters.score(
      self._cfg.refused_reward if all_refused else reward,
      self._cfg.correct_at,
      {'refused': self._refused, 'all_refused': float(all_refused)},
    )

  def close(self) -> None:
    session, self._session = self._session, None
    if session is not None:
      session.close()

  def _action(self, text: str) -> Mapping[str, Any]:
    if self._cfg.action_field is not None:
      return {self._cfg.action_field: text}
    try:
      return {**json.loads(text)}
    except (ValueError, TypeError, RecursionError) as error:
      raise BadAction(f'an action must be a JSON object; {error}') from error

  def _show(self, observation: Mapping[str, Any]) -> types.Message:
    hidden, field = ('reward', 'done'), self._cfg.observation_field
    value: Any = {x: observation[x] for x in observation if x not in hidden}
    if field is not None:
      if field not in value:
        raise ValueError(
          'observation_field must name a field of the observation: got '
          f'{field!r}, expected one of {errors.text(sorted(value))}'
        )
      value = value[field]
    if not isinstance(value, str):
      value = json.dumps(value, ensure_ascii=False)
    return {'role': 'user', 'content': value}


class BadAction(Exception):
  """An action that the server refused; the message is the server's reason."""


class Reply(NamedTuple):
  """An observation of the server."""

  observation: Mapping[str, Any]
  reward: float | None
  done: bool


class Session:
  """An open connection, with its own environment on the server."""

  def __init__(self, cfg: schema.OpenEnv):
    """Opens the connection.

    Raises:
      ConnectionError: there is no WebSocket server at the url.
    """
    from websockets import exceptions
    from websockets.sync import client

    url = urllib.parse.urlsplit(cfg.url)  # shown without password and query
    self._url = f'{url.scheme}://{url.netloc.rpartition("@")[2]}{url.path}'
    self._cfg, self._closed = cfg, exceptions.ConnectionClosed
    self._stack = contextlib.ExitStack()
    try:
      self._socket = self._stack.enter_context(
        client.connect(
          cfg.url,
          open_timeout=cfg.connect_timeout,
          close_timeout=cfg.connect_timeout,
          # Pings keep an idle connection open. A server may answer late: it has
          # `message_timeout`.
          ping_timeout=None,
          max_size=_MAX_BYTES,
        )
      )
    except (OSError, EOFError, exceptions.WebSocketException) as error:
      raise ConnectionError(
        f'url must name a server that answers in connect_timeout='
        f'{cfg.connect_timeout:g} s: got {self._url!r}; {errors.text(error)}'
      ) from None

  def request(self, kind: str, data: Mapping[str, Any]) -> Reply:
    """Sends a message and returns the server's reply.

    Args:
      kind: 'reset' or 'step'.
      data: options of the reset, or the action.

    Raises:
      BadAction: the server refused the action.
      ConnectionError: the server did not answer in time, or closed the
        connection.
      RuntimeError: the server answered with an error or with anything but an
        observation, or has no free session.
    """
    try:
      # A server that closes sends the reason first: it can still be received.
      with contextlib.suppress(self._closed):
        self._socket.send(json.dumps({'type': kind, 'data': data}))
      message = self._socket.recv(timeout=self._cfg.message_timeout)
    except (TimeoutError, self._closed) as error:
      self._stack.close()  # a late answer must not be that of a later request
      raise ConnectionError(
        f'{self._url} must answer a {kind} in message_timeout='
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
        return Reply(dict(data['observation']), reward, bool(data.get('done')))
    raise RuntimeError(
      f'{self._url} must answer a {kind} with an observation, a finite reward '
      f'or null, and done: got {errors.text(message)}'
    )

  def close(self) -> None:
    """Closes the session and waits until the server has freed it."""
    with contextlib.suppress(self._closed, TimeoutError):
      self._socket.send('{"type": "close"}')
      self._socket.recv(timeout=self._cfg.connect_timeout)
    self._stack.close()
