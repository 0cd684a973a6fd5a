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
import urllib.parse
from collections.abc import Mapping
from typing import Any

from posttrain import schema, types
from posttrain.data import sources
from posttrain.envs import base
from posttrain.envs.adapters import common

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
    common.load('websockets.sync.client', 'openenv', name)
    self.name, self._cfg, self.max_turns = name, cfg, cfg.max_turns

  def source(self, split: str, seed: int) -> sources.Shuffled[types.Task]:
    """Returns a task per seed; no seed is in both splits."""
    base.check_split(split)
    first = 0 if split == 'train' else schema.MAX_SEEDS
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
    self._session: Session | None = None
    self._rewards: list[float | None] = []  # per step
    self._refused = 0  # steps whose action was refused

  def reset(self) -> types.Messages:
    """Opens the session; the first observation is the prompt's last message."""
    self._rewards, self._refused = [], 0
    if self._session is None:
      self._session = Session(self._cfg)
    reply = self._session.request('reset', {'seed': self._task.info['seed']})
    return (*self._task.prompt[:-1], self._show(reply['observation']))

  def step(self, text: str, truncated: bool) -> types.StepOut:
    """Sends the action to the server."""
    del truncated  # the server refuses an incomplete action
    assert self._session is not None, 'reset comes first'
    try:
      reply = self._session.request('step', self._action(text))
    except BadAction as error:
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
    session, self._session = self._session, None
    if session is not None:
      session.close()

  def _action(self, text: str) -> Mapping[str, Any]:
    if self._cfg.action_field is not None:
      return {self._cfg.action_field: text}
    try:
      action = json.loads(text)
    except (ValueError, RecursionError) as error:
      raise BadAction(f'an action must be a JSON object; {error}') from error
    if not isinstance(action, dict):
      raise BadAction('an action must be a JSON object')
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
          f'{field!r}, expected one of {str(sorted(shown))[:300]}'
        )
      shown = shown[field]
    if not isinstance(shown, str):
      shown = json.dumps(shown, ensure_ascii=False)
    return _message(shown)


def _message(text: str) -> types.Message:
  # Half a surrogate pair, which no UTF-8 has, becomes U+FFFD.
  text = text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')
  return {'role': 'user', 'content': text}


class BadAction(Exception):
  """An action that the server refused; the message is the server's reason."""


class Session:
  """An open connection, with its own environment on the server."""

  def __init__(self, cfg: schema.OpenEnv):
    """Opens the connection.

    Raises:
      ConnectionError: there is no WebSocket server at the url.
    """
    from websockets import exceptions
    from websockets.sync import client

    parts = urllib.parse.urlsplit(cfg.url)  # shown without password and query
    host = parts.netloc.rpartition('@')[2]
    self._url = f'{parts.scheme}://{host}{parts.path}'
    self._cfg, self._late = cfg, False
    self._closed_error = exceptions.ConnectionClosed
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
        f'{cfg.connect_timeout:g} s: got {self._url!r}; {str(error)[:300]}'
      ) from None

  def request(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Sends a message and returns the `data` of the server's reply.

    Args:
      kind: 'reset' or 'step'.
      data: options of the reset, or the action.

    Returns:
      {'observation': ..., 'reward': ..., 'done': ...}

    Raises:
      BadAction: the server refused the action.
      TimeoutError: the server did not answer in time.
      ConnectionError: the server closed the connection.
      RuntimeError: the server answered with an error or with anything but an
        observation, sent another message before, or has no free session.
    """
    try:
      message = self._exchange(json.dumps({'type': kind, 'data': data}))
    except TimeoutError:
      self._late = True
      raise TimeoutError(
        f'{self._url} must answer a {kind} in message_timeout='
        f'{self._cfg.message_timeout:g} s: got nothing whole'
      ) from None
    except self._closed_error as error:
      raise ConnectionError(
        f'{self._url} must stay connected, and send at most {_MAX_BYTES} bytes '
        f'at once: {str(error)[:300]}'
      ) from None
    try:
      answer = json.loads(message)
      name, data = answer['type'], dict(answer['data'])
    except (ValueError, KeyError, TypeError, RecursionError):
      raise RuntimeError(
        f'{self._url} must answer a {kind} with a JSON object that has a type '
        f'and an object data: got {message[:300]!r}'
      ) from None
    if name == 'observation':
      reward, done = data.get('reward'), data.get('done')
      if not (
        isinstance(data.get('observation'), dict)
        and isinstance(done, bool | None)
        and isinstance(reward, int | float | None)
        and (reward is None or abs(reward) < 1e300)
      ):
        raise RuntimeError(
          f'{self._url} must answer a {kind} with an object observation, a '
          f'finite reward or null, and done: got {str(data)[:300]}'
        )
      return data
    code, text = data.get('code'), _explain(data)
    if kind == 'step' and code in REFUSALS:
      raise BadAction(text[:_MAX_REASON])
    raise RuntimeError(
      f'{self._url} answers a {kind} with {code!s:.80}: {text[:300]}'
    )

  def close(self) -> None:
    """Closes the session and waits until the server has freed it."""
    with contextlib.suppress(self._closed_error, TimeoutError):
      if not self._late:
        self._socket.send('{"type": "close"}')
        self._socket.recv(timeout=self._cfg.connect_timeout)
    self._stack.close()

  def _exchange(self, message: str) -> str | bytes:
    """Returns the answer to a message, or an error that came before it.

    An observation that answers no request, or an earlier one, must not become
    the reward of this one.
    """
    if self._late:
      raise RuntimeError(f'{self._url} has not answered the last request')
    with contextlib.suppress(TimeoutError):
      early = self._socket.recv(timeout=0)  # only what has arrived already
      if 'observation' not in str(early):  # such as that the server is full
        return early
      raise RuntimeError(
        f'{self._url} must send one message for each request: got another one, '
        f'{early[:300]!r}'
      )
    # A server that closes sends the reason first: it can still be received.
    with contextlib.suppress(self._closed_error):
      self._socket.send(message)
    return self._socket.recv(timeout=self._cfg.message_timeout)


def _explain(data: Mapping[str, Any]) -> str:
  """Returns the message of an error, with those about each action field."""
  errors = data.get('errors')
  fields = (
    f'{".".join(map(str, error.get("loc") or ()))}: {error.get("msg")}'
    for error in (errors if isinstance(errors, list) else ())
    if isinstance(error, dict) and isinstance(error.get('loc'), list | None)
  )
  return '; '.join((str(data.get('message')), *fields))
